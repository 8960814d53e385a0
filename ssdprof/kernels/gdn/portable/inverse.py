# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The inverse of I + L in registers, with L strictly lower triangular.

    [I + L1        ]^-1   [   A1         ]
    [  C     I + L2]    = [-A2 C A1   A2 ]

Let A be the block diagonal matrix of the inverses of the diagonal blocks of s rows, and let C hold the entries of L
between the two halves of each block of 2s rows.  Then A - A C A holds the inverses of the diagonal blocks of 2s rows.
Every entry of these products is an entry of an inverse, which stays small even for collinear keys.  A Neumann series
would compute powers of L, which do not stay small.

Blocks of up to 16 rows are inverted in fp32 (tf32x3).  The products that join them have operands in MERGE.  fp16 has
the precision of tf32 and costs half, but its range is guaranteed to be sufficient only for normalised keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ssdprof.kernels.functions import DOT_PRECISION

LEAF = tl.constexpr(16)  # least rows of a product

STAGES = {"between_halves": "solve_tril", "leaf_inverses": "solve_tril", "unit_lower_inverse": "solve_tril"}


@triton.jit
def between_halves(i, j, half: tl.constexpr):
    """Whether entry (i, j) lies between the lower and the upper half of a diagonal block of 2 * half rows."""
    return (i // (2 * half) == j // (2 * half)) & (i // half > j // half)


@triton.jit
def leaf_inverses(L):
    """The inverses of I + L for L (n, LEAF, LEAF)."""
    o = tl.arange(0, LEAF)
    i, j = o[None, :, None], o[None, None, :]
    A = tl.where(i == j, 1.0, 0.0) - tl.where(between_halves(i, j, 1), L, 0.0)
    for log2_half in tl.static_range(1, 4):
        C = tl.where(between_halves(i, j, 2**log2_half), L, 0.0)
        A -= tl.dot(A, tl.dot(C, A, input_precision=DOT_PRECISION), input_precision=DOT_PRECISION)
    return A


@triton.jit
def unit_lower_inverse(L, MERGE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^-1 for L (s, s) fp32.  Reads only entries below the diagonal.  s is 16, 32, 64 or 128.

    MERGE: dtype of the operands of the products that join blocks of 16 rows
    PRECISION: input precision of these products if MERGE is fp32
    """
    SIZE: tl.constexpr = L.shape[0]
    LEAVES: tl.constexpr = SIZE // LEAF
    o_n = tl.arange(0, LEAVES)
    diagonal = (o_n[:, None] == o_n[None, :])[:, None, :, None]
    # extract the diagonal blocks: each sum has one nonzero term
    leaves = tl.sum(tl.where(diagonal, tl.reshape(L, (LEAVES, LEAF, LEAVES, LEAF)), 0.0), axis=2)
    A = tl.reshape(leaf_inverses(leaves), (LEAVES, LEAF, 1, LEAF))
    A = tl.reshape(tl.where(diagonal, A, 0.0), (SIZE, SIZE))
    o = tl.arange(0, SIZE)
    for log2_half in tl.static_range(4, 7):
        if 2**log2_half < SIZE:
            C = tl.where(between_halves(o[:, None], o[None, :], 2**log2_half), L, 0.0)
            factor = A.to(MERGE)
            product = tl.dot(C.to(MERGE), factor, input_precision=PRECISION)
            A -= tl.dot(factor, product.to(MERGE), input_precision=PRECISION)
    return A
