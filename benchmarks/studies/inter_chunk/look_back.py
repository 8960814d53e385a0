# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The state after each chunk, by segments of chunks that run in parallel.

A program processes its segment twice.  The first pass computes the state that the segment adds to a zero state, and its
decay, and publishes both for later segments.  The second pass computes the states from the state that enters the
segment.  The state that enters segment s is the sum over the segments j before it, from the nearest one back, of the
state that j added, decayed by j + 1 .. s - 1.

Forward progress: a program publishes before it waits, and waits only for programs with earlier tickets.  Running
programs take tickets, so every wait ends.
Order: always from the nearest segment back to the first, independent of timing, so that the bits are the same in every
call.  A look-back that stops at the first finished state would sum in an order that depends on timing.

In:   states (b, c, h, k, v) | decay (b, c, h, k) fp32
Out:  out (b, c, h, k, v), of the dtype of states
Grid: (segments * b * h * k-blocks).  One program owns some rows of one head's state in one segment.
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

FLAG_STRIDE = 8  # int32 numbers: flags of different programs are in different sectors


@dataclass(frozen=True, kw_only=True)
class LookBackConfig:
    """rows: rows of a state per program; segment: chunks per program."""

    rows: int = 8
    segment: int = 16
    num_warps: int = 4
    num_stages: int = 3


@triton.jit(launch_metadata=metadata, do_not_specialize=["nheads", "nchunks", "blocks"])
def _look_back_kernel(
    states_ptr, decay_ptr, out_ptr, parts_ptr, sync_ptr,
    states_strides, decay_strides, out_strides,
    nheads, nchunks, blocks,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr, SEGMENT: tl.constexpr,
    STRIDE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # --- the program's segment, and its part of a state
    ticket = tl.atomic_add(sync_ptr, 1, sem="relaxed")
    i_segment, i_block = ticket // blocks, ticket % blocks
    i_b, i_h, o_k, o_v, m_k, m = block_of(i_block, nheads, K, V, ROWS, BLOCK_V)
    o_row = tl.arange(0, ROWS)
    o_part = o_row[:, None] * BLOCK_V + o_v[None, :]
    PART: tl.constexpr = ROWS * BLOCK_V + ROWS  # the state that a segment adds, and its decays
    first = i_segment * SEGMENT
    after = tl.minimum(first + SEGMENT, nchunks)

    # --- the state that the segment adds to a zero state, and its decay: published unless it is the last segment
    if after < nchunks:
        added = tl.zeros((ROWS, BLOCK_V), dtype=tl.float32)
        decays = tl.full((ROWS,), 1.0, dtype=tl.float32)
        for i_c in tl.range(first, after, num_stages=NUM_STAGES):
            here = (i_b, i_c, i_h, o_k[:, None], o_v[None, :])
            b_states = tl.load(states_ptr + ptr_offset(here, states_strides), mask=m, other=0.0)
            b_decay = tl.load(decay_ptr + ptr_offset((i_b, i_c, i_h, o_k), decay_strides), mask=m_k, other=0.0)
            added = added * b_decay[:, None] + b_states.to(tl.float32)
            decays *= b_decay
        mine = parts_ptr + ticket.to(tl.int64) * PART
        tl.store(mine + o_part, added)
        tl.store(mine + ROWS * BLOCK_V + o_row, decays)
        tl.debug_barrier()  # every thread has stored its part before the flag is raised
        tl.atomic_add(sync_ptr + (1 + ticket.to(tl.int64)) * STRIDE, 1, sem="release")

    # --- the state that enters the segment
    state = tl.zeros((ROWS, BLOCK_V), dtype=tl.float32)
    passed = tl.full((ROWS,), 1.0, dtype=tl.float32)
    for back in range(0, i_segment):
        theirs = ((i_segment - 1 - back) * blocks + i_block).to(tl.int64)
        while tl.atomic_add(sync_ptr + (1 + theirs) * STRIDE, 0, sem="acquire") == 0:
            pass
        part = parts_ptr + theirs * PART
        state += passed[:, None] * tl.load(part + o_part, cache_modifier=".cg")
        passed *= tl.load(part + ROWS * BLOCK_V + o_row, cache_modifier=".cg")

    # --- the states
    for i_c in tl.range(first, after, num_stages=NUM_STAGES):
        here = (i_b, i_c, i_h, o_k[:, None], o_v[None, :])
        b_states = tl.load(states_ptr + ptr_offset(here, states_strides), mask=m, other=0.0)
        b_decay = tl.load(decay_ptr + ptr_offset((i_b, i_c, i_h, o_k), decay_strides), mask=m_k, other=0.0)
        state = state * b_decay[:, None] + b_states.to(tl.float32)
        stored = state.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + ptr_offset(here, out_strides), stored, mask=m)


def look_back(inputs: InterChunkInputs, *, config: LookBackConfig | None = None) -> torch.Tensor:
    """Returns out."""
    config = config or LookBackConfig()
    if inputs.rank:
        raise ValueError("look_back: diagonal transitions only")
    batch, nchunks, nheads, k, v = inputs.states.shape
    blocks = batch * nheads * triton.cdiv(k, config.rows)
    programs = triton.cdiv(nchunks, config.segment) * blocks
    out = torch.empty_like(inputs.states)
    block_v = triton.next_power_of_2(v)
    parts = torch.empty(programs, config.rows * (block_v + 1), dtype=torch.float32, device=out.device)
    sync = torch.zeros((1 + programs) * FLAG_STRIDE, dtype=torch.int32, device=out.device)  # tickets, then flags
    launch(
        _look_back_kernel,
        programs,
        (inputs.states, inputs.decay, out, parts, sync),
        (inputs.states.stride(), inputs.decay.stride(), out.stride(), nheads, nchunks, blocks),
        K=k, V=v, ROWS=config.rows, BLOCK_V=block_v, SEGMENT=config.segment, STRIDE=FLAG_STRIDE,
        NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
    )  # fmt: skip
    return out
