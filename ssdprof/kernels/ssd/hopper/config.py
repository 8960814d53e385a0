"""Which inputs the Hopper kernel supports, and how a call is divided into programs.

Rings and registers come from a row of `../config.py`.  The cut of sequences into segments is the
one with the least time in a simulation of the programs on the SMs; packed sequences, whose lengths
the host does not know, have a rule instead.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch

from ssdprof.kernels.device import capability
from ssdprof.kernels.hopper.ring import CHUNK
from ssdprof.kernels.hopper.schedule import Cut, ceil_div, cut
from ssdprof.kernels.inputs import INPUT_DTYPES
from ssdprof.kernels.registry import Reasons, first_reason
from ssdprof.kernels.ssd.config import HOPPER, first_fit
from ssdprof.kernels.ssd.hopper.lanes import MAX_WIDTH
from ssdprof.kernels.ssd.hopper.rings import SLICE, flag_slots, weight_slots
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.tensors import row_stride, unreadable

# Times are in units of one chunk of the second pass (1.8 us on an H200), fitted to
# benchmarks/results/hopper-segments-h200.json.  Quality of the fit: benchmarks/log/ssd.md#row-53.
# Time of a chunk of the first pass, by `n_split`: FIRST_PASS in cuts where each segment but the
# last has one, RECOMPUTED in cuts with `recompute`, where each but the first has one.
FIRST_PASS = {1: 0.45, 2: 0.34}
RECOMPUTED = {1: 0.384, 2: 0.34}
START = 3.0  # time to start and end a program
PUBLISH = 1.1  # time until others see the state that a segment adds
PART = 0.36  # time to sum the published state of one earlier segment
CALL = 0.6  # time to launch, and to zero the flags; without flags, half of it
# Chunks after which the first pass stops, for sixteen pairs of heads with decays as in models.  One
# pair never stops.  It is the first, so that it counts in calls with few pairs.
REACH = (1 << 31, 28, 73, 7, 18, 34, 61, 23, 89, 51, 167, 14, 4, 42, 116, 10)
# most chunks of a sequence for `recompute`, up to which it pays (benchmarks/log/ssd.md#row-23)
LONGEST_RECOMPUTED = 128
UNFUSED_CHUNK = 4  # longest chunk of an unfused pipeline, in chunks of this kernel: 256 positions
# heads for which `as_exact_as_unfused` compares errors: their memory m in chunks, with a decay of
# e^(-1 / m) per chunk
CHECKED_MEMORIES = (1, 2, 4, 8)
AS_LARGE = 1.01  # squared errors count as equal up to this factor, which no test could detect
_FIRST_ROW = HOPPER[0][1]  # the configuration of the table's first row: the defaults below


@dataclass(frozen=True, kw_only=True)
class SSDHopperConfig(Cut):
    """A cut into segments of chunks of 64 positions, with the rings and registers of the kernel.

    ring, score_ring: slots of the rings of chunks and of scores
    unit_registers: registers per thread of the role `units`
    other_registers: registers per thread of the roles `gates`, `loads` and `stores`; `scores` gets
        the rest
    reason: for reports
    """

    ring: int = _FIRST_ROW["ring"]
    score_ring: int = _FIRST_ROW["score_ring"]
    unit_registers: int = _FIRST_ROW["unit_registers"]
    other_registers: int = _FIRST_ROW["other_registers"]
    reason: str = ""

    @classmethod
    def choose(cls, inputs: SSDInputs, sm_count: int, *, batch_invariant: bool) -> SSDHopperConfig:
        """Choose by the length and number of sequences, the number of units, N and the GPU.

        batch_invariant: choose as for one sequence.  A sequence's result is then bitwise the same
            in any batch, and a large batch of short sequences is slower.  For packed sequences it
            has no effect, because one rule cuts them, whatever their number.
        """
        if inputs.cu_seqlens is not None:
            segments = Cut(segment=packed_segment(program_count(inputs)))
            reason = "packed: one rule for sequences of any length, by the number of heads"
        else:
            sequences = 1 if batch_invariant else inputs.sequences
            nchunks = ceil_div(inputs.x.shape[1], CHUNK.value)
            pairs = sequences * program_count(inputs)
            segments = fastest_cut(nchunks, pairs, sm_count, n_split=n_split(inputs.B.shape[3]))
            reason = "least simulated time"
            if segments.shares:
                reason = f"equal shares for {sm_count} programs"
            reason += f": {sequences} x {nchunks} chunks on {sm_count} SMs"
        _, take, why = first_fit(HOPPER, fp32=False, dstate=inputs.B.shape[3])
        return cls(**asdict(segments) | take, reason=f"{reason}; {why}")


def unit_count(inputs: SSDInputs) -> int:
    """Units of a sequence: heads, or slices of SLICE of a head's P."""
    nheads, headdim = inputs.x.shape[2:]
    return nheads * ceil_div(headdim, SLICE.value)


