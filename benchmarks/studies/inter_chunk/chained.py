# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The state after each chunk, by one launch with a program for each chunk, which waits for the chunk before.

    out[c] = decay[c] * out[c-1] + states[c]

A program takes a ticket, which determines its chunk, earlier chunks first.  It loads its summand, waits for the flag of
its block until the chunk before has stored its state, loads that state from L2, stores its own state and raises the
flag.

Forward progress: a program waits only for a program with an earlier ticket.  Running programs take tickets, so that
the other program is running or has ended.  The program with the first ticket of a block does not wait.
Order: chunks are always added in their order.  The bits are therefore the same in every call, and equal those of a
loop that reads its state back.

In:   states (b, c, h, k, v) | decay (b, c, h, k) fp32
Out:  out (b, c, h, k, v), of the dtype of states
Grid: (c * b * h * k-blocks).  One program owns some rows of one head's state in one chunk.
Oracle: `reference.py`.
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

FLAG_STRIDE = 8  # int32 numbers: flags of different blocks are in different sectors


@dataclass(frozen=True, kw_only=True)
class ChainedConfig:
    """rows: rows of a state per program.  With more rows there are fewer flags to wait for."""

    rows: int = 16
    num_warps: int = 4


@triton.jit(launch_metadata=metadata, do_not_specialize=["nheads", "blocks"])
def _chained_kernel(
    states_ptr, decay_ptr, out_ptr, sync_ptr,
    states_strides, decay_strides, out_strides,
    nheads, blocks,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    # --- the program's chunk, and its part of a state
    ticket = tl.atomic_add(sync_ptr, 1, sem="relaxed")
    i_c, i_block = ticket // blocks, ticket % blocks
    i_b, i_h, o_k, o_v, m_k, m = block_of(i_block, nheads, K, V, ROWS, BLOCK_V)
    flag_ptr = sync_ptr + (1 + i_block.to(tl.int64)) * STRIDE

    # --- work that needs no other program
    here = (i_b, i_c, i_h, o_k[:, None], o_v[None, :])
    b_states = tl.load(states_ptr + ptr_offset(here, states_strides), mask=m, other=0.0)
    b_decay = tl.load(decay_ptr + ptr_offset((i_b, i_c, i_h, o_k), decay_strides), mask=m_k, other=0.0)

    # --- the state of the chunk before
    while tl.atomic_add(flag_ptr, 0, sem="acquire") < i_c:
        pass
    before = out_ptr + ptr_offset((i_b, i_c - 1, i_h, o_k[:, None], o_v[None, :]), out_strides)
    state = tl.load(before, mask=m & (i_c > 0), other=0.0, cache_modifier=".cg").to(tl.float32)
    state = state * b_decay[:, None] + b_states.to(tl.float32)
    tl.store(out_ptr + ptr_offset(here, out_strides), state.to(out_ptr.dtype.element_ty), mask=m)
    tl.debug_barrier()  # every thread has stored its part of the state before the flag is raised
    tl.atomic_add(flag_ptr, 1, sem="release")


def chained(inputs: InterChunkInputs, *, config: ChainedConfig | None = None) -> torch.Tensor:
    """Returns out."""
    config = config or ChainedConfig()
    if inputs.rank:
        raise ValueError("chained: diagonal transitions only")
    batch, nchunks, nheads, k, v = inputs.states.shape
    blocks = batch * nheads * triton.cdiv(k, config.rows)
    out = torch.empty_like(inputs.states)
    sync = torch.zeros((1 + blocks) * FLAG_STRIDE, dtype=torch.int32, device=out.device)  # tickets, then flags
    launch(
        _chained_kernel,
        nchunks * blocks,
        (inputs.states, inputs.decay, out, sync),
        (inputs.states.stride(), inputs.decay.stride(), out.stride(), nheads, blocks),
        K=k, V=v, ROWS=config.rows, BLOCK_V=triton.next_power_of_2(v), STRIDE=FLAG_STRIDE,
        num_warps=config.num_warps,
    )  # fmt: skip
    return out
