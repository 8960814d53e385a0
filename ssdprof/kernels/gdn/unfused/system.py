# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Stages 1 to 4 of unfused GDN, which do not depend on the state, a kernel and its launcher each.

Launchers run on the current device, and `GDNInputs` has checked the shapes.  Configurations: `../config.py`.
Oracle: the function of the same name in tests/kernels/gdn_stages.py.  Source: Yang, Kautz and Hatamizadeh 2024
(arXiv:2412.06464), section 3.3.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ssdprof.kernels.chunks import Chunks, chunk_span
from ssdprof.kernels.functions import DOT_PRECISION, LOG2_E, TL_DTYPE, decay_exp2, in_units, ptr_offset
from ssdprof.kernels.gdn.config import (
    LEAF,
    GateCumsumConfig,
    QkL2NormConfig,
    RecomputeWUConfig,
    ScaledDotKktConfig,
    SolveTrilConfig,
    intermediate,
    inverse_products,
    operand_dtype,
)
from ssdprof.kernels.launch import Described, described, launch
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.tensors import strides_of_each, strides_unit

L2NORM_EPS = tl.constexpr(1e-6)
# 2^-160 is zero in fp32.  A lower g, in particular -inf, would cost differences of later sums their precision.
FORGOTTEN = tl.constexpr(-160.0)

STAGES = {
    "_gdn_qk_l2norm_kernel": "qk_l2norm",
    "_gdn_gate_cumsum_kernel": "gate_cumsum",
    "_gdn_scaled_dot_kkt_kernel": "scaled_dot_kkt",
    "_side_by_side": "solve_tril",
    "_merge_pairs": "solve_tril",
    "_gdn_solve_tril_kernel": "solve_tril",
    "_gdn_recompute_w_u_kernel": "recompute_w_u",
}


@described
def _qk_l2norm_metadata(tensors: Any, _S: Any) -> Described:
    x, y = tensors
    return f"{tuple(x.shape)}", 3 * x.numel(), x.numel() * (x.element_size() + y.element_size())


@triton.jit(launch_metadata=_qk_l2norm_metadata)
def _gdn_qk_l2norm_kernel(tensors, strides, length, heads, rows, S: tl.constexpr):
    x_ptr, y_ptr = tensors
    (x_strides,) = strides
    o_r = tl.program_id(0).to(tl.int64) * S.BLOCK_ROWS + tl.arange(0, S.BLOCK_ROWS)
    o_k = tl.arange(0, S.BLOCK_K)
    m = (o_r < rows)[:, None] & (o_k < S.KEY_DIM)[None, :]
    i_h, i_bt = o_r % heads, o_r // heads
    index = ((i_bt // length)[:, None], (i_bt % length)[:, None], i_h[:, None], o_k[None, :])
    offset = ptr_offset(index, in_units(x_strides, S.UNIT))
    b_x = tl.load(x_ptr + offset, mask=m, other=0.0).to(tl.float32)  # [BLOCK_ROWS, BLOCK_K]
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=1) + L2NORM_EPS)[:, None]
    tl.store(y_ptr + o_r[:, None] * S.KEY_DIM + o_k[None, :], b_y.to(y_ptr.dtype.element_ty), mask=m)


def qk_l2norm(x: torch.Tensor, *, dtype: torch.dtype, config: QkL2NormConfig | None = None) -> torch.Tensor:
    """Before GDN's stages, if the call normalises q and k: divides rows of q or k by their norm.

        y[t] = x[t] / sqrt(sum_k x[t, k]^2 + 1e-6)

    In:   x (B, T, H, K)
    Out:  y (B, T, H, K), contiguous, in the operands' dtype
    Grid: (blocks of B * T * H rows).  One program owns a block of rows.
    """
    batch, length, heads, key_dim = x.shape
    config = config or QkL2NormConfig.choose(key_dim=key_dim)
    y = torch.empty(x.shape, device=x.device, dtype=dtype)
    rows = batch * length * heads
    launch(
        _gdn_qk_l2norm_kernel,
        triton.cdiv(rows, config.block_rows),
        (x, y),
        ((x.stride(),), length, heads, rows),
        KEY_DIM=key_dim, UNIT=strides_unit(x), BLOCK_ROWS=config.block_rows, BLOCK_K=triton.next_power_of_2(key_dim),
        num_warps=config.num_warps,
    )  # fmt: skip
    return y


