# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 (Triton unpacks no tuples)
"""Stage 3 of `portable_kernel.py`: states in memory, and how a segment hands one over to the next.

A state is a tuple of blocks of N, (p, n) if P_ROWS, else (n, p), in memory `step` elements apart.  What the last block
has past N is zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ssdprof.kernels._triton import decay_exp2

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
    """Stage 3, until the segment before has handed over."""
    while tl.atomic_add(flag_ptr, 0, sem="acquire") < segment:
        pass


@triton.jit
def part_of_state(m_state, k: tl.constexpr, BLOCK: tl.constexpr, DSTATE: tl.constexpr, P_ROWS: tl.constexpr):
    """Where block k of a state lies inside P, as `m_state` says, and inside N."""
    if (k + 1) * BLOCK > DSTATE:
        m_n = tl.arange(0, BLOCK) < DSTATE - k * BLOCK
        return m_state & (m_n[None, :] if P_ROWS else m_n[:, None])
    else:
        return m_state


@triton.jit
def take_state(ptr, tile, step, m_state, DSTATE: tl.constexpr, P_ROWS: tl.constexpr):
    """Stage 3: a state in fp32, from L2: a line of it in L1 may be older."""
    BLOCK: tl.constexpr = tile.shape[1] if P_ROWS else tile.shape[0]
    state = ()
    for k in tl.static_range((DSTATE + BLOCK - 1) // BLOCK):
        m = part_of_state(m_state, k, BLOCK, DSTATE, P_ROWS)
        block = tl.load(ptr + k * step + tile, mask=m, other=0.0, cache_modifier=".cg")
        state = state + (block.to(tl.float32),)
    return state


@triton.jit
def store_state(ptr, tile, step, m_state, state, DSTATE: tl.constexpr, P_ROWS: tl.constexpr):
    """Stage 3, or a sequence's end."""
    BLOCK: tl.constexpr = tile.shape[1] if P_ROWS else tile.shape[0]
    for k in tl.static_range(len(state)):
        m = part_of_state(m_state, k, BLOCK, DSTATE, P_ROWS)
        tl.store(ptr + k * step + tile, state[k].to(ptr.dtype.element_ty), mask=m)


@triton.jit
def hand_over_state(
    states_ptr, tile, step, m_state, flag_ptr, entering, added, decay_log2, DSTATE: tl.constexpr, P_ROWS: tl.constexpr
):
    """Stage 3: the state leaving the segment, into the place of the one that entered it."""
    decay = decay_exp2(decay_log2)
    leaving = ()
    for k in tl.static_range(len(entering)):
        leaving = leaving + (entering[k] * decay + added[k],)
    tl.debug_barrier()  # every thread has read what entered
    store_state(states_ptr, tile, step, m_state, leaving, DSTATE, P_ROWS)
    tl.debug_barrier()  # every thread has written what leaves
    tl.atomic_add(flag_ptr, 1, sem="release")
