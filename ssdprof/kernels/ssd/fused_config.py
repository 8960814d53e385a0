"""How the fused kernel cuts a call into programs, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from ssdprof.kernels.ssd.inputs import SSDInputs

_MIN_SEGMENT, _MAX_SEGMENT = 256, 2048  # positions


@dataclass(frozen=True, kw_only=True)
class FusedConfig:
    """Chosen by the shape of one sequence, dtype and GPU, never by the batch: a sequence's result must not depend on
    its neighbours.

    chunk: positions per chunk, a power of two of at least 16
    max_segments, min_chunks, max_chunks: a sequence gets max_segments segments, unless they would then have fewer than
        min_chunks or more than max_chunks chunks.  More segments are more programs at work on one sequence; fewer spend
        less on the first pass.
    block_p: how much of P one program holds, a power of two of at least 16
    p_rows: whether the state is held as (p, n) or as (n, p)
    state_stages, scan_stages: chunks in flight in the first and in the second pass
    """

    chunk: int = 64
    max_segments: int = 8
    min_chunks: int = 4
    max_chunks: int = 32
    block_p: int = 64
    p_rows: bool = True
    num_warps: int = 4
    state_stages: int = 3
    scan_stages: int = 2
    reason: str = ""

    @classmethod
    def choose(cls, inputs: SSDInputs, capability: tuple[int, int]) -> FusedConfig:
        """The configuration for a GPU of this compute capability.

        The state of one program, 64 x 128 fp32 numbers, fills half the registers of 4 warps; what is left holds the
        chunk's scores and output.
        """
        length, headdim, dstate = inputs.x.shape[1], inputs.x.shape[3], inputs.B.shape[3]
        block_p = max(16, min(triton.next_power_of_2(headdim), 64 if dstate <= 128 else 32))
        if inputs.x.dtype == torch.float32:
            chunk, num_warps, p_rows = 16, 4 if dstate <= 64 else 8, dstate <= 128
            reason = "tf32x3 holds every operand twice in registers: short chunks"
        elif capability < (9, 0):
            chunk, num_warps, p_rows = 64 if dstate <= 128 else 32, 8, True
            reason = "operands in registers: 8 warps, because 4 would spill"
        else:
            chunk, num_warps, p_rows = 64, 4, block_p >= 64
            reason = (
                "64 rows, those of one matrix instruction, in every product; 4 warps, so that two programs share an SM"
            )
        if inputs.cu_seqlens is None and length < chunk:
            chunk = max(16, triton.next_power_of_2(length))
        return cls(
            chunk=chunk,
            min_chunks=_MIN_SEGMENT // chunk,
            max_chunks=_MAX_SEGMENT // chunk,
            block_p=block_p,
            p_rows=p_rows,
            num_warps=num_warps,
            reason=reason,
        )

    def lanes(self, inputs: SSDInputs) -> int:
        """Programs per segment: slices of P of all heads."""
        nheads, headdim = inputs.x.shape[2:]
        return int(nheads * triton.cdiv(headdim, self.block_p))

    def segment_chunks(self, nchunks: int) -> int:
        """Chunks per segment of a sequence of `nchunks`."""
        return int(min(max(triton.cdiv(nchunks, self.max_segments), self.min_chunks), self.max_chunks))

    def handover(self, inputs: SSDInputs) -> bool:
        """Whether a sequence may have more than one segment."""
        nchunks = triton.cdiv(inputs.x.shape[1], self.chunk)
        return bool(nchunks > self.segment_chunks(nchunks))

    def segments(self, inputs: SSDInputs) -> int:
        """Segments of all sequences; an upper bound if they are packed, for their lengths are on the device."""
        length = inputs.x.shape[1]
        if inputs.cu_seqlens is None:
            nchunks = triton.cdiv(length, self.chunk)
            return int(inputs.sequences * triton.cdiv(nchunks, self.segment_chunks(nchunks)))
        # a sequence has at most 1 + len / (chunk * min_chunks) segments, and max_segments + len / (chunk * max_chunks)
        return min(
            inputs.sequences + length // (self.chunk * self.min_chunks),
            inputs.sequences * self.max_segments + length // (self.chunk * self.max_chunks),
        )