def n_split(dstate: int) -> int:
    """The parts into which N is divided: 1, or 2 if each lane of a program holds half of N."""
    return ceil_div(dstate, MAX_WIDTH.value)


def program_count(inputs: SSDInputs) -> int:
    """Programs per segment: each owns two units, or the two halves of N of one unit."""
    return unit_count(inputs) * n_split(inputs.B.shape[3]) // 2


def shared_bytes(ring: int, score_ring: int, dstate: int) -> int:
    """Bytes of one program's shared memory, without its barriers: those of the fields that
    `rings.allocate` and `lanes.allocate_exchange` allocate.

    ring, score_ring: slots of the rings of chunks and of scores.
    """
    operand_bytes, number_bytes = 2, 4  # of an element of a tile, and of an fp32 or int32
    split = n_split(dstate)
    vector = number_bytes * 2 * CHUNK.value  # 64 numbers of each lane
    decay = number_bytes * 2  # one number of each lane
    tiles = 2 // split * operand_bytes * CHUNK.value * SLICE.value  # a tile (64, 64) of each unit

    first_ring = ring * split  # slots of the first pass, which loads no C
    weights = weight_slots(first_ring, split) * (vector + decay)  # `weights`, `decay`
    flags = flag_slots(first_ring, split) * number_bytes  # `continue_flag`

    rows = ring * 2 * operand_bytes * CHUNK.value * dstate  # B and C
    x = first_ring * tiles
    gates = ring * (4 * vector + decay)  # `gates`, `decay`
    scores = score_ring * tiles
    out = tiles
    total = weights + flags + rows + x + gates + scores + out
    if split == 2:
        total += number_bytes * SLICE.value * CHUNK.value  # partial outputs, fp32 (2, p, q / 2)
    return int(total)


def packed_segment(programs: int) -> int:
    """Chunks per segment of packed sequences, whose lengths are on the device: the number of
    programs per segment, rounded up to a power of two between 8 and 64.

    With fewer programs, shorter segments are needed to fill the GPU.  With fewer than 8 chunks per
    segment, a long sequence would have too many published states to sum.
    """
    return min(64, max(8, 1 << (programs - 1).bit_length()))


