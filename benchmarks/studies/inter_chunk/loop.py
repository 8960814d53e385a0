# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The state after each chunk, by one launch whose programs loop over the chunks.

    out[c] = decay[c] * out[c-1] + states[c]

resident:   the state stays in registers, in fp32, or rounded in every iteration to the dtype of `out`.
otherwise:  every iteration reads the state that the one before stored back from global memory, bypassing the L1 cache.

In:   states (b, c, h, k, v) | decay (b, c, h, k) fp32
Out:  out (b, c, h, k, v), of the dtype of states
Grid: (b * h * k-blocks).  One program owns some rows of one head's state and walks over the chunks.
Oracle: `reference.py`.  The same bits in every call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from inter_chunk.block import block_of
from inter_chunk.inputs import InterChunkInputs
from ssdprof.kernels.functions import ptr_offset
from ssdprof.kernels.launch import launch


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """rows: rows of a state per program.  num_stages: iterations that loads run ahead, 1 for none.

    A state that is read back cannot be loaded ahead, because its iteration must wait for the store of the one before.
    """

    rows: int = 8
    num_warps: int = 4
    num_stages: int = 6


def metadata(_grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """For a profiler: one product and one sum per element; states and decays read, `out` written."""
    read, out = (args["states_ptr"], args["decay_ptr"]), args["out_ptr"]
    return {
        "name": f"{kernel.name} {'x'.join(map(str, out.shape))}",
        "flops": 2 * out.numel(),
        "bytes": sum(t.numel() * t.element_size() for t in (*read, out)),
    }


@triton.jit(launch_metadata=metadata, do_not_specialize=["nheads", "nchunks"])
def _loop_kernel(
    states_ptr, decay_ptr, out_ptr,
    states_strides, decay_strides, out_strides,
    nheads, nchunks,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
    RESIDENT: tl.constexpr, ROUND: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # --- the program's part of a state
    i_b, i_h, o_k, o_v, m_k, m = block_of(tl.program_id(0), nheads, K, V, ROWS, BLOCK_V)

    # --- chunk after chunk
    state = tl.zeros((ROWS, BLOCK_V), dtype=tl.float32)
    for i_c in tl.range(0, nchunks, num_stages=NUM_STAGES):
        here = (i_b, i_c, i_h, o_k[:, None], o_v[None, :])
        b_states = tl.load(states_ptr + ptr_offset(here, states_strides), mask=m, other=0.0)
        b_decay = tl.load(decay_ptr + ptr_offset((i_b, i_c, i_h, o_k), decay_strides), mask=m_k, other=0.0)
        if not RESIDENT:
            before = out_ptr + ptr_offset((i_b, i_c - 1, i_h, o_k[:, None], o_v[None, :]), out_strides)
            state = tl.load(before, mask=m & (i_c > 0), other=0.0, cache_modifier=".cg").to(tl.float32)
        state = state * b_decay[:, None] + b_states.to(tl.float32)
        stored = state.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + ptr_offset(here, out_strides), stored, mask=m)
        if ROUND:
            state = stored.to(tl.float32)
        if not RESIDENT:
            tl.debug_barrier()  # another thread may load the data that this one has stored


def loop(
    inputs: InterChunkInputs, *, resident: bool, rounded: bool = False, config: LoopConfig | None = None
) -> torch.Tensor:
    """Returns out.  rounded: only for a resident state; a state that is read back is always rounded."""
    config = config or LoopConfig()
    if inputs.rank:
        raise ValueError("loop: diagonal transitions only")
    if not resident and config.num_stages != 1:
        raise ValueError("loop: num_stages must be 1 for a state that is read back")
    batch, nchunks, nheads, k, v = inputs.states.shape
    out = torch.empty_like(inputs.states)
    launch(
        _loop_kernel,
        batch * nheads * triton.cdiv(k, config.rows),
        (inputs.states, inputs.decay, out),
        (inputs.states.stride(), inputs.decay.stride(), out.stride(), nheads, nchunks),
        K=k, V=v, ROWS=config.rows, BLOCK_V=triton.next_power_of_2(v),
        RESIDENT=resident, ROUND=rounded, NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
    )  # fmt: skip
    return out
