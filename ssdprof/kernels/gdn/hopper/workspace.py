"""The workspace of a call of the Hopper kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig, row_count, slot_count
from ssdprof.kernels.gdn.hopper.rings import DIM
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.hopper.ring import CHUNK
from ssdprof.kernels.tensors import Layout, Place


@dataclass(frozen=True, kw_only=True)
class HopperWorkspace:
    """Places of the tensors that one launch writes for another; None if a call has no such launch.

    `prep_kernel.py`: inverse (slots, HV, 64, 64) in q's dtype | decays (slots, HV, 64) fp32 | bounds (HV, slots) fp32
        norms (slots, H, 2, 64) fp32, if it normalises q and k
    `slow_heads.py`: backs (rows) int32 | parts (rows, parts, V, K) fp32 | moves (rows, parts, 2, K, K) bf16
        entering (rows, V, K) fp32
    `slices.py`: padded (sequences, HV, 128, 128) fp32, from which the final states are copied
    """

    layout: Layout
    inverse: Place | None
    decays: Place | None
    bounds: Place | None
    norms: Place | None
    backs: Place | None
    parts: Place | None
    moves: Place | None
    entering: Place | None
    padded: Place | None

    @classmethod
    def of(cls, inputs: GDNInputs, config: GDNHopperConfig, *, padded: bool = False) -> HopperWorkspace:
        layout, single = Layout(), torch.float32
        slots, heads, chunk, dim = slot_count(inputs), inputs.v.shape[2], CHUNK.value, DIM.value
        first = not config.fused_inverse
        rows = row_count(inputs, config.segment) if config.transition_parts else 0
        return cls(
            layout=layout,
            inverse=layout.add(inputs.q.dtype, slots, heads, chunk, chunk) if first else None,
            decays=layout.add(single, slots, heads, chunk) if first else None,
            bounds=layout.add(single, heads, slots) if first else None,
            norms=layout.add(single, slots, inputs.q.shape[2], 2, chunk) if first and inputs.use_qk_l2norm else None,
            backs=layout.add(torch.int32, rows) if rows else None,
            parts=layout.add(single, rows, config.transition_parts, dim, dim) if rows else None,
            moves=layout.add(torch.bfloat16, rows, config.transition_parts, 2, dim, dim) if rows else None,
            entering=layout.add(single, rows, dim, dim) if rows else None,
            padded=layout.add(single, inputs.sequences, heads, dim, dim) if padded else None,
        )


def padded_strides(heads: int, *, state_v_first: bool) -> tuple[int, int, int, int]:
    """Strides of padded states (sequences, HV, K, V).  state_v_first: V precedes K in memory."""
    dim = DIM.value
    return (heads * dim * dim, dim * dim, *((1, dim) if state_v_first else (dim, 1)))