def simulated_time(
    segments: Cut, nchunks: int, pairs: int, sm_count: int, *, n_split: int
) -> float:
    """Time until the last program ends, for sequences of `nchunks` chunks and `pairs` pairs of a
    sequence and a program's units.  Each SM runs one program at a time, and programs start in
    order: those of all pairs' first segments, then those of all second ones, and so on.
    """
    lengths = segments.lengths(nchunks)
    looks_back = len(lengths) > 1 and not segments.recompute
    first_pass_chunk = (RECOMPUTED if segments.recompute else FIRST_PASS)[n_split]
    free_at = [0.0] * sm_count  # a heap: when each SM can start its next program
    published_at: list[list[float]] = [[] for _ in range(pairs)]  # by pair and segment
    end, chunks_before = 0.0, 0
    for index, length in enumerate(lengths):
        last = index == len(lengths) - 1
        most_first = length  # chunks of a first pass that does not stop early
        if segments.recompute:
            most_first = chunks_before
        elif last:
            most_first = 0
        # the numbers of published states to sum, for pairs by their REACH
        counts = [_states_to_sum(lengths[:index], reach) for reach in REACH[:pairs]]
        for pair in range(pairs):
            time = free_at[0] + START + first_pass_chunk * min(most_first, REACH[pair % len(REACH)])
            if looks_back:
                if not last:
                    time += PUBLISH
                    published_at[pair].append(time)
                count = counts[pair % len(REACH)]
                time = max([time, *published_at[pair][index - count : index]]) + PART * count
            time += length
            heapq.heapreplace(free_at, time)
            end = max(end, time)
        chunks_before += length
    return end + (CALL if looks_back else CALL / 2)


def _states_to_sum(lengths: list[int], reach: int) -> int:
    """The number of earlier segments whose states a segment sums, from the nearest backwards, until
    the decay of those that it has summed is zero.

    lengths: chunks of the earlier segments, in order.  reach: chunks whose decay together is zero
    """
    count = 0
    for length in reversed(lengths):
        count += 1
        reach -= length
        if reach <= 0:
            break
    return count


def as_exact_as_unfused(segments: Cut, nchunks: int) -> bool:
    """Whether the error of no head, however fast it forgets, exceeds that of an unfused pipeline
    with its longest chunks.  Heads of `CHECKED_MEMORIES` and those that never forget stand for all.
    """
    fused = segments.lengths(nchunks)
    unfused = Cut(segment=UNFUSED_CHUNK).lengths(nchunks)
    return rounded_twice(fused) <= rounded_twice(unfused) and all(
        squared_error(fused, memory) <= AS_LARGE * squared_error(unfused, memory)
        for memory in CHECKED_MEMORIES
    )


def rounded_twice(lengths: list[int]) -> int:
    """Number of pairs of chunks in which the first chunk precedes the segment of the second one:
    a measure of the error of a head that never forgets.

    The contribution of the first chunk to the second one's output is rounded twice: by the first
    pass, and as part of the state.  An unfused pipeline rounds the contributions of all earlier
    chunks twice.

    lengths: chunks of each segment
    """
    chunks_before, pairs = 0, 0
    for length in lengths:
        pairs += length * chunks_before
        chunks_before += length
    return pairs


def squared_error(lengths: list[int], memory: float) -> float:
    """Mean squared error of the outputs of a head whose decay is e^(-1 / memory) per chunk, in
    units of the square of one rounding.

    The rounding of the output counts 1, that of all its terms 1, and the second rounding of terms
    from before the output's segment counts f, their share of the output's energy: 2 + f
    (docs/kernels.md).

    lengths: chunks of each segment
    """
    decay = math.exp(-2 / memory)  # of the energy of a term, per chunk

    def energy(nchunks: int) -> float:
        """The energy of the terms of `nchunks` chunks in the output of the last of these chunks, in
        units of a chunk's own terms.
        """
        return (1 - decay**nchunks) / (1 - decay)

    # summed over the outputs of all chunks: the energy of terms from before the output's segment
    chunks_before, energy_before = 0, 0.0
    for length in lengths:
        energy_before += decay * energy(length) * energy(chunks_before)
        chunks_before += length
    nchunks = chunks_before
    # all terms: the sum of energy(1 .. nchunks), (nchunks - decay * energy(nchunks)) / (1 - decay)
    return 2 + energy_before * (1 - decay) / (nchunks - decay * energy(nchunks))


def _exact_candidates(nchunks: int, pairs: int, sm_count: int) -> Iterator[Cut]:
    """The candidate cuts that are as exact as `unfused`.  The sequence without a cut always is."""
    for segments in candidates(nchunks, sm_count / pairs):
        if as_exact_as_unfused(segments, nchunks):
            yield segments


