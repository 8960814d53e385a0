"""How the portable kernel divides a call into programs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from ssdprof.kernels.ssd.config_table import PORTABLE, CallSizes, first_fit
from ssdprof.kernels.ssd.inputs import SSDInputs

_MIN_SEGMENT, _MAX_SEGMENT = 256, 2048  # positions


def whole_block(size: int) -> int:
    """The smallest block that holds all of N, or of P: a power of two of at least 16."""
    return max(16, int(triton.next_power_of_2(size)))


@dataclass(frozen=True, kw_only=True)
class PortableConfig:
    """Chosen by the shape of one sequence, dtype and GPU, never by the batch, so that a sequence's result does not
    depend on its neighbours.

    chunk: positions per chunk, a power of two of at least 16
    max_segments, min_chunks, max_chunks: a sequence has max_segments segments, unless these would have fewer than
        min_chunks or more than max_chunks chunks.  More segments let more programs work on one sequence; fewer segments
        spend less time on first passes.
    block_p: slice of P per program, a power of two of at least 16
    block_n: block of N per product, a power of two of at least 16
    p_rows: the state is held as (p, n); otherwise as (n, p)
    state_stages, scan_stages: chunks in flight in the first and in the second pass
    """

    chunk: int = 64
    max_segments: int = 8
    min_chunks: int = 4
    max_chunks: int = 32
    block_p: int = 64
    block_n: int = 256
    p_rows: bool = True
    num_warps: int = 4
    state_stages: int = 3
    scan_stages: int = 2
    reason: str = ""

    @classmethod
    def choose(cls, inputs: SSDInputs, capability: tuple[int, int]) -> PortableConfig:
        """The configuration for a GPU of this compute capability, by `config_table.PORTABLE`.

        The state of one program, 64 x 128 fp32 numbers, fills half the registers of 4 warps.  The other half holds the
        chunk's scores and output.
        """
        headdim, dstate, wide = inputs.x.shape[3], inputs.B.shape[3], inputs.x.dtype == torch.float32
        gate = inputs.z is not None
        row = first_fit(PORTABLE, CallSizes(major=capability[0], wide=wide, headdim=headdim, dstate=dstate, gate=gate))
        config = cls(
            chunk=row.take.chunk,
            min_chunks=_MIN_SEGMENT // row.take.chunk,
            max_chunks=_MAX_SEGMENT // row.take.chunk,
            block_p=min(whole_block(headdim), row.take.block_p),
            block_n=min(whole_block(dstate), row.take.block_n),
            p_rows=row.take.p_rows,
            num_warps=row.take.num_warps,
            state_stages=row.take.state_stages,
            reason=row.why,
        )
        return config.fitted(inputs)

    def fitted(self, inputs: SSDInputs) -> PortableConfig:
        """With a shorter chunk if all sequences are shorter than one chunk; segments keep their lengths."""
        if inputs.cu_seqlens is not None or inputs.x.shape[1] >= self.chunk:
            return self
        chunk = max(16, triton.next_power_of_2(inputs.x.shape[1]))
        times = self.chunk // chunk
        return replace(self, chunk=chunk, min_chunks=self.min_chunks * times, max_chunks=self.max_chunks * times)

    def units(self, inputs: SSDInputs) -> int:
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
        """Segments of all sequences; an upper bound for packed sequences, whose lengths are on the device."""
        length = inputs.x.shape[1]
        if inputs.cu_seqlens is None:
            nchunks = triton.cdiv(length, self.chunk)
            return int(inputs.sequences * triton.cdiv(nchunks, self.segment_chunks(nchunks)))
        # a sequence has at most 1 + len / (chunk * min_chunks) segments, and max_segments + len / (chunk * max_chunks)
        return min(
            inputs.sequences + length // (self.chunk * self.min_chunks),
            inputs.sequences * self.max_segments + length // (self.chunk * self.max_chunks),
        )
