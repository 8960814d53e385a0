# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The state after each chunk, if a transition is a decay and a correction of low rank.

    out[c] = decay[c] * (out[c-1] - w[c] (y[c]^T out[c-1])) + states[c]

resident:   the state stays in registers, in fp32, or rounded in every iteration to the dtype of `out`.
otherwise:  every iteration reads the state that the one before stored back from global memory, bypassing the L1 cache.
tensor_cores:  y^T h and w (y^T h) are matrix products with the rank padded to 16, in tf32x3; otherwise a sum and an
               update for each column of the rank, in fp32.

In:   states (b, c, h, k, v) | decay (b, c, h, k) fp32 | w, y (b, c, h, k, r)
Out:  out (b, c, h, k, v), of the dtype of states
Grid: (b * h * v-blocks).  One program owns all rows of some columns of one head's state and walks over the chunks.
Oracle: `reference.py`.  The same bits in every call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from inter_chunk.inputs import InterChunkInputs
from ssdprof.kernels.functions import DOT_PRECISION, ptr_offset
from ssdprof.kernels.launch import launch

LEAST_INNER = 16  # the least inner size of tl.dot


@dataclass(frozen=True, kw_only=True)
class LowRankConfig:
    """block_v: columns of a state per program.  num_stages: iterations that loads run ahead, 1 for none."""

    block_v: int = 16
    num_warps: int = 4
    num_stages: int = 2


def _metadata(_grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    tensors = [args[f"{name}_ptr"] for name in ("states", "decay", "w", "y", "out")]
    out, rank = args["out_ptr"], args["w_ptr"].shape[4]
    return {
        "name": f"{kernel.name} {'x'.join(map(str, out.shape))} r{rank}",
        "flops": (2 + 4 * rank) * out.numel(),
        "bytes": sum(t.numel() * t.element_size() for t in tensors),
    }


@triton.jit(launch_metadata=_metadata, do_not_specialize=["nheads", "nchunks"])
def _low_rank_kernel(
    states_ptr, decay_ptr, w_ptr, y_ptr, out_ptr,
    states_strides, decay_strides, w_strides, y_strides, out_strides,
    nheads, nchunks,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
    RESIDENT: tl.constexpr, ROUND: tl.constexpr, TENSOR_CORES: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # --- the program's columns of a state
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    i_bh = tl.program_id(0) // BLOCKS
    i_b, i_h = i_bh // nheads, i_bh % nheads
    o_k, o_r = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_R)
    o_v = (tl.program_id(0) % BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    m = (o_k < K)[:, None] & (o_v < V)[None, :]
    m_r = (o_k < K)[:, None] & (o_r < R)[None, :]

    # --- chunk after chunk
    state = tl.zeros((BLOCK_K, BLOCK_V), dtype=tl.float32)
    for i_c in tl.range(0, nchunks, num_stages=NUM_STAGES):
        here = (i_b, i_c, i_h, o_k[:, None], o_v[None, :])
        b_states = tl.load(states_ptr + ptr_offset(here, states_strides), mask=m, other=0.0)
        b_decay = tl.load(decay_ptr + ptr_offset((i_b, i_c, i_h, o_k), decay_strides), mask=o_k < K, other=0.0)
        if not RESIDENT:
            before = out_ptr + ptr_offset((i_b, i_c - 1, i_h, o_k[:, None], o_v[None, :]), out_strides)
            state = tl.load(before, mask=m & (i_c > 0), other=0.0, cache_modifier=".cg").to(tl.float32)
        if TENSOR_CORES:
            w_offset = ptr_offset((i_b, i_c, i_h, o_k[:, None], o_r[None, :]), w_strides)
            y_offset = ptr_offset((i_b, i_c, i_h, o_k[:, None], o_r[None, :]), y_strides)
            b_w = tl.load(w_ptr + w_offset, mask=m_r, other=0.0).to(tl.float32)
            b_y = tl.load(y_ptr + y_offset, mask=m_r, other=0.0).to(tl.float32)
            projected = tl.dot(tl.trans(b_y), state, input_precision=DOT_PRECISION)  # [BLOCK_R, BLOCK_V]
            state -= tl.dot(b_w, projected, input_precision=DOT_PRECISION)
        else:
            corrected = state
            for r in tl.static_range(R):
                w_column = tl.load(w_ptr + ptr_offset((i_b, i_c, i_h, o_k, r), w_strides), mask=o_k < K, other=0.0)
                y_column = tl.load(y_ptr + ptr_offset((i_b, i_c, i_h, o_k, r), y_strides), mask=o_k < K, other=0.0)
                projection = tl.sum(y_column.to(tl.float32)[:, None] * state, 0)  # [BLOCK_V]
                corrected -= w_column.to(tl.float32)[:, None] * projection[None, :]
            state = corrected
        state = state * b_decay[:, None] + b_states.to(tl.float32)
        stored = state.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + ptr_offset(here, out_strides), stored, mask=m)
        if ROUND:
            state = stored.to(tl.float32)
        if not RESIDENT:
            tl.debug_barrier()  # another thread may load the data that this one has stored


def low_rank(
    inputs: InterChunkInputs,
    *,
    resident: bool,
    tensor_cores: bool,
    rounded: bool = False,
    config: LowRankConfig | None = None,
) -> torch.Tensor:
    """Returns out.  rounded: only for a resident state; a state that is read back is always rounded."""
    config = config or LowRankConfig()
    if inputs.w is None or inputs.y is None:
        raise ValueError("low_rank: w and y are missing")
    if not resident and config.num_stages != 1:
        raise ValueError("low_rank: num_stages must be 1 for a state that is read back")
    batch, nchunks, nheads, k, v = inputs.states.shape
    out = torch.empty_like(inputs.states)
    tensors = (inputs.states, inputs.decay, inputs.w, inputs.y, out)
    launch(
        _low_rank_kernel,
        batch * nheads * triton.cdiv(v, config.block_v),
        tensors,
        (*(tensor.stride() for tensor in tensors), nheads, nchunks),
        K=k, V=v, R=inputs.rank,
        BLOCK_K=max(LEAST_INNER, triton.next_power_of_2(k)), BLOCK_V=config.block_v,
        BLOCK_R=max(LEAST_INNER, triton.next_power_of_2(inputs.rank)),
        RESIDENT=resident, ROUND=rounded, TENSOR_CORES=tensor_cores, NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
    )  # fmt: skip
    return out