def candidates(nchunks: int, programs_per_pair: float) -> Iterator[Cut]:
    """Candidate cuts of a sequence of `nchunks` chunks; the GPU runs `programs_per_pair` programs
    per pair at once.
    """
    # no cut, and equal segments: as many as run at once or one more, and numbers about a factor of
    # the square root of two apart
    yield Cut(segment=max(1, nchunks))
    at_once = max(1, int(programs_per_pair))
    for count in sorted({2, 3, 4, 6, 8, 11, 16, 22, 32, at_once, at_once + 1}):
        if count <= min(nchunks, at_once + 1):
            yield Cut(segment=ceil_div(nchunks, count))
    # long segments that run at once, and then short ones
    for part in (0.5, 0.6, 0.67, 0.75, 0.8, 0.85):  # of a sequence, in long segments
        long = max(1, round(part * nchunks / at_once))
        left = nchunks - at_once * long
        if left > 0:
            for count in (1, 2, 4, 8):
                yield Cut(long_count=at_once, long_segment=long, segment=ceil_div(left, count))
    # one long segment without a first pass, and short ones that recompute it
    if nchunks <= LONGEST_RECOMPUTED:
        for long in range(ceil_div(nchunks, 2), 3 * nchunks // 4 + 1, ceil_div(nchunks, 64)):
            left = nchunks - long
            if left > 0:
                for count in (1, 2, 3):
                    yield Cut(
                        long_count=1,
                        long_segment=long,
                        segment=ceil_div(left, count),
                        recompute=True,
                    )


# `simulated_time` by `n_split`: the same objects at every call, because `cut` caches by them
TIMES = {split: partial(simulated_time, n_split=split) for split in (1, 2)}


def fastest_cut(nchunks: int, pairs: int, sm_count: int, *, n_split: int) -> Cut:
    """The cut with the least simulated time, of those that are as exact as `unfused`.

    Similar lengths, of one of 16 classes per power of two, share the cut of the longest of them,
    which is simulated once.  Sequences are not cut if there are more pairs than SMs: equal shares
    need that.
    """
    return cut(
        nchunks,
        pairs,
        sm_count,
        candidates=_exact_candidates,
        time=TIMES[n_split],
        classes=16,
        whole_from=1,
    )


@first_reason
def unsupported(inputs: SSDInputs) -> Reasons:
    """Why this kernel does not support `inputs`; empty if it does."""
    x, B, C = inputs.x, inputs.B, inputs.C
    headdim, dstate = x.shape[3], B.shape[3]
    yield not x.is_cuda or capability(x) != (9, 0), "anything but a Hopper GPU"
    yield x.dtype == torch.float32, "fp32 inputs"
    yield inputs.dt.dtype not in INPUT_DTYPES, f"dt of {inputs.dt.dtype}"
    yield inputs.z is not None, "a gate z"
    supported_size = headdim >= SLICE.value and headdim % 16 == 0 and dstate in (64, 128, 256)
    yield not supported_size, f"headdim {headdim} with dstate {dstate}"
    # both lanes of a program read the same B and C
    lanes = ceil_div(headdim, SLICE.value) * inputs.heads_per_group * n_split(dstate)
    yield lanes % 2 > 0, "an odd number of heads per group"
    yield x.shape[0] * x.shape[1] >= 2**31, "2^31 positions"
    reason = unreadable(x=x, B=B, C=C)
    yield reason != "", reason
    # a descriptor reads the groups of a position as one row
    for name, tensor in (("B", B), ("C", C)):
        yield tensor.shape[2] > 1 and tensor.stride(2) != dstate, f"group stride of {name}"
    # the kernel's offsets of gates within a chunk are int32
    gates_span = CHUNK.value * row_stride(inputs.dt) + x.shape[2] * inputs.dt.stride(2)
    yield gates_span >= 2**31, "2^31 elements between the gates of a chunk"
