# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""GDN stage 3 of 6: the inverse of each chunk's triangular system.

    A = (I + L)^-1, unit lower triangular

Blocks of 16 rows are inverted by forward substitution in fp32, all at once.  Then neighbouring blocks are merged in
pairs until one block is left:

    [T     ]^-1   [  T^-1               ]
    [C    B]    = [-B^-1 C T^-1    B^-1 ]

Every intermediate number is an entry of an inverse, or a product of such entries with entries of L.  None grows with
nearly collinear keys.  A Neumann series would sum powers of L, which do grow.

In:   L (B, NT, HV, C, C) fp32, its blocks of 16 x 16 on and below the diagonal
Out:  A (B, NT, HV, C, C) in the operands' dtype, zeros above the diagonal
Grid: (B * NT * HV).  One program owns one chunk of one value head.
Oracle: `solve_tril` in tests/kernels/gdn_stages.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ssdprof.kernels.chunks import Chunks, chunk_span
from ssdprof.kernels.functions import ptr_offset
from ssdprof.kernels.gdn.unfused.configs import LEAF, SolveTrilConfig
from ssdprof.kernels.gdn.unfused.precisions import inverse_products
from ssdprof.kernels.launch import launch

STAGES = {"_side_by_side": "solve_tril", "_merge_pairs": "solve_tril", "_gdn_solve_tril_kernel": "solve_tril"}


def _metadata(_grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    L, _, A = args["tensors"]
    batch, nchunks, heads, size, _ = L.shape
    return {
        "name": f"{kernel.name} b{batch} c{nchunks} hv{heads} size{size}",
        "flops": L.numel() * size // 3,
        "bytes": L.numel() * 4 * 5 // 8 + A.numel() * A.element_size(),
    }


@triton.jit
def _side_by_side(left, right):
    """Join two (n, r, c) tensors to one (n, r, 2 * c)."""
    n: tl.constexpr = left.shape[0]
    r: tl.constexpr = left.shape[1]
    c: tl.constexpr = left.shape[2]
    return tl.reshape(tl.permute(tl.join(left, right), (0, 1, 3, 2)), (n, r, 2 * c))


@triton.jit
def _merge_pairs(A, L_ptr, L_strides, PRODUCTS: tl.constexpr):
    """Merge inverses of diagonal blocks, (2 * n, s, s), to those of blocks twice as large, (n, 2 * s, 2 * s)."""
    PAIRS: tl.constexpr = A.shape[0] // 2
    HALF: tl.constexpr = A.shape[1]
    top, bottom = tl.split(tl.permute(tl.reshape(A, (PAIRS, 2, HALF, HALF)), (0, 2, 3, 1)))
    first, o_h = tl.arange(0, PAIRS)[:, None, None] * (2 * HALF), tl.arange(0, HALF)
    below = ptr_offset((first + HALF + o_h[None, :, None], first + o_h[None, None, :]), L_strides)
    corner = tl.dot(tl.load(L_ptr + below), top, input_precision=PRODUCTS)
    corner = -tl.dot(bottom, corner, input_precision=PRODUCTS)
    upper, lower = _side_by_side(top, tl.zeros_like(top)), _side_by_side(corner, bottom)
    return tl.reshape(tl.permute(tl.join(upper, lower), (0, 3, 1, 2)), (PAIRS, 2 * HALF, 2 * HALF))


@triton.jit(launch_metadata=_metadata)
def _gdn_solve_tril_kernel(tensors, strides, length, heads, nchunks, S: tl.constexpr):
    L_ptr, spans_ptr, A_ptr = tensors
    L_strides, A_strides = strides
    # --- this program's chunk
    i_h, i_bc = tl.program_id(0) % heads, tl.program_id(0) // heads
    i_b, i_c = i_bc // nchunks, i_bc % nchunks
    _, count = chunk_span(spans_ptr, i_c, length, S.CHUNK_SIZE)
    if count <= 0:
        return
    L_ptr += ptr_offset((i_b, i_c, i_h), L_strides[:3])

    # --- blocks of S.LEAF rows
    LEAVES: tl.constexpr = S.CHUNK_SIZE // S.LEAF
    o_n, o_r = tl.arange(0, LEAVES), tl.arange(0, S.LEAF)
    A = tl.where(o_r[None, :, None] == o_r[None, None, :], 1.0, 0.0) + tl.zeros((LEAVES, S.LEAF, S.LEAF), tl.float32)
    for i in tl.static_range(1, S.LEAF):
        row = tl.load(
            L_ptr + ptr_offset((o_n[:, None] * S.LEAF + i, o_n[:, None] * S.LEAF + o_r[None, :]), L_strides[3:])
        )  # [LEAVES, LEAF], zero from column i on  # fmt: skip
        known = tl.sum(row[:, :, None] * A, axis=1)
        A = tl.where(o_r[None, :, None] == i, A - known[:, None, :], A)

    # --- pairs of blocks
    for _ in tl.static_range(S.MERGES):
        A = _merge_pairs(A, L_ptr, L_strides[3:], S.PRODUCTS)

    o_i = tl.arange(0, S.CHUNK_SIZE)
    tl.store(
        A_ptr + ptr_offset((i_b, i_c, i_h, o_i[:, None], o_i[None, :]), A_strides),
        tl.reshape(A, (S.CHUNK_SIZE, S.CHUNK_SIZE)).to(A_ptr.dtype.element_ty),
    )


def solve_tril(
    L: torch.Tensor, length: int, chunks: Chunks, *, operand: torch.dtype, config: SolveTrilConfig | None = None
) -> torch.Tensor:
    """Launch the kernel.  length: T.  Shapes are in the module docstring."""
    batch, _, heads, size, _ = L.shape
    config = config or SolveTrilConfig()
    A = torch.empty(L.shape, device=L.device, dtype=operand)
    launch(
        _gdn_solve_tril_kernel,
        batch * chunks.count * heads,
        (L, chunks.spans, A),
        ((L.stride(), A.stride()), length, heads, chunks.count),
        CHUNK_SIZE=size, LEAF=LEAF, MERGES=(size // LEAF).bit_length() - 1, PRODUCTS=inverse_products(operand),
        num_warps=config.num_warps,
    )  # fmt: skip
    return A