@described
def _gate_cumsum_metadata(tensors: Any, _S: Any) -> Described:
    g = tensors[0]
    batch, length, heads = g.shape
    return f"b{batch} t{length} hv{heads}", 2 * g.numel(), g.numel() * (g.element_size() + 4)


@triton.jit(launch_metadata=_gate_cumsum_metadata)
def _gdn_gate_cumsum_kernel(tensors, strides, length, heads, nchunks, S: tl.constexpr):
    g_ptr, spans_ptr, g_cumsum_log2_ptr = tensors
    g_strides, g_cumsum_log2_strides = strides
    # --- this program's heads and chunk
    h_blocks = tl.cdiv(heads, S.BLOCK_H)
    i_bc = tl.program_id(0) // h_blocks
    i_b, i_c = i_bc // nchunks, i_bc % nchunks
    start, count = chunk_span(spans_ptr, i_c, length, S.CHUNK_SIZE)
    if count <= 0:
        return
    o_h = (tl.program_id(0) % h_blocks) * S.BLOCK_H + tl.arange(0, S.BLOCK_H)
    o_i = tl.arange(0, S.CHUNK_SIZE)
    m_h = o_h < heads

    b_g = tl.load(
        g_ptr + ptr_offset((i_b, start + o_i[None, :], o_h[:, None]), g_strides),
        mask=m_h[:, None] & (o_i < count)[None, :], other=0.0,
    ).to(tl.float32)  # [BLOCK_H, CHUNK_SIZE]  # fmt: skip
    b_g = tl.clamp(b_g * LOG2_E, FORGOTTEN, 0.0, propagate_nan=tl.PropagateNan.ALL)
    # later stages subtract these sums, and their rounding becomes a relative error of the decay: round them only once
    b_sum = tl.cumsum(b_g.to(tl.float64), axis=1).to(tl.float32)
    index = (i_b, i_c, o_h[:, None], o_i[None, :])
    tl.store(g_cumsum_log2_ptr + ptr_offset(index, g_cumsum_log2_strides), b_sum, mask=m_h[:, None])


def gate_cumsum(g: torch.Tensor, chunks: Chunks, *, config: GateCumsumConfig | None = None) -> torch.Tensor:
    """GDN stage 1 of 6: the cumulative log decay of each position in its chunk.

        g_cumsum_log2[i] = sum_{j <= i} clamp(g[j] * log2(e), FORGOTTEN, 0)

    Logarithms have base 2, because later stages take exp2 of their differences many times per element.  Positions past
    the end of the sequence count as g = 0.

    In:   g (B, T, HV)
    Out:  g_cumsum_log2 (B, NT, HV, C) fp32
    Grid: (B * NT * head-blocks).  One program owns one chunk of a block of heads.
    """
    config = config or GateCumsumConfig()
    batch, length, heads = g.shape
    g_cumsum_log2 = torch.empty(batch, chunks.count, heads, chunks.size, device=g.device, dtype=torch.float32)
    launch(
        _gdn_gate_cumsum_kernel,
        batch * chunks.count * triton.cdiv(heads, config.block_h),
        (g, chunks.spans, g_cumsum_log2),
        ((g.stride(), g_cumsum_log2.stride()), length, heads, chunks.count),
        CHUNK_SIZE=chunks.size, BLOCK_H=config.block_h,
        num_warps=config.num_warps,
    )  # fmt: skip
    return g_cumsum_log2


@described
def _scaled_dot_kkt_metadata(tensors: Any, _S: Any) -> Described:
    k, *_, L = tensors
    batch, length, heads, key_dim = k.shape
    flops = 2 * k.numel() * L.shape[-1]
    return f"b{batch} t{length} h{heads} k{key_dim}", flops, k.numel() * k.element_size() + L.numel() * 4 * 5 // 8


