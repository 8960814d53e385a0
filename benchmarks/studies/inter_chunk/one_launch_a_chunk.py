# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The state after each chunk, by one launch for each chunk.

    out[c] = decay[c] * out[c-1] + states[c]

In:   states (b, c, h, k, v) | decay (b, c, h, k) fp32
Out:  out (b, c, h, k, v), of the dtype of states
Grid: (b * h * k-blocks), c times.  One program owns some rows of one head's state in one chunk; the end of a launch
      orders the chunks.
Oracle: `reference.py`.  The same bits in every call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inter_chunk.block import block_of
from inter_chunk.inputs import InterChunkInputs
from inter_chunk.loop import metadata
from ssdprof.kernels.functions import ptr_offset
from ssdprof.kernels.launch import launch


@dataclass(frozen=True, kw_only=True)
class ChunkConfig:
    """rows: rows of a state per program."""

    rows: int = 8
    num_warps: int = 4


@triton.jit(launch_metadata=metadata, do_not_specialize=["nheads", "i_c"])
def _one_chunk_kernel(
    states_ptr, decay_ptr, out_ptr,
    states_strides, decay_strides, out_strides,
    nheads, i_c,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # --- the program's part of a state
    i_b, i_h, o_k, o_v, m_k, m = block_of(tl.program_id(0), nheads, K, V, ROWS, BLOCK_V)

    # --- one step
    here = (i_b, i_c, i_h, o_k[:, None], o_v[None, :])
    b_states = tl.load(states_ptr + ptr_offset(here, states_strides), mask=m, other=0.0)
    b_decay = tl.load(decay_ptr + ptr_offset((i_b, i_c, i_h, o_k), decay_strides), mask=m_k, other=0.0)
    before = out_ptr + ptr_offset((i_b, i_c - 1, i_h, o_k[:, None], o_v[None, :]), out_strides)
    state = tl.load(before, mask=m & (i_c > 0), other=0.0).to(tl.float32)
    state = state * b_decay[:, None] + b_states.to(tl.float32)
    tl.store(out_ptr + ptr_offset(here, out_strides), state.to(out_ptr.dtype.element_ty), mask=m)


def one_launch_a_chunk(inputs: InterChunkInputs, *, config: ChunkConfig | None = None) -> torch.Tensor:
    """Returns out."""
    config = config or ChunkConfig()
    if inputs.rank:
        raise ValueError("one_launch_a_chunk: diagonal transitions only")
    batch, nchunks, nheads, k, v = inputs.states.shape
    out = torch.empty_like(inputs.states)
    for i_c in range(nchunks):
        launch(
            _one_chunk_kernel,
            batch * nheads * triton.cdiv(k, config.rows),
            (inputs.states, inputs.decay, out),
            (inputs.states.stride(), inputs.decay.stride(), out.stride(), nheads, i_c),
            K=k, V=v, ROWS=config.rows, BLOCK_V=triton.next_power_of_2(v),
            num_warps=config.num_warps,
        )  # fmt: skip
    return out
