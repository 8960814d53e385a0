"""Which inputs the Hopper kernel supports, and how a call is divided into programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ssdprof.kernels.device import INTERPRETED, capability
from ssdprof.kernels.gdn.hopper.parts import MOST_ROWS
from ssdprof.kernels.gdn.hopper.rings import DIM
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.hopper.ring import CHUNK
from ssdprof.kernels.hopper.schedule import Cut, ceil_div, cut
from ssdprof.kernels.registry import Reasons, first_reason
from ssdprof.kernels.tensors import unreadable

# The model of the time of a cut, from measurements on an H200 (benchmarks/log/gdn.md).  Times are
# in units of one chunk of the second pass.
FIRST_PASS = 0.55  # time of a chunk of the first pass
START = 3.0  # time to start and end a program
REACH = 10  # chunks of a first pass with gates drawn as models are initialised
MOST_WAVES = 3  # most programs that run on an SM one after the other
# a cut with more than one wave must take less than this share of the time of a cut with one,
# because it has more first passes, whose lengths depend on the gates
WORTH_WAVES = 0.96
# least chunks of a segment for `first_segment_extra`: computing the extra takes half a chunk's time
WORTH_EXTRA = 8

# Parts of segments, for slow heads (`parts.py`).
# Segments have parts if more chunks than this precede the last segment, because the two additional
# launches take time whatever the gates.
WORTH_PARTS = 64
LEAST_PART = 8  # least chunks of a part
MOST_PARTS_OF_SEGMENT = 8
MOST_PARTS = 2048  # of all rows together, whose N and M take 256 MiB then
# Microseconds on an H200:
PART_CHUNK = 1.9  # a chunk of a part
PART_START = 6.0  # to start and end a part
PART_LAUNCHES = 5.0  # both launches
PART_STEP = 1.9  # a part in `_combine_kernel`
# Limits of first passes, in chunks:
LEAST_FIRST_PASS, MOST_FIRST_PASS = 48, 128  # between these, longest_first_pass is 3/8 of a segment
SHORT_SEGMENTS_FIRST_PASS = 64  # longest_first_pass if segments have up to LEAST_FIRST_PASS chunks
NEVER = 1 << 30  # least_first_pass: more chunks than any sequence has
PACKED = "packed: a program for each sequence and head"  # reason for a pack that is not cut


@dataclass(frozen=True, kw_only=True)
class GDNHopperConfig:
    """How a call is divided into programs.

    segment: chunks of 64 positions in one program's segment of one head
    persistent_programs: most programs, if each processes whole sequences one after the other; 0:
        one program per segment
    truncation_log2: log2 of the share of a state that a first pass may neglect where it begins;
        -inf: none
    first_segment_extra: whether the first segment of a sequence, which has no first pass, is longer
        than the others by the cost of the last segment's first pass, which the device computes for
        each head; `segment` is then the largest mean length
    transition_parts: number of equal parts of a segment, for heads that forget slowly (`parts.py`);
        0: no parts, and first passes of any length
    longest_first_pass: in chunks; if the first pass of a segment would be longer, parts of the
        segment before it take its place
    least_first_pass: in chunks; if that is so for the last segment of a head, it also is for all
        its segments that begin after more chunks than this
    transition_programs: most programs that compute the parts
    reason: for reports
    """

    segment: int
    persistent_programs: int = 0
    truncation_log2: float = -24.0
    first_segment_extra: bool = False
    transition_parts: int = 0
    longest_first_pass: int = 0
    least_first_pass: int = NEVER
    transition_programs: int = 132
    reason: str = ""

    @classmethod
    def choose(cls, inputs: GDNInputs, sm_count: int, *, batch_invariant: bool) -> GDNHopperConfig:
        """Choose by the length and number of sequences, the number of heads and the multiprocessors
        of the GPU.  For a pack, the length is that of all sequences together.

        With `batch_invariant`, choose as for one sequence, so that a sequence's result is bitwise
        the same in any batch.  A pack is then not cut, because the host knows only the length of
        the whole pack, which depends on the other sequences.
        """
        nchunks = ceil_div(inputs.length, CHUNK.value)
        heads = inputs.v.shape[2]
        if batch_invariant and inputs.cu_seqlens is not None:
            return cls(segment=nchunks, reason=PACKED)
        sequences = 1 if batch_invariant else inputs.sequences
        pairs = sequences * heads
        chosen_cut = cut(nchunks, pairs, sm_count, candidates=_even_cuts, time=_estimated_time)
        if chosen_cut.shares:  # as many pairs as multiprocessors, or more
            if inputs.cu_seqlens is not None:
                return cls(segment=nchunks, reason=PACKED)
            reason = f"whole sequences for {sm_count} programs"
            return cls(segment=nchunks, persistent_programs=sm_count, reason=reason)
        config = cls(segment=chosen_cut.segment)
        # the number of parts depends on the number of heads in the batch
        if not batch_invariant:
            config = _with_parts(config, inputs, nchunks, sm_count)
        extra = (
            WORTH_EXTRA <= config.segment < nchunks
            and not config.transition_parts
            and inputs.cu_seqlens is None
        )
        programs = inputs.sequences * heads + row_count(inputs, config.segment)
        reason = (
            f"least estimated time: {programs} programs of {config.segment} chunks "
            f"on {sm_count} SMs"
        )
        return replace(config, first_segment_extra=extra, reason=reason)


def _even_cuts(nchunks: int, pairs: int, sm_count: int) -> Iterator[Cut]:
    """Cuts into segments of equal length, except the last one of a sequence, with up to MOST_WAVES
    programs per SM.  There are fewer pairs than SMs.
    """
    for count in range(1, min(nchunks, MOST_WAVES * sm_count // pairs) + 1):
        yield Cut(segment=ceil_div(nchunks, count))


def _estimated_time(candidate: Cut, nchunks: int, pairs: int, sm_count: int) -> float:
    """The time of a cut in chunks of the second pass, if an SM starts a program as soon as its
    previous one ends.  With more than one wave of programs it is increased, as WORTH_WAVES says.
    """
    chunks = candidate.segment
    programs = pairs * ceil_div(nchunks, chunks)
    program_time = START + chunks + FIRST_PASS * min(REACH, nchunks - chunks)
    time = ceil_div(programs, sm_count) * program_time
    return time if programs <= sm_count else time / WORTH_WAVES


def _with_parts(
    config: GDNHopperConfig, inputs: GDNInputs, nchunks: int, sm_count: int
) -> GDNHopperConfig:
    """For long sequences with up to MOST_ROWS rows, the configuration with parts of segments, and
    with the segment rounded up to whole parts; for others, the configuration unchanged.
    """
    rows = row_count(inputs, config.segment)
    if nchunks - config.segment <= WORTH_PARTS or rows > MOST_ROWS:
        return config
    most_parts = min(config.segment // LEAST_PART, MOST_PARTS_OF_SEGMENT, MOST_PARTS // rows)
    boundaries = rows // (inputs.sequences * inputs.v.shape[2])  # between segments of a sequence

    def time(parts: int, slow_rows: int) -> float:
        """Microseconds of both launches with so many parts per segment, if `slow_rows` of all rows
        have parts.
        """
        rounds = ceil_div(slow_rows * parts, sm_count)
        part_time = ceil_div(config.segment, parts) * PART_CHUNK + PART_START
        return rounds * part_time + PART_LAUNCHES + boundaries * parts * PART_STEP

    def expected_time(parts: int) -> float:
        """The time, in microseconds, of three calls in which all rows have parts, and one in which
        a quarter of them have.
        """
        return 3 * time(parts, rows) + time(parts, ceil_div(rows, 4))

    powers_of_two = (1 << k for k in range(max(most_parts, 1).bit_length()))
    parts = min(powers_of_two, key=expected_time)
    segment = parts * ceil_div(config.segment, parts)
    longest = min(max(3 * segment // 8, LEAST_FIRST_PASS), MOST_FIRST_PASS)
    least = NEVER
    if segment <= longest:
        # The second segment of a slow head could have a first pass over all chunks before it, and
        # only later segments could not.  With this least_first_pass, all of them have parts.
        longest = SHORT_SEGMENTS_FIRST_PASS
        least = 3 * segment // 4
    return replace(
        config,
        segment=segment,
        transition_parts=parts,
        longest_first_pass=longest,
        least_first_pass=least,
        transition_programs=sm_count,
    )


def row_count(inputs: GDNInputs, segment: int) -> int:
    """The number of rows of `parts.py`: segments of all heads and sequences that do not begin their
    sequence.  An upper bound for packed sequences, of which each might have all positions.
    """
    segments = ceil_div(ceil_div(inputs.length, CHUNK.value), segment)
    return int((segments - 1) * inputs.sequences * inputs.v.shape[2])


def unsupported(inputs: GDNInputs) -> str:
    """Why this kernel does not support `inputs`; empty if it does."""
    dims = inputs.q.shape[3], inputs.v.shape[3]
    if dims != (DIM.value, DIM.value):
        return f"K {dims[0]} with V {dims[1]}"
    return unsupported_otherwise(inputs)


@first_reason
def unsupported_otherwise(inputs: GDNInputs) -> Reasons:
    """Why this kernel does not support `inputs`, whatever K and V are; empty if it does."""
    reason = untiled(inputs, k=inputs.k, v=inputs.v)
    yield reason != "", reason
    yield inputs.q.dtype == torch.float32, "fp32 inputs"
    yield inputs.scale_or_default <= 0, f"a scale of {inputs.scale_or_default}"


@first_reason
def untiled(inputs: GDNInputs, **tensors: torch.Tensor) -> Reasons:
    """Why the Hopper kernels of GDN and of Kimi Delta Attention cannot run here, or cannot read q
    and `tensors` in tiles; empty if they can.
    """
    q = inputs.q
    positions = inputs.slot_count(CHUNK.value) * CHUNK.value  # with padding to whole chunks
    yield INTERPRETED or not q.is_cuda or capability(q) != (9, 0), "anything but a Hopper GPU"
    yield positions * inputs.v.shape[2] >= 2**31, "2^31 positions of all heads"
    reason = unreadable(q=q, **tensors)
    yield reason != "", reason
