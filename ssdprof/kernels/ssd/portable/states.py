# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 (Triton unpacks no tuples)
"""Stage 3 of `portable_kernel.py`: states in memory, and their hand-over from one segment to the next.

A state is a tuple of blocks of N, each (p, n) if P_ROWS, else (n, p).  In memory, blocks are `step` elements apart.
The last block is zero past N.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ssdprof.kernels.functions import decay_exp2

STAGES = {
    "zero_state": "caller",
    "wait_for_state": "state_passing.wait",
    "part_of_state": "caller",
    "take_state": "state_passing.load",
    "store_state": "caller",
    "hand_over_state": "state_passing.store",
}


@triton.jit
def zero_state(tile, BLOCKS: tl.constexpr):
    blocks = ()
    for _ in tl.static_range(BLOCKS):
        blocks = blocks + (tl.zeros(tile.shape, tl.float32),)
    return blocks


@triton.jit
def wait_for_state(flag_ptr, segment):
    """Stage 3: wait until the preceding segment has handed over its state."""
    while tl.atomic_add(flag_ptr, 0, sem="acquire") < segment:
        pass


@triton.jit
def part_of_state(m_state, k: tl.constexpr, BLOCK: tl.constexpr, DSTATE: tl.constexpr, P_ROWS: tl.constexpr):
    """Mask of block k of a state: inside P (`m_state`) and inside N."""
    if (k + 1) * BLOCK > DSTATE:
        m_n = tl.arange(0, BLOCK) < DSTATE - k * BLOCK
        return m_state & (m_n[None, :] if P_ROWS else m_n[:, None])
    else:
        return m_state


@triton.jit
def take_state(ptr, tile, step, m_state, DSTATE: tl.constexpr, P_ROWS: tl.constexpr):
    """Stage 3: load a state in fp32.  Bypasses L1, whose lines may be outdated."""
    BLOCK: tl.constexpr = tile.shape[1] if P_ROWS else tile.shape[0]
    state = ()
    for k in tl.static_range((DSTATE + BLOCK - 1) // BLOCK):
        m = part_of_state(m_state, k, BLOCK, DSTATE, P_ROWS)
        block = tl.load(ptr + k * step + tile, mask=m, other=0.0, cache_modifier=".cg")
        state = state + (block.to(tl.float32),)
    return state


@triton.jit
def store_state(ptr, tile, step, m_state, state, DSTATE: tl.constexpr, P_ROWS: tl.constexpr):
    """Store a state, in stage 3 or at a sequence's end."""
    BLOCK: tl.constexpr = tile.shape[1] if P_ROWS else tile.shape[0]
    for k in tl.static_range(len(state)):
        m = part_of_state(m_state, k, BLOCK, DSTATE, P_ROWS)
        tl.store(ptr + k * step + tile, state[k].to(ptr.dtype.element_ty), mask=m)


@triton.jit
def hand_over_state(
    states_ptr, tile, step, m_state, flag_ptr, entering, added, decay_log2, DSTATE: tl.constexpr, P_ROWS: tl.constexpr
):
    """Stage 3: overwrite the state that entered the segment with the one that leaves it, and set the flag."""
    decay = decay_exp2(decay_log2)
    leaving = ()
    for k in tl.static_range(len(entering)):
        leaving = leaving + (entering[k] * decay + added[k],)
    tl.debug_barrier()  # all threads have read the entering state
    store_state(states_ptr, tile, step, m_state, leaving, DSTATE, P_ROWS)
    tl.debug_barrier()  # all threads have stored the leaving state
    tl.atomic_add(flag_ptr, 1, sem="release")
