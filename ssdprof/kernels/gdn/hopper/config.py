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

# Times are in units of one chunk of the second pass.
FIRST_PASS = 0.55  # time of a chunk of the first pass
# least chunks of a segment for `first_segment_extra`: computing the extra takes half a chunk's time
WORTH_EXTRA = 8
START = 3.0  # time to start and end a program
REACH = 10  # chunks of a first pass with gates as models are initialised
MOST_WAVES = 3  # programs that run on an SM one after the other
# more than one wave only below this share of the time of one: more segments, more first passes
WORTH_WAVES = 0.96
# Slow heads are computed in parts if more chunks than this precede the last segment.  This takes
# two more launches, whatever the gates.
WORTH_PARTS = 64
MOST_PARTS_OF_SEGMENT, MOST_PARTS = 8, 2048  # MOST_PARTS: of all rows, 256 MiB
# Microseconds on an H200: a chunk of a part, a part, both launches, a step of the second one
PART_CHUNK, PART_START, PART_LAUNCHES, PART_STEP = 1.9, 6.0, 5.0, 1.9
LEAST_PART = 8  # chunks
LEAST_FIRST_PASS, MOST_FIRST_PASS = 48, 128  # bounds of longest_first_pass, in chunks
SHORT_SEGMENTS_FIRST_PASS = 64  # the same for segments that are not longer
NEVER = 1 << 30
PACKED = "packed: a program for each sequence and head"


@dataclass(frozen=True, kw_only=True)
class GDNHopperConfig:
    """How a call is divided into programs.

    segment: chunks of 64 positions in one program's segment of one head.
    persistent_programs: number of programs that each process several whole sequences; 0: one
    program per segment.
    truncation_log2: log2 of the share of a state that a first pass may neglect where it begins;
    -inf: none.
    first_segment_extra: the first segment of a sequence has no first pass, and is longer than the
    others by the cost of theirs, which the device computes for each head; `segment` is then the
    mean length.
    transition_parts: equal parts of a segment, for heads whose first pass would be longer than
    longest_first_pass; in heads that forget that slowly before the last segment, all segments after
    more than least_first_pass chunks have parts (`parts.py`); 0: first passes may have any length.
    transition_programs: number of programs that compute those parts.
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
        """Choose by the length and number of sequences, the number of heads and the GPU.

        With `batch_invariant`, choose as for one sequence, so that a sequence's result is bitwise
        the same in any batch.  Packed sequences are then not cut, because the host does not know
        their lengths.
        """
        nchunks = ceil_div(inputs.v.shape[1], CHUNK.value)
        heads = inputs.v.shape[2]
        if batch_invariant and inputs.cu_seqlens is not None:
            return cls(segment=nchunks, reason=PACKED)
        sequences = 1 if batch_invariant else inputs.sequences
        pairs = sequences * heads
        segments = cut(nchunks, pairs, sm_count, candidates=_even_cuts, time=_estimated_time)
        if segments.shares:
            if inputs.cu_seqlens is not None:
                return cls(segment=nchunks, reason=PACKED)
            reason = f"whole sequences for {sm_count} programs"
            return cls(segment=nchunks, persistent_programs=sm_count, reason=reason)
        programs = pairs * segments.count(nchunks)
        reason = (
            f"least estimated time: {programs} programs of {segments.segment} chunks "
            f"on {sm_count} SMs"
        )
        config = cls(segment=segments.segment, reason=reason)
        if not batch_invariant:  # parts depend on the number of rows, and that on the batch
            config = _with_parts(config, inputs, nchunks, sm_count)
        extra = (
            WORTH_EXTRA <= config.segment < nchunks
            and not config.transition_parts
            and inputs.cu_seqlens is None
        )
        return replace(config, first_segment_extra=extra)


def _even_cuts(nchunks: int, pairs: int, sm_count: int) -> Iterator[Cut]:
    for count in range(1, min(nchunks, MOST_WAVES * sm_count // pairs) + 1):
        yield Cut(segment=ceil_div(nchunks, count))


def _estimated_time(segments: Cut, nchunks: int, pairs: int, sm_count: int) -> float:
    """The time of a cut, if an SM starts a program as soon as its last one ends."""
    chunks = segments.segment
    programs = pairs * ceil_div(nchunks, chunks)
    of_program = START + chunks + FIRST_PASS * min(REACH, nchunks - chunks)
    time = ceil_div(programs, sm_count) * of_program
    return time if programs <= sm_count else time / WORTH_WAVES


def _with_parts(
    config: GDNHopperConfig, inputs: GDNInputs, nchunks: int, sm_count: int
) -> GDNHopperConfig:
    """For long sequences, divide segments into parts, and round the segment up to whole parts."""
    rows = row_count(inputs, config.segment)
    if nchunks - config.segment <= WORTH_PARTS or rows > MOST_ROWS:
        return config
    most = min(config.segment // LEAST_PART, MOST_PARTS_OF_SEGMENT, MOST_PARTS // rows)
    boundaries = rows // (inputs.sequences * inputs.v.shape[2])

    def time(parts: int, share: int) -> float:
        """Microseconds if one of `share` heads is slow."""
        rounds = ceil_div(ceil_div(rows, share) * parts, sm_count)
        each = ceil_div(config.segment, parts) * PART_CHUNK + PART_START
        return rounds * each + PART_LAUNCHES + boundaries * parts * PART_STEP

    def expected_time(parts: int) -> float:
        """The sum for three calls whose heads are all slow, and one where a quarter of them is."""
        return 3 * time(parts, 1) + time(parts, 4)

    parts = min((1 << k for k in range(max(most, 1).bit_length())), key=expected_time)
    segment = parts * ceil_div(config.segment, parts)
    longest = min(max(3 * segment // 8, LEAST_FIRST_PASS), MOST_FIRST_PASS)
    least = NEVER
    if segment <= longest:  # the whole past of the second segment is a short first pass
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
    """Segments of all heads that do not begin their sequence; an upper bound for packed
    sequences.
    """
    segments = ceil_div(ceil_div(inputs.v.shape[1], CHUNK.value), segment)
    return int((segments - 1) * inputs.sequences * inputs.v.shape[2])


@first_reason
def unsupported(inputs: GDNInputs) -> Reasons:
    """Why this kernel does not support `inputs`; empty if it does."""
    dims = inputs.q.shape[3], inputs.v.shape[3]
    yield dims != (DIM.value, DIM.value), f"K {dims[0]} with V {dims[1]}"
    reason = unsupported_otherwise(inputs)
    yield reason != "", reason


@first_reason
def unsupported_otherwise(inputs: GDNInputs) -> Reasons:
    """Why this kernel does not support `inputs`, for reasons other than K and V; empty if it
    does.
    """
    reason = untiled(inputs, k=inputs.k, v=inputs.v)
    yield reason != "", reason
    yield inputs.q.dtype == torch.float32, "fp32 inputs"
    yield inputs.scale_or_default <= 0, f"a scale of {inputs.scale_or_default}"


@first_reason
def untiled(inputs: GDNInputs, **tensors: torch.Tensor) -> Reasons:
    """Why no Hopper kernel of the delta rule can read q and `tensors` in tiles; empty if one
    can.
    """
    q = inputs.q
    positions = inputs.slot_count(CHUNK.value) * CHUNK.value
    yield INTERPRETED or not q.is_cuda or capability(q) != (9, 0), "anything but a Hopper GPU"
    yield positions * inputs.v.shape[2] >= 2**31, "2^31 positions of all heads"
    reason = unreadable(q=q, **tensors)
    yield reason != "", reason
