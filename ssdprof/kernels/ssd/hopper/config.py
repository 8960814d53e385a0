"""Which inputs the Hopper kernel supports, and how a call is divided into programs.

Rings and registers come from a row of `../config.py`, segments from a simulated schedule (`segments.py`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from ssdprof.kernels.device import capability
from ssdprof.kernels.inputs import INPUT_DTYPES
from ssdprof.kernels.ssd.config import HOPPER, first_fit
from ssdprof.kernels.ssd.hopper.halves import MAX_WIDTH
from ssdprof.kernels.ssd.hopper.rings import CHUNK, SLICE, weight_places
from ssdprof.kernels.ssd.hopper.segments import Segments, ceil_div, cut, packed_segment
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.tensors import row_stride


@dataclass(frozen=True, kw_only=True)
class HopperConfig(Segments):
    """Segments of chunks of 64 positions, and
    ring, score_ring: slots of the rings of chunks and of scores
    unit_registers, other_registers: registers per thread of the role with states, and of gates, loads and stores
    """

    ring: int = HOPPER[0].take.ring
    score_ring: int = HOPPER[0].take.score_ring
    unit_registers: int = HOPPER[0].take.unit_registers
    other_registers: int = HOPPER[0].take.other_registers
    reason: str = ""

    @classmethod
    def choose(cls, inputs: SSDInputs, sm_count: int, *, batch_invariant: bool) -> HopperConfig:
        """Choose by the length and number of sequences, the number of units and the GPU.

        With `batch_invariant`, choose as for one sequence: a sequence's result is then bitwise the same in any batch,
        and a large batch of short sequences is slower.  Packed sequences are always cut by one rule.
        """
        if inputs.cu_seqlens is not None:
            segments = Segments(segment=packed_segment(program_count(inputs)))
            reason = "packed: one rule for sequences of any length, by the number of heads"
        else:
            sequences = 1 if batch_invariant else inputs.sequences
            nchunks = ceil_div(inputs.x.shape[1], CHUNK.value)
            segments = cut(nchunks, sequences * program_count(inputs), half_count(inputs.B.shape[3]), sm_count)
            how = f"equal shares for {sm_count} programs" if segments.shares else "least simulated time"
            reason = f"{how}: {sequences} x {nchunks} chunks on {sm_count} SMs"
        row = first_fit(HOPPER, wide=False, dstate=inputs.B.shape[3])
        return cls(**asdict(segments), **asdict(row.take), reason=f"{reason}; {row.why}")


def unit_count(inputs: SSDInputs) -> int:
    nheads, headdim = inputs.x.shape[2:]
    return nheads * ceil_div(headdim, SLICE.value)


def half_count(dstate: int) -> int:
    """1, or 2 if the two lanes of a program share N."""
    return ceil_div(dstate, MAX_WIDTH.value)


def program_count(inputs: SSDInputs) -> int:
    """Programs per segment: each owns two units, or two halves of one."""
    return unit_count(inputs) * half_count(inputs.B.shape[3]) // 2


def shared_bytes(ring: int, score_ring: int, dstate: int) -> int:
    """Shared memory of one program, without its barriers."""
    halves = half_count(dstate)
    tiles = 2 // halves * 2 * CHUNK.value * SLICE.value  # bytes of a 64 x 64 tile of each unit
    rows = 2 * CHUNK.value * dstate  # bytes of B, or C
    vector = 4 * 2 * CHUNK.value
    chunk = 2 * rows + 4 * vector + 8 + halves * tiles  # B and C, gates, decays, x for both passes
    first_pass = weight_places(ring * halves, halves) * (vector + 8) + 4 * (ring + 2)  # weights, decays, words
    exchange = 4 * (2 * SLICE.value * CHUNK.value // 2) if halves == 2 else 0
    return int(ring * chunk + first_pass + score_ring * tiles + tiles + exchange)


def unsupported(inputs: SSDInputs) -> str:
    """Why this kernel does not support `inputs`; empty if it does."""
    x, B, C = inputs.x, inputs.B, inputs.C
    headdim, dstate = x.shape[3], B.shape[3]
    slices = ceil_div(headdim, SLICE.value)
    if not x.is_cuda or capability(x) != (9, 0):
        return "anything but a Hopper GPU"
    if x.dtype == torch.float32:
        return "fp32 inputs"
    if inputs.dt.dtype not in INPUT_DTYPES:
        return f"dt of {inputs.dt.dtype}"
    if inputs.z is not None:
        return "a gate z"
    if headdim < SLICE.value or headdim % 16 or dstate not in (64, 128, 256):
        return f"headdim {headdim} with dstate {dstate}"
    if slices * inputs.heads_per_group * half_count(dstate) % 2:
        return "an odd number of heads per group"
    if x.shape[0] * x.shape[1] >= 2**31:
        return "2^31 positions"
    for name, tensor in (("x", x), ("B", B), ("C", C)):
        row = row_stride(tensor)
        if tensor.stride(3) != 1 or row % 8 or tensor.stride(2) % 8 or tensor.data_ptr() % 16 or row <= 0:
            return f"strides or alignment of {name}, which TMA cannot read"
        if tensor.shape[0] > 1 and (tensor.stride(0) % 8 or tensor.stride(0) <= 0):
            return f"batch stride of {name}, which TMA cannot read"
    for name, tensor in (("B", B), ("C", C)):
        if tensor.shape[2] > 1 and tensor.stride(2) != dstate:
            return f"group stride of {name}"
    if CHUNK.value * row_stride(inputs.dt) + x.shape[2] * inputs.dt.stride(2) >= 2**31:
        return "2^31 elements between the gates of a chunk"
    return ""
