# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""SSD stage 3 of 5: the state that enters each chunk, and the final state.

    prev_states[0]   = initial_states, or 0
    prev_states[c+1] = exp(dA_cumsum[c, -1]) * prev_states[c] + states[c]

States accumulate in fp32 registers.  Only the stored copies are rounded to the dtype of prev_states.

In:   states (b, c, h, p, n) fp32 | dA_cumsum_log2 (b, h, c, q) fp32 | initial_states (sequences, h, p, n) or None
Out:  prev_states (b, c, h, p, n) state_dtype | final_states (sequences, h, p, n) fp32
Grid: (sequences * h * pn-blocks).  One program owns a block of one head's state and loops over the sequence's chunks.
Oracle: `reference.py`.  Source: Dao and Gu 2024 (arXiv:2405.21060), section 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ssdprof.kernels.chunks import Chunks
from ssdprof.kernels.functions import decay_exp2, ptr_offset
from ssdprof.kernels.launch import launch
from ssdprof.kernels.tensors import strides_of_each

STAGES = {"_state_passing_kernel": "state_passing"}


@dataclass(frozen=True, kw_only=True)
class StatePassingConfig:
    """block: elements of a state per program, 4 fp32 (one 16-byte access) per thread.

    The loop is memory bound, and each iteration depends on the previous one, so loads run num_stages iterations ahead.
    """

    block: int = 512
    num_warps: int = 4
    num_stages: int = 4


def _metadata(_grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    states, *_, prev_states, final_states = args["tensors"]
    batch, nchunks, nheads, headdim, dstate = states.shape
    return {
        "name": f"{kernel.name} b{batch} c{nchunks} h{nheads} p{headdim} n{dstate}",
        "flops": 2 * states.numel(),
        "bytes": sum(t.numel() * t.element_size() for t in (states, prev_states, final_states)),
    }


@triton.jit(launch_metadata=_metadata)
def _state_passing_kernel(tensors, strides, nheads, nchunks, S: tl.constexpr):
    states_ptr, dA_cumsum_log2_ptr, initial_states_ptr, bounds_ptr, prev_states_ptr, final_states_ptr = tensors
    states_strides, dA_cumsum_log2_strides, initial_states_strides, prev_states_strides, final_states_strides = strides
    # --- this program's part of a state
    BLOCKS: tl.constexpr = (S.HEADDIM * S.DSTATE + S.BLOCK - 1) // S.BLOCK
    i_sh = tl.program_id(0) // BLOCKS
    i_s, i_h = i_sh // nheads, i_sh % nheads
    o_pn = (tl.program_id(0) % BLOCKS) * S.BLOCK + tl.arange(0, S.BLOCK)
    o_p, o_n = o_pn // S.DSTATE, o_pn % S.DSTATE
    m = o_pn < S.HEADDIM * S.DSTATE
    if bounds_ptr is None:
        i_b, first, after = i_s, 0, nchunks
    else:
        i_b, first, after = 0, tl.load(bounds_ptr + i_s).to(tl.int32), tl.load(bounds_ptr + i_s + 1).to(tl.int32)

    # --- loop over chunks
    state = tl.zeros((S.BLOCK,), dtype=tl.float32)
    if initial_states_ptr is not None:
        initial_offset = ptr_offset((i_s, i_h, o_p, o_n), initial_states_strides)
        state += tl.load(initial_states_ptr + initial_offset, mask=m, other=0.0).to(tl.float32)
    for i_c in tl.range(first, after, num_stages=S.NUM_STAGES):
        b_states = tl.load(states_ptr + ptr_offset((i_b, i_c, i_h, o_p, o_n), states_strides), mask=m, other=0.0)
        end = tl.load(dA_cumsum_log2_ptr + ptr_offset((i_b, i_h, i_c, S.CHUNK_SIZE - 1), dA_cumsum_log2_strides))
        prev_offset = ptr_offset((i_b, i_c, i_h, o_p, o_n), prev_states_strides)
        tl.store(prev_states_ptr + prev_offset, state.to(prev_states_ptr.dtype.element_ty), mask=m)
        state = state * decay_exp2(end) + b_states
    tl.store(final_states_ptr + ptr_offset((i_s, i_h, o_p, o_n), final_states_strides), state, mask=m)


def state_passing(
    states: torch.Tensor,
    dA_cumsum_log2: torch.Tensor,
    chunks: Chunks,
    *,
    initial_states: torch.Tensor | None = None,
    state_dtype: torch.dtype = torch.float32,
    config: StatePassingConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(prev_states, final_states).  Shapes are in the module docstring; `SSDInputs` has checked them."""
    config = config or StatePassingConfig()
    _, _, nheads, headdim, dstate = states.shape
    prev_states = torch.empty_like(states, dtype=state_dtype)
    final_states = torch.empty(chunks.sequences, nheads, headdim, dstate, device=states.device, dtype=torch.float32)
    launch(
        _state_passing_kernel,
        chunks.sequences * nheads * triton.cdiv(headdim * dstate, config.block),
        (states, dA_cumsum_log2, initial_states, chunks.bounds, prev_states, final_states),
        (
            strides_of_each(states, dA_cumsum_log2, initial_states, prev_states, final_states),
            nheads, chunks.count,
        ),
        CHUNK_SIZE=chunks.size, HEADDIM=headdim, DSTATE=dstate,
        BLOCK=config.block, NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
    )  # fmt: skip
    return prev_states, final_states
