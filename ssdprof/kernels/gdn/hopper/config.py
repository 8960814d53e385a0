"""What the Hopper kernel takes, and how it cuts a call into programs, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ssdprof.kernels._gpu import capability
from ssdprof.kernels._tiles import row_stride
from ssdprof.kernels._triton import INTERPRETED
from ssdprof.kernels.gdn.hopper.parts import MOST_ROWS
from ssdprof.kernels.gdn.hopper.rings import CHUNK, DIM, VECTORS
from ssdprof.kernels.gdn.inputs import GDNInputs

# In units of a chunk of the second pass
FIRST_PASS = 0.55  # a chunk of the first pass
WORTH_LEAD = 8  # chunks of a segment: finding out what first passes cost takes half a chunk's time
START = 3.0  # a program's start and end
REACH = 10  # chunks of a first pass of heads whose gates are as models' are drawn
MOST_WAVES = 3  # programs of an SM, one after the other
WORTH_WAVES = 0.96  # more than one only if the estimated time is less than this part: more segments, more first passes
# Chunks before the last segment from which on slow heads are computed in parts: two more launches, whatever the gates.
WORTH_PARTS = 128
PART = 32  # chunks of a part, at least
MOST_PARTS_OF_SEGMENT, MOST_PARTS = 8, 2048  # of all rows: 256 MiB
LEAST_FIRST_PASS, MOST_FIRST_PASS = 48, 128  # chunks that a first pass may have before its head is computed in parts


@dataclass(frozen=True, kw_only=True)
class HopperConfig:
    """segment: chunks of 64 positions that a program takes of one head
    stays: programs that take whole sequences, one after the other; 0: there is a program for each segment
    enough: log2 of what may be left of a state where a first pass begins; -inf: nothing, whatever the gates
    leads: a sequence's first segment, which has no first pass, is longer than the others by what theirs cost, which is
        found for each head on the device; `segment` is then the mean
    slow_parts: into which a segment is divided evenly for heads whose first pass would be longer than
        longest_first_pass (`parts.py`); 0: any first pass is made
    carriers: programs that compute those parts
    inverts: in one launch, for segments that are whole sequences
    key_ring, ring: places for k and v, and for all else
    state_registers, other_registers: a thread's, of the role with the state, and of gates, loads and stores
    """

    segment: int
    stays: int = 0
    enough: float = -24.0
    leads: bool = False
    slow_parts: int = 0
    longest_first_pass: int = 0
    carriers: int = 132
    inverts: bool = False
    key_ring: int = 2
    ring: int = 2
    state_registers: int = 192
    other_registers: int = 24
    reason: str = ""

    @classmethod
    def choose(cls, inputs: GDNInputs, sm_count: int, *, batch_invariant: bool) -> HopperConfig:
        """By the length and number of sequences, the number of heads and the GPU.

        With `batch_invariant`, as if there were one sequence: a sequence's result is then bitwise the same in any
        batch.  With it, packed sequences are not cut, because their lengths are not known on the host.
        """
        nchunks, heads = ceil_div(inputs.v.shape[1], CHUNK.value), inputs.v.shape[2]
        if batch_invariant and inputs.cu_seqlens is not None:
            return _of_whole_sequences(cls(segment=nchunks), inputs)
        sequences = 1 if batch_invariant else inputs.sequences
        config = _cut(nchunks, sequences * heads, sm_count)
        if config.stays:
            return _of_whole_sequences(config, inputs)
        if not batch_invariant:  # the number of rows depends on the batch
            config = _with_parts(config, inputs, nchunks, sm_count)
        return replace(config, leads=_worth_leading(config, inputs, nchunks))


@lru_cache(maxsize=1024)
def _cut(nchunks: int, pairs: int, sm_count: int) -> HopperConfig:
    """The even cut of `pairs` of `nchunks` chunks with the least time, if SMs take programs as they come free."""
    if pairs >= sm_count:
        return HopperConfig(segment=nchunks, stays=sm_count, reason=f"whole sequences for {sm_count} programs")

    def time(count: int) -> float:
        return ceil_div(count * pairs, sm_count) * estimated_time(ceil_div(nchunks, count), nchunks)

    at_once, most = (range(1, min(nchunks, waves * sm_count // pairs) + 1) for waves in (1, MOST_WAVES))
    count, finer = min(at_once, key=time), min(most, key=time)
    if time(finer) < WORTH_WAVES * time(count):
        count = finer
    segment = ceil_div(nchunks, count)
    programs = pairs * ceil_div(nchunks, segment)
    reason = f"least estimated time: {programs} programs of {segment} chunks on {sm_count} SMs"
    return HopperConfig(segment=segment, reason=reason)


def _of_whole_sequences(config: HopperConfig, inputs: GDNInputs) -> HopperConfig:
    """One launch, unless keys are to be normalised: 3 % faster on an H200, and with other registers slower."""
    if inputs.cu_seqlens is not None:
        config = replace(config, stays=0, reason="packed: a program for each sequence and head")
    if inputs.use_qk_l2norm:
        return config
    return replace(
        config, inverts=True, key_ring=3, state_registers=176, other_registers=64, reason=config.reason + ", one launch"
    )


def _with_parts(config: HopperConfig, inputs: GDNInputs, nchunks: int, sm_count: int) -> HopperConfig:
    """For long sequences: the same cut, rounded up to whole parts."""
    rows = row_count(inputs, config.segment)
    if nchunks - config.segment <= WORTH_PARTS or rows > MOST_ROWS:
        return config
    parts = _power_of_two(min(config.segment // PART, MOST_PARTS_OF_SEGMENT, MOST_PARTS // rows))
    segment = parts * ceil_div(config.segment, parts)
    longest = min(max(3 * segment // 8, LEAST_FIRST_PASS), MOST_FIRST_PASS)
    return replace(config, segment=segment, slow_parts=parts, longest_first_pass=longest, carriers=sm_count)


def _worth_leading(config: HopperConfig, inputs: GDNInputs, nchunks: int) -> bool:
    possible = config.segment < nchunks and not config.slow_parts and inputs.cu_seqlens is None
    return possible and config.segment >= WORTH_LEAD


def _power_of_two(most: int) -> int:
    """The largest one that is no more than `most`, and 1 at least."""
    return 1 << max(most, 1).bit_length() - 1


def row_count(inputs: GDNInputs, segment: int) -> int:
    """Segments that do not begin their sequence, for all heads; an upper bound if sequences are packed."""
    segments = ceil_div(ceil_div(inputs.v.shape[1], CHUNK.value), segment)
    return int((segments - 1) * inputs.sequences * inputs.v.shape[2])


def estimated_time(segment: int, nchunks: int) -> float:
    """The time that a program takes, in chunks of the second pass."""
    return START + segment + FIRST_PASS * min(REACH, nchunks - segment)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def shared_bytes(key_ring: int, ring: int) -> int:
    """What one program of the second kernel takes of shared memory, all but its barriers."""
    wide, square = 2 * CHUNK.value * DIM.value, 2 * CHUNK.value * CHUNK.value
    return int(
        key_ring * (2 * wide + VECTORS.value * 4 * CHUNK.value) + ring * (2 * wide + 2 * square) + wide
    )  # fmt: skip


def slot_count(inputs: GDNInputs) -> int:
    """Chunks of all sequences; an upper bound if they are packed, for their lengths are on the device."""
    batch, seqlen = inputs.v.shape[:2]
    if inputs.cu_seqlens is None:
        return int(batch * ceil_div(seqlen, CHUNK.value))
    return int(seqlen // CHUNK.value + inputs.sequences)


def unsupported(inputs: GDNInputs) -> str:
    """Why this kernel cannot take `inputs`; empty if it can."""
    if (inputs.q.shape[3], inputs.v.shape[3]) != (DIM.value, DIM.value):
        return f"K {inputs.q.shape[3]} with V {inputs.v.shape[3]}"
    return unreadable(inputs)


def unreadable(inputs: GDNInputs) -> str:
    """What, beside K and V, keeps this kernel from taking `inputs`."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if INTERPRETED or not q.is_cuda or capability(q) != (9, 0):
        return "anything but a Hopper GPU"
    if q.dtype == torch.float32:
        return "fp32 inputs"
    if inputs.scale_or_default <= 0:
        return f"a scale of {inputs.scale_or_default}"
    if slot_count(inputs) * CHUNK.value * v.shape[2] >= 2**31:
        return "2^31 positions of all heads"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        row = row_stride(tensor)
        if tensor.stride(3) != 1 or row % 8 or tensor.stride(2) % 8 or tensor.data_ptr() % 16 or row <= 0:
            return f"strides or alignment of {name}, which the copy engine cannot read"
        if tensor.shape[0] > 1 and (tensor.stride(0) % 8 or tensor.stride(0) <= 0):
            return f"batch stride of {name}, which the copy engine cannot read"
    return ""
