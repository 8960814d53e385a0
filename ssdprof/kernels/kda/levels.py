# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Scores with a decay for every channel, whose exponents are never positive, in Triton; and the dtypes of products.

In a block of 2 h positions, take the last position of its first half as the anchor.  A pair of a row i in the second
half and a column j in the first has the decay exp(G_i - G_anchor) exp(G_anchor - G_j), and both exponents are at most
0 for any gate.  The pairs inside a half follow from blocks of half the size.  So h = C / 2, ..., 2, 1 cover all pairs
but the diagonal, whose decay is 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ssdprof.kernels.functions import LOG2_E, decay_exp2
from ssdprof.kernels.gdn.portable import FORGOTTEN

STAGES = {
    "half_decays": "decayed_scores", "add_scores": "decayed_scores",
    "queries_with_keys": "decayed_scores", "keys_with_keys": "decayed_scores", "cumulative_decays": "gate_cumsum",
}  # fmt: skip


def score_products(operand: torch.dtype, *, normalised: bool) -> tuple[tl.dtype, str]:
    """The dtype and input precision of the scores' operands.

    They keep 11 significant bits, more than bfloat16, because the inverse amplifies errors of the system.  fp16 is
    twice as fast as tf32, but its range suffices only for fp16 inputs and for normalised ones.
    """
    if operand == torch.float32:
        return tl.float32, "tf32x3"
    return (tl.float16, "tf32") if normalised or operand == torch.float16 else (tl.float32, "tf32")


@triton.jit
def cumulative_decays(g):
    """Sums of the clamped g over axis 0, in log2 units; NaN stays NaN.  Rounded once, because differences follow."""
    g = tl.clamp(g.to(tl.float32) * LOG2_E, FORGOTTEN, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.cumsum(g.to(tl.float64), axis=0).to(tl.float32)


@triton.jit
def half_decays(G, half):
    """The decay between each position and the anchor of its block of 2 * half positions, for cumulative G (C, n)."""
    i = tl.broadcast_to(tl.arange(0, G.shape[0])[:, None], G.shape)
    after = G - tl.gather(G, (i & ~(2 * half - 1)) + (half - 1), axis=0)
    return decay_exp2(tl.where((i & half) == 0, -after, after))


@triton.jit
def add_scores(scores, q, k, G, PRECISION: tl.constexpr):
    """Add a block of channels to `scores` (C, C): q with k on and below the diagonal, k with k, transposed, above it.

    q, k: (C, n), in the products' dtype.  One product serves both: a pair's row i has q_i and its column k_j, and with
    the roles exchanged row j has k_j and column i has k_i.  The loop is not unrolled: its masks and factors would
    otherwise fill the registers.
    """
    SIZE: tl.constexpr = G.shape[0]
    o = tl.arange(0, SIZE)
    i, j = o[:, None], o[None, :]
    scores += tl.where(i == j, tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1)[:, None], 0.0)
    half = SIZE // 2
    while half > 0:
        decays = half_decays(G, half)
        rows = (tl.where((i & half) == 0, k, q).to(tl.float32) * decays).to(k.dtype)
        columns = tl.trans((k.to(tl.float32) * decays).to(k.dtype))
        product = tl.dot(rows, columns, input_precision=PRECISION)
        scores += tl.where((i ^ j) // half == 1, product, 0.0)  # in the two halves of one block
        half = half // 2
    return scores


@triton.jit
def queries_with_keys(scores):
    """The lower triangle of `add_scores`: P."""
    o = tl.arange(0, scores.shape[0])
    return tl.where(o[:, None] >= o[None, :], scores, 0.0)


@triton.jit
def keys_with_keys(scores):
    """The upper one, transposed: L without beta, strictly lower triangular."""
    o = tl.arange(0, scores.shape[0])
    return tl.trans(tl.where(o[:, None] < o[None, :], scores, 0.0))