@triton.jit(launch_metadata=_scaled_dot_kkt_metadata)
def _gdn_scaled_dot_kkt_kernel(tensors, strides, length, heads, nchunks, S: tl.constexpr):
    k_ptr, beta_ptr, g_cumsum_log2_ptr, spans_ptr, L_ptr = tensors
    k_strides, beta_strides, g_cumsum_log2_strides, L_strides = strides
    # --- this program's chunk
    i_h, i_bc = tl.program_id(0) % heads, tl.program_id(0) // heads
    i_b, i_c = i_bc // nchunks, i_bc % nchunks
    start, count = chunk_span(spans_ptr, i_c, length, S.CHUNK_SIZE)
    if count <= 0:
        return
    o_i = tl.arange(0, S.CHUNK_SIZE)
    m_i = o_i < count

    # --- once per key head
    k_strides = in_units(k_strides, S.UNIT)
    kkt = tl.zeros((S.CHUNK_SIZE, S.CHUNK_SIZE), dtype=tl.float32)
    for first_k in range(0, S.KEY_DIM, S.BLOCK_K):
        o_k = first_k + tl.arange(0, S.BLOCK_K)
        b_k = tl.load(
            k_ptr + ptr_offset((i_b, start + o_i[:, None], i_h, o_k[None, :]), k_strides),
            mask=m_i[:, None] & (o_k < S.KEY_DIM)[None, :], other=0.0,
        ).to(S.OPERAND)  # [CHUNK_SIZE, BLOCK_K]  # fmt: skip
        kkt = tl.dot(b_k, tl.trans(b_k), kkt, input_precision=DOT_PRECISION)

    # --- for each value head
    m_below = o_i[:, None] > o_i[None, :]
    m_block = (o_i // S.LEAF)[:, None] >= (o_i // S.LEAF)[None, :]
    for value in tl.static_range(S.VALUES_PER_KEY):
        i_hv = i_h * S.VALUES_PER_KEY + value
        b_beta = tl.load(
            beta_ptr + ptr_offset((i_b, start + o_i, i_hv), beta_strides), mask=m_i, other=0.0
        ).to(tl.float32)  # fmt: skip
        b_g = tl.load(g_cumsum_log2_ptr + ptr_offset((i_b, i_c, i_hv, o_i), g_cumsum_log2_strides))
        weight = decay_exp2(b_g[:, None] - b_g[None, :]) * b_beta[:, None]
        tl.store(
            L_ptr + ptr_offset((i_b, i_c, i_hv, o_i[:, None], o_i[None, :]), L_strides),
            tl.where(m_below, kkt * weight, 0.0), mask=m_block,
        )  # fmt: skip


def scaled_dot_kkt(
    k: torch.Tensor, beta: torch.Tensor, g_cumsum_log2: torch.Tensor, chunks: Chunks, *, operand: torch.dtype,
    config: ScaledDotKktConfig | None = None,
) -> torch.Tensor:  # fmt: skip
    """GDN stage 2 of 6: the triangular system of each chunk.

        L[i, j] = beta[i] * exp(g_cumsum[i] - g_cumsum[j]) * sum_k k[i, k] * k[j, k]      for j < i, else 0

    The sum is computed once for all value heads of a key head.  Blocks of 16 x 16 above the diagonal are not written,
    and solve_tril does not read them.

    In:   k (B, T, H, K) | beta (B, T, HV) | g_cumsum_log2 (B, NT, HV, C) fp32
    Out:  L (B, NT, HV, C, C) fp32
    Grid: (B * NT * H).  One program owns one chunk of one key head, and all its value heads.
    """
    batch, length, heads, key_dim = k.shape
    value_heads = beta.shape[2]
    config = config or ScaledDotKktConfig.choose(key_dim=key_dim, operand=operand)
    L = torch.empty(
        batch, chunks.count, value_heads, chunks.size, chunks.size, device=k.device, dtype=torch.float32
    )  # fmt: skip
    launch(
        _gdn_scaled_dot_kkt_kernel,
        batch * chunks.count * heads,
        (k, beta, g_cumsum_log2, chunks.spans, L),
        ((k.stride(), beta.stride(), g_cumsum_log2.stride(), L.stride()), length, heads, chunks.count),
        CHUNK_SIZE=chunks.size, KEY_DIM=key_dim, VALUES_PER_KEY=value_heads // heads, OPERAND=TL_DTYPE[operand],
        UNIT=strides_unit(k), BLOCK_K=config.block_k, LEAF=LEAF,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return L


@described
def _solve_tril_metadata(tensors: Any, _S: Any) -> Described:
    L, _, A = tensors
    batch, nchunks, heads, size, _ = L.shape
    flops = L.numel() * size // 3
    return f"b{batch} c{nchunks} hv{heads} size{size}", flops, L.numel() * 4 * 5 // 8 + A.numel() * A.element_size()


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


@triton.jit(launch_metadata=_solve_tril_metadata)
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
    """GDN stage 3 of 6: the inverse of each chunk's triangular system.

        A = (I + L)^-1, unit lower triangular

    Blocks of 16 rows are inverted by forward substitution in fp32, all at once.  Then neighbouring blocks are merged in
    pairs until one block is left:

        [T     ]^-1   [  T^-1               ]
        [C    B]    = [-B^-1 C T^-1    B^-1 ]

    Every intermediate number is an entry of an inverse, or a product of such entries with entries of L.  None grows
    with nearly collinear keys.  A Neumann series would sum powers of L, which do grow.

    In:   L (B, NT, HV, C, C) fp32, its blocks of 16 x 16 on and below the diagonal
    Out:  A (B, NT, HV, C, C) in the operands' dtype, zeros above the diagonal
    Grid: (B * NT * HV).  One program owns one chunk of one value head.
    """
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


@described
def _recompute_w_u_metadata(tensors: Any, _S: Any) -> Described:
    A, k, v, *_, w, u = tensors
    batch, length, heads, value_dim = v.shape
    flops = 2 * A.numel() * (k.shape[3] + value_dim)
    return f"b{batch} t{length} hv{heads} k{k.shape[3]} v{value_dim}", flops, (A, k, v, w, u)


@triton.jit(launch_metadata=_recompute_w_u_metadata)
def _gdn_recompute_w_u_kernel(tensors, strides, length, heads, nchunks, values_per_key, S: tl.constexpr):
    A_ptr, k_ptr, v_ptr, beta_ptr, g_cumsum_log2_ptr, spans_ptr, w_ptr, u_ptr = tensors
    A_strides, k_strides, v_strides, beta_strides, g_cumsum_log2_strides, w_strides, u_strides = strides
    k_strides, v_strides = in_units(k_strides, S.UNIT), in_units(v_strides, S.UNIT)
    w_strides = in_units(w_strides, S.UNIT)

    # --- this program's chunk; value heads of one key head are in neighbouring programs, because they share k
    i_h, i_bc = tl.program_id(0) % heads, tl.program_id(0) // heads
    i_b, i_c = i_bc // nchunks, i_bc % nchunks
    start, count = chunk_span(spans_ptr, i_c, length, S.CHUNK_SIZE)
    if count <= 0:
        return
    o_i = tl.arange(0, S.CHUNK_SIZE)
    m_i = o_i < count
    b_A = tl.load(A_ptr + ptr_offset((i_b, i_c, i_h, o_i[:, None], o_i[None, :]), A_strides)).to(S.INTERMEDIATE)
    b_beta = tl.load(beta_ptr + ptr_offset((i_b, start + o_i, i_h), beta_strides), mask=m_i, other=0.0)
    b_beta = b_beta.to(tl.float32)
    b_g = tl.load(g_cumsum_log2_ptr + ptr_offset((i_b, i_c, i_h, o_i), g_cumsum_log2_strides))

    # --- u
    b_A_u = (b_A * b_beta.to(S.INTERMEDIATE)[None, :]).to(S.OPERAND)
    for first_v in range(0, S.VALUE_DIM, S.BLOCK_V):
        o_v = first_v + tl.arange(0, S.BLOCK_V)
        m_v = o_v < S.VALUE_DIM
        b_v = tl.load(
            v_ptr + ptr_offset((i_b, start + o_i[:, None], i_h, o_v[None, :]), v_strides),
            mask=m_i[:, None] & m_v[None, :], other=0.0,
        ).to(S.OPERAND)  # [CHUNK_SIZE, BLOCK_V]  # fmt: skip
        b_u = tl.dot(b_A_u, b_v, input_precision=DOT_PRECISION)
        tl.store(
            u_ptr + ptr_offset((i_b, i_c, i_h, o_v[:, None], o_i[None, :]), u_strides),
            tl.trans(b_u).to(S.OPERAND), mask=m_v[:, None],
        )  # fmt: skip

    # --- w
    b_A_w = (b_A * (decay_exp2(b_g) * b_beta).to(S.INTERMEDIATE)[None, :]).to(S.OPERAND)
    for first_k in range(0, S.KEY_DIM, S.BLOCK_K):
        o_k = first_k + tl.arange(0, S.BLOCK_K)
        m_k = o_k < S.KEY_DIM
        b_k = tl.load(
            k_ptr + ptr_offset((i_b, start + o_i[:, None], i_h // values_per_key, o_k[None, :]), k_strides),
            mask=m_i[:, None] & m_k[None, :], other=0.0,
        ).to(S.OPERAND)  # [CHUNK_SIZE, BLOCK_K]  # fmt: skip
        b_w = tl.dot(b_A_w, b_k, input_precision=DOT_PRECISION)
        tl.store(
            w_ptr + ptr_offset((i_b, i_c, i_h, o_i[:, None], o_k[None, :]), w_strides),
            b_w.to(S.OPERAND), mask=m_k[None, :],
        )  # fmt: skip


def recompute_w_u(
    A: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, g_cumsum_log2: torch.Tensor, chunks: Chunks,
    *, precision: Precision, config: RecomputeWUConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """GDN stage 4 of 6: keys and values of each chunk after the inverse, which do not depend on the state.

        u[v, i] = sum_j A[i, j] * beta[j] * v[j, v]
        w[i, k] = sum_j A[i, j] * beta[j] * exp(g_cumsum[j]) * k[j, k]

    The factors of j are multiplied into A, so that the matrix products use k and v unchanged.

    In:   A (B, NT, HV, C, C) operands' dtype | k (B, T, H, K) | v (B, T, HV, V) | beta (B, T, HV)
          g_cumsum_log2 (B, NT, HV, C) fp32
    Out:  w (B, NT, HV, C, K) | u (B, NT, HV, V, C), both in the operands' dtype; rows past the sequence's end are zero
    Grid: (B * NT * HV).  One program owns one chunk of one value head.
    """
    batch, length, heads, value_dim = v.shape
    key_dim, operand = k.shape[3], operand_dtype(v.dtype, precision)
    config = config or RecomputeWUConfig.choose(key_dim=key_dim, value_dim=value_dim, operand=operand)
    place = (batch, chunks.count, heads)
    w = torch.empty(*place, chunks.size, key_dim, device=v.device, dtype=operand)
    u = torch.empty(*place, value_dim, chunks.size, device=v.device, dtype=operand)
    launch(
        _gdn_recompute_w_u_kernel,
        batch * chunks.count * heads,
        (A, k, v, beta, g_cumsum_log2, chunks.spans, w, u),
        (
            strides_of_each(A, k, v, beta, g_cumsum_log2, w, u),
            length, heads, chunks.count, heads // k.shape[2],
        ),
        CHUNK_SIZE=chunks.size, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        OPERAND=TL_DTYPE[operand], INTERMEDIATE=intermediate(v.dtype, precision),
        UNIT=strides_unit(k, v, w), BLOCK_K=config.block_k, BLOCK_V=config.block_v,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return w, u
