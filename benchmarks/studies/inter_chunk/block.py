# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The part of a state that a program owns, for kernels that process a state by blocks of rows."""

from __future__ import annotations

import triton
import triton.language as tl

import ssdprof.kernels.functions  # noqa: F401  chooses GPU or interpreter, before a kernel is defined


@triton.jit
def block_of(i_block, nheads, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr):
    """The batch and head of a block, its rows (ROWS,) and columns (BLOCK_V,), and masks of existing rows and elements.

    Blocks of a head vary fastest, then heads, then batches.
    """
    BLOCKS: tl.constexpr = (K + ROWS - 1) // ROWS
    i_bh = i_block // BLOCKS
    i_b, i_h = i_bh // nheads, i_bh % nheads
    o_k, o_v = (i_block % BLOCKS) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_V)
    m_k = o_k < K
    m = m_k[:, None] & (o_v < V)[None, :]
    return i_b, i_h, o_k, o_v, m_k, m
