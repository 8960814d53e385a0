"""How the portable kernels cut a call into programs, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from ssdprof.kernels.gdn.inputs import GDNInputs

_MIN_SEGMENT = 1024  # positions: a shorter segment would spend most of its time on forgetting


@dataclass(frozen=True, kw_only=True)
class PortableConfig:
    """Chosen by shapes, dtype and GPU; by the number of sequences too unless a call is to be batch invariant.

    chunk: positions per chunk: 16, 32, 64 or 128
    segment: chunks per segment; 0 for a segment per sequence
    block_k: how much of K is multiplied at once, a power of two of at least 16
    block_v: how much of V one program holds, a power of two of at least 16
    v_rows: whether the state is held as (V, K), a register operand of both products if block_v >= 64, or as (K, V)
    num_warps, warm_up_stages, scan_stages: of the second launch; stages are chunks in flight
    factors_warps: of the first launch
    """

    chunk: int = 64
    segment: int = 0
    block_k: int = 64
    block_v: int = 64
    v_rows: bool = True
    num_warps: int = 4
    warm_up_stages: int = 2
    scan_stages: int = 2
    factors_warps: int = 4
    reason: str = ""

    @classmethod
    def choose(cls, inputs: GDNInputs, sm_count: int, *, batch_invariant: bool = False) -> PortableConfig:
        """As many programs as there are multiprocessors, if there can be: first by slices of V, then by segments."""
        heads, value_dim = inputs.v.shape[2:]
        key_dim, wide = inputs.q.shape[3], inputs.q.dtype == torch.float32
        sequences = 1 if batch_invariant else inputs.sequences
        config = cls(
            chunk=32 if wide else 64,
            block_k=min(32 if wide else 64, max(16, triton.next_power_of_2(key_dim))),
            block_v=min(64, max(16, triton.next_power_of_2(value_dim))),
            reason="16-bit operands" if not wide else "fp32 operands: short chunks, for each is held as two tf32 numbers",
        )
        units = sequences * heads * triton.cdiv(value_dim, config.block_v)
        if config.block_v >= 64 and 2 * units <= sm_count or wide or key_dim > 128:
            config = replace(config, block_v=min(32, config.block_v), v_rows=False)
            units = sequences * heads * triton.cdiv(value_dim, config.block_v)
        elif config.block_v < 64:
            config = replace(config, v_rows=False)
        return replace(config, segment=config.segment_for(inputs, sm_count // units))

    def segment_for(self, inputs: GDNInputs, segments: int) -> int:
        """Chunks per segment if a sequence is to have as many as `segments`; 0 if it is not to be cut."""
        chunks = triton.cdiv(inputs.v.shape[1], self.chunk)
        per_segment = max(triton.cdiv(chunks, max(1, segments)), _MIN_SEGMENT // self.chunk)
        return 0 if per_segment >= chunks else int(per_segment)
