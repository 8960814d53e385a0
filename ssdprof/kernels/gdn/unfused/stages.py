"""The normalisation of q and k and the six stages of unfused GDN, with a kernel and its launcher
for each.

Launchers launch on the current device.  q and k of the stages' inputs are normalised already if the
call asks for it.  Block sizes and warps: `../config.py`.

In kernels, the prefix of a name says what it is: i_ an index, o_ a vector of indices, m_ a mask, p_
pointers, b_ numbers in registers.  `operands' dtype` is that of `config.operand_dtype`.  A pack has
room for more chunks than it may need (`chunks.py`): stages write nothing for those that are left
over.

Oracle: `../reference.py`.  Source: Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464), section
3.3; docs/gdn-mathematics.md, section 3.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ssdprof.kernels.chunks import Chunks, chunk_span, own_chunk
from ssdprof.kernels.functions import (
    DOT_PRECISION,
    LOG2_E,
    TL_DTYPE,
    decay_exp2,
    in_units,
    load_at,
    ptr_offset,
    store_at,
)
from ssdprof.kernels.gdn import config
from ssdprof.kernels.gdn.config import LEAF, intermediate, inverse_products, operand_dtype
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.launch import launch
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.tensors import strides_of_each, strides_unit

# Least g of a position in log2 units; a lower g, in particular -inf, is raised to it, because it
# would cost differences of later sums their precision.  2^-160 is zero in fp32.
FORGOTTEN = tl.constexpr(-160.0)
L2NORM_EPS = tl.constexpr(1e-6)  # added to the sum of squares

# stages of functions: `stalls/attribute.py`
STAGES = {
    "_gdn_qk_l2norm_kernel": "qk_l2norm",
    "_side_by_side": "solve_tril",
    "_merge_pairs": "solve_tril",
    "_gdn_gate_cumsum_kernel": "gate_cumsum",
    "_gdn_scaled_dot_kkt_kernel": "scaled_dot_kkt",
    "_gdn_solve_tril_kernel": "solve_tril",
    "_gdn_recompute_w_u_kernel": "recompute_w_u",
    "_gdn_chunk_state_kernel": "chunk_state",
    "_gdn_chunk_output_kernel": "chunk_output",
}


@triton.jit
def _gdn_qk_l2norm_kernel(tensors, strides, length, heads, rows, S: tl.constexpr):
    """One block of rows of `qk_l2norm`; a row is a vector of K numbers."""
    x_ptr, y_ptr = tensors
    (x_strides,) = strides
    o_r = tl.program_id(0).to(tl.int64) * S.BLOCK_ROWS + tl.arange(0, S.BLOCK_ROWS)
    o_k = tl.arange(0, S.BLOCK_K)
    m = (o_r < rows)[:, None] & (o_k < S.KEY_DIM)[None, :]
    # the row's batch, position and head
    o_h, o_bt = o_r % heads, o_r // heads
    index = ((o_bt // length)[:, None], (o_bt % length)[:, None], o_h[:, None], o_k[None, :])
    offset = ptr_offset(index, in_units(x_strides, S.UNIT))
    b_x = tl.load(x_ptr + offset, mask=m, other=0.0).to(tl.float32)  # [BLOCK_ROWS, BLOCK_K]
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=1) + L2NORM_EPS)[:, None]
    p_y = y_ptr + o_r[:, None] * S.KEY_DIM + o_k[None, :]
    tl.store(p_y, b_y.to(y_ptr.dtype.element_ty), mask=m)


def qk_l2norm(x: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Normalises q or k, before the stages: y[k] = x[k] / sqrt(sum_j x[j]^2 + 1e-6) for each
    position and head.

    In:   x (B, T, H, K)
    Out:  y (B, T, H, K), contiguous, in `dtype`
    Grid: (blocks of B * T * H rows)
    """
    batch, length, heads, key_dim = x.shape
    options = config.qk_l2norm_options(key_dim)
    y = torch.empty(x.shape, device=x.device, dtype=dtype)
    rows = batch * length * heads
    launch(
        _gdn_qk_l2norm_kernel,
        triton.cdiv(rows, options["BLOCK_ROWS"]),
        (x, y),
        ((x.stride(),), length, heads, rows),
        KEY_DIM=key_dim,
        UNIT=strides_unit(x),
        BLOCK_K=triton.next_power_of_2(key_dim),
        **options,
    )
    return y


# --- tiles of a chunk
#
# tokens: (row of the batch, first position, head), where the chunk begins in a tensor (B, T, heads,
# columns).
# chunk: (row of the batch, chunk, head), the index of the chunk in a tensor (B, NT, HV, rows,
# columns) that a stage writes.


@triton.jit
def token_tile(ptr, strides, tokens, o_i, columns):
    """Pointers (position, column) of a chunk in q, k, v or out.

    o_i: positions, from that of `tokens` on.
    """
    return ptr + ptr_offset(
        (tokens[0], tokens[1] + o_i[:, None], tokens[2], columns[None, :]), strides
    )


@triton.jit
def load_tokens(ptr, strides, tokens, o_i, columns, mask, DTYPE: tl.constexpr):
    """A tile (position, column) of a chunk in q, k or v, in DTYPE."""
    return tl.load(token_tile(ptr, strides, tokens, o_i, columns), mask=mask, other=0.0).to(DTYPE)


@triton.jit
def load_beta(ptr, strides, tokens, o_i, m_i):
    """The beta of each position of a chunk, in fp32; 0 past the sequence's end."""
    offset = ptr_offset((tokens[0], tokens[1] + o_i, tokens[2]), strides)
    return tl.load(ptr + offset, mask=m_i, other=0.0).to(tl.float32)


@triton.jit
def chunk_tile(ptr, strides, chunk, rows, columns):
    """Pointers (row, column) of a chunk in a tensor that a stage writes."""
    return ptr + ptr_offset(chunk + (rows[:, None], columns[None, :]), strides)


@triton.jit
def _gdn_gate_cumsum_kernel(tensors, strides, length, heads, nchunks, S: tl.constexpr):
    """One chunk of a block of heads of `gate_cumsum`."""
    g_ptr, spans_ptr, g_cumsum_log2_ptr = tensors
    g_strides, g_cumsum_log2_strides = strides
    # --- the program's heads and chunk
    h_blocks = tl.cdiv(heads, S.BLOCK_H)
    i_bc = tl.program_id(0) // h_blocks
    i_b, i_c = i_bc // nchunks, i_bc % nchunks
    start, count = chunk_span(spans_ptr, i_c, length, S.CHUNK_SIZE)
    if count <= 0:
        return
    o_h = (tl.program_id(0) % h_blocks) * S.BLOCK_H + tl.arange(0, S.BLOCK_H)
    o_i = tl.arange(0, S.CHUNK_SIZE)
    m_h = o_h < heads

    # --- g in log2 units, [BLOCK_H, CHUNK_SIZE], and its cumulative sums
    m = m_h[:, None] & (o_i < count)[None, :]
    index = (i_b, start + o_i[None, :], o_h[:, None])
    b_g = load_at(g_ptr, g_strides, index, m).to(tl.float32)
    b_g = tl.clamp(b_g * LOG2_E, FORGOTTEN, 0.0, propagate_nan=tl.PropagateNan.ALL)
    # later stages subtract these sums, and their rounding becomes a relative error of the decay:
    # round them only once
    b_g_cumsum_log2 = tl.cumsum(b_g.to(tl.float64), axis=1).to(tl.float32)
    index = (i_b, i_c, o_h[:, None], o_i[None, :])
    store_at(g_cumsum_log2_ptr, g_cumsum_log2_strides, index, b_g_cumsum_log2, m_h[:, None])


def gate_cumsum(inputs: GDNInputs, chunks: Chunks) -> torch.Tensor:
    """Stage 1: the cumulative log decay, g_cumsum_log2[i] = sum_{j <= i} clamp(g[j] * log2(e),
    FORGOTTEN, 0).

    The logs are binary, because later stages take exp2 of differences many times per element.
    Positions past the sequence's end count as g = 0.

    In:   g (B, T, HV)
    Out:  g_cumsum_log2 (B, NT, HV, C) fp32
    Grid: (B * NT * blocks of heads)
    """
    heads = inputs.g.shape[2]
    g_cumsum_log2 = chunks.empty(heads, chunks.size)
    chunks.launch(
        _gdn_gate_cumsum_kernel,
        triton.cdiv(heads, config.GATE_CUMSUM["BLOCK_H"]),
        heads,
        (inputs.g,),
        (g_cumsum_log2,),
        **config.GATE_CUMSUM,
    )
    return g_cumsum_log2


@triton.jit
def _gdn_scaled_dot_kkt_kernel(tensors, strides, length, heads, nchunks, S: tl.constexpr):
    """One chunk of one key head of `scaled_dot_kkt`, for all its value heads."""
    k_ptr, beta_ptr, g_cumsum_log2_ptr, spans_ptr, L_ptr = tensors
    k_strides, beta_strides, g_cumsum_log2_strides, L_strides = strides
    i_h, i_b, i_c, start, count = own_chunk(
        tl.program_id(0), spans_ptr, length, heads, nchunks, S.CHUNK_SIZE
    )
    if count <= 0:
        return
    o_i = tl.arange(0, S.CHUNK_SIZE)
    m_i = o_i < count

    # --- K K^T, once per key head
    k_strides = in_units(k_strides, S.UNIT)
    b_kkt = tl.zeros((S.CHUNK_SIZE, S.CHUNK_SIZE), dtype=tl.float32)
    for first_k in range(0, S.KEY_DIM, S.BLOCK_K):
        o_k = first_k + tl.arange(0, S.BLOCK_K)
        mask = m_i[:, None] & (o_k < S.KEY_DIM)[None, :]
        b_k = load_tokens(k_ptr, k_strides, (i_b, start, i_h), o_i, o_k, mask, S.OPERAND)
        b_kkt = tl.dot(b_k, tl.trans(b_k), b_kkt, input_precision=DOT_PRECISION)

    # --- L of each value head, without the blocks above the diagonal
    m_lower = o_i[:, None] > o_i[None, :]
    m_block = (o_i // S.LEAF)[:, None] >= (o_i // S.LEAF)[None, :]
    for i_value in tl.static_range(S.VALUES_PER_KEY):
        i_hv = i_h * S.VALUES_PER_KEY + i_value
        b_beta = load_beta(beta_ptr, beta_strides, (i_b, start, i_hv), o_i, m_i)
        b_g_cumsum_log2 = load_at(g_cumsum_log2_ptr, g_cumsum_log2_strides, (i_b, i_c, i_hv, o_i))
        b_weight = decay_exp2(b_g_cumsum_log2[:, None] - b_g_cumsum_log2[None, :]) * b_beta[:, None]
        p_L = chunk_tile(L_ptr, L_strides, (i_b, i_c, i_hv), o_i, o_i)
        tl.store(p_L, tl.where(m_lower, b_kkt * b_weight, 0.0), mask=m_block)


def scaled_dot_kkt(
    inputs: GDNInputs, g_cumsum_log2: torch.Tensor, chunks: Chunks, precision: Precision
) -> torch.Tensor:
    """Stage 2: the triangular system of each chunk.

        L[i, j] = beta[i] * exp2(g_cumsum_log2[i] - g_cumsum_log2[j]) * sum_k k[i, k] * k[j, k]
        for j < i, else 0

    Blocks of 16 x 16 above the diagonal are not written, and solve_tril does not read them.

    In:   k (B, T, H, K) | beta (B, T, HV) | g_cumsum_log2 (B, NT, HV, C) fp32
    Out:  L (B, NT, HV, C, C) fp32
    Grid: (B * NT * H), with all value heads of a key head
    """
    heads, key_dim = inputs.k.shape[2:]
    operand = operand_dtype(inputs.v.dtype, precision)
    L = chunks.empty(inputs.v.shape[2], chunks.size, chunks.size)
    chunks.launch(
        _gdn_scaled_dot_kkt_kernel,
        heads,
        heads,
        (inputs.k, inputs.beta, g_cumsum_log2),
        (L,),
        KEY_DIM=key_dim,
        VALUES_PER_KEY=inputs.values_per_key,
        OPERAND=TL_DTYPE[operand],
        UNIT=strides_unit(inputs.k),
        LEAF=LEAF,
        **config.unfused_options(inputs, precision)["scaled_dot_kkt"],
    )
    return L


@triton.jit
def _side_by_side(left, right):
    """Join two (n, r, c) tensors to one (n, r, 2 * c)."""
    n: tl.constexpr = left.shape[0]
    r: tl.constexpr = left.shape[1]
    c: tl.constexpr = left.shape[2]
    return tl.reshape(tl.permute(tl.join(left, right), (0, 1, 3, 2)), (n, r, 2 * c))


@triton.jit
def _merge_pairs(A, L_ptr, L_strides, PRODUCTS: tl.constexpr):
    """Merge inverses of diagonal blocks, (2 * n, s, s), to those of blocks twice as large, (n, 2 *
    s, 2 * s), by equation (13).

    L_ptr, L_strides: the chunk's L, and its strides between rows and columns
    PRODUCTS: input precision of the products
    """
    PAIRS: tl.constexpr = A.shape[0] // 2
    HALF: tl.constexpr = A.shape[1]
    # B_1 and B_2, the inverses of the first and the second block of each pair
    top, bottom = tl.split(tl.permute(tl.reshape(A, (PAIRS, 2, HALF, HALF)), (0, 2, 3, 1)))
    # L_21, the block of L below the first one, and the corner -B_2 L_21 B_1
    first, o_h = tl.arange(0, PAIRS)[:, None, None] * (2 * HALF), tl.arange(0, HALF)
    below = ptr_offset((first + HALF + o_h[None, :, None], first + o_h[None, None, :]), L_strides)
    corner = tl.dot(tl.load(L_ptr + below), top, input_precision=PRODUCTS)
    corner = -tl.dot(bottom, corner, input_precision=PRODUCTS)
    upper, lower = _side_by_side(top, tl.zeros_like(top)), _side_by_side(corner, bottom)
    # (pair, row, column, upper or lower) -> (pair, row of both, column)
    return tl.reshape(tl.permute(tl.join(upper, lower), (0, 3, 1, 2)), (PAIRS, 2 * HALF, 2 * HALF))


@triton.jit
def _gdn_solve_tril_kernel(tensors, strides, length, heads, nchunks, S: tl.constexpr):
    """One chunk of one head of `solve_tril`: the diagonal blocks of 16 rows by substitution, then
    pairs of blocks merged until one is left.
    """
    L_ptr, spans_ptr, A_ptr = tensors
    L_strides, A_strides = strides
    i_h, i_b, i_c, _, count = own_chunk(
        tl.program_id(0), spans_ptr, length, heads, nchunks, S.CHUNK_SIZE
    )
    if count <= 0:
        return
    L_ptr += ptr_offset((i_b, i_c, i_h), L_strides[:3])

    # --- the inverses of all diagonal blocks of LEAF rows, [LEAVES, LEAF, LEAF], row by row (12):
    # row i is e_i minus the product of row i of L with the rows of the inverse above it
    LEAVES: tl.constexpr = S.CHUNK_SIZE // S.LEAF
    o_n, o_r = tl.arange(0, LEAVES), tl.arange(0, S.LEAF)
    b_identity = tl.where(o_r[None, :, None] == o_r[None, None, :], 1.0, 0.0)
    b_A = b_identity + tl.zeros((LEAVES, S.LEAF, S.LEAF), tl.float32)
    first = o_n[:, None] * S.LEAF  # first row of each block
    for i in tl.static_range(1, S.LEAF):
        # row i of L in each block, [LEAVES, LEAF], zero from column i on
        b_row = tl.load(L_ptr + ptr_offset((first + i, first + o_r[None, :]), L_strides[3:]))
        b_known = tl.sum(b_row[:, :, None] * b_A, axis=1)
        b_A = tl.where(o_r[None, :, None] == i, b_A - b_known[:, None, :], b_A)

    # --- merges, until one block is left: [1, CHUNK_SIZE, CHUNK_SIZE]
    for _ in tl.static_range(S.MERGES):
        b_A = _merge_pairs(b_A, L_ptr, L_strides[3:], S.PRODUCTS)

    o_i = tl.arange(0, S.CHUNK_SIZE)
    tl.store(
        chunk_tile(A_ptr, A_strides, (i_b, i_c, i_h), o_i, o_i),
        tl.reshape(b_A, (S.CHUNK_SIZE, S.CHUNK_SIZE)).to(A_ptr.dtype.element_ty),
    )


def solve_tril(
    inputs: GDNInputs, L: torch.Tensor, chunks: Chunks, precision: Precision
) -> torch.Tensor:
    """Stage 3: the inverse of each chunk's triangular system, A = (I + L)^-1.

    Blocks of 16 rows are inverted by forward substitution in fp32, all at once.  Then neighbouring
    blocks are merged until one is left (13).  No intermediate number grows with nearly collinear
    keys.  A Neumann series would sum powers of L, which do grow.

    In:   L (B, NT, HV, C, C) fp32, its blocks of 16 x 16 on and below the diagonal
    Out:  A (B, NT, HV, C, C) in the operands' dtype, zeros above the diagonal
    Grid: (B * NT * HV)
    """
    heads = inputs.v.shape[2]
    operand = operand_dtype(inputs.v.dtype, precision)
    A = torch.empty(L.shape, device=L.device, dtype=operand)
    chunks.launch(
        _gdn_solve_tril_kernel,
        heads,
        heads,
        (L,),
        (A,),
        LEAF=LEAF,
        MERGES=(chunks.size // LEAF).bit_length() - 1,
        PRODUCTS=inverse_products(operand),
        **config.SOLVE_TRIL,
    )
    return A


@triton.jit
def _gdn_recompute_w_u_kernel(
    tensors, strides, length, heads, nchunks, values_per_key, S: tl.constexpr
):
    """One chunk of one head of `recompute_w_u`."""
    A_ptr, k_ptr, v_ptr, beta_ptr, g_cumsum_log2_ptr, spans_ptr, w_ptr, u_ptr = tensors
    A_strides, k_strides, v_strides, beta_strides, g_cumsum_log2_strides, w_strides, u_strides = (
        strides
    )
    k_strides, v_strides = in_units(k_strides, S.UNIT), in_units(v_strides, S.UNIT)
    w_strides = in_units(w_strides, S.UNIT)

    # value heads of one key head are in neighbouring programs, because they share k
    i_h, i_b, i_c, start, count = own_chunk(
        tl.program_id(0), spans_ptr, length, heads, nchunks, S.CHUNK_SIZE
    )
    if count <= 0:
        return
    chunk, tokens = (i_b, i_c, i_h), (i_b, start, i_h)
    o_i = tl.arange(0, S.CHUNK_SIZE)
    m_i = o_i < count
    b_A = tl.load(chunk_tile(A_ptr, A_strides, chunk, o_i, o_i)).to(S.INTERMEDIATE)
    b_beta = load_beta(beta_ptr, beta_strides, tokens, o_i, m_i)
    # not with `load_at`, for which ptxas generates other instructions here
    b_g_cumsum_log2 = tl.load(
        g_cumsum_log2_ptr + ptr_offset((i_b, i_c, i_h, o_i), g_cumsum_log2_strides)
    )

    # --- u = A diag(beta) V, transposed
    b_A_u = (b_A * b_beta.to(S.INTERMEDIATE)[None, :]).to(S.OPERAND)
    for first_v in range(0, S.VALUE_DIM, S.BLOCK_V):
        o_v = first_v + tl.arange(0, S.BLOCK_V)
        m_v = o_v < S.VALUE_DIM
        mask = m_i[:, None] & m_v[None, :]
        b_v = load_tokens(v_ptr, v_strides, tokens, o_i, o_v, mask, S.OPERAND)
        b_u = tl.dot(b_A_u, b_v, input_precision=DOT_PRECISION)
        p_u = chunk_tile(u_ptr, u_strides, chunk, o_v, o_i)
        tl.store(p_u, tl.trans(b_u).to(S.OPERAND), mask=m_v[:, None])

    # --- w = A diag(beta d) K
    b_A_w = (b_A * (decay_exp2(b_g_cumsum_log2) * b_beta).to(S.INTERMEDIATE)[None, :]).to(S.OPERAND)
    for first_k in range(0, S.KEY_DIM, S.BLOCK_K):
        o_k = first_k + tl.arange(0, S.BLOCK_K)
        m_k = o_k < S.KEY_DIM
        mask, key_tokens = m_i[:, None] & m_k[None, :], (i_b, start, i_h // values_per_key)
        b_k = load_tokens(k_ptr, k_strides, key_tokens, o_i, o_k, mask, S.OPERAND)
        b_w = tl.dot(b_A_w, b_k, input_precision=DOT_PRECISION)
        p_w = chunk_tile(w_ptr, w_strides, chunk, o_i, o_k)
        tl.store(p_w, b_w.to(S.OPERAND), mask=m_k[None, :])


def recompute_w_u(
    inputs: GDNInputs,
    A: torch.Tensor,
    g_cumsum_log2: torch.Tensor,
    chunks: Chunks,
    precision: Precision,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stage 4: keys and values of each chunk after the inverse, which do not depend on the state.

        u[v, i] = sum_j A[i, j] * beta[j] * v[j, v]
        w[i, k] = sum_j A[i, j] * beta[j] * exp2(g_cumsum_log2[j]) * k[j, k]

    In:   A (B, NT, HV, C, C) operands' dtype | k (B, T, H, K) | v (B, T, HV, V) | beta (B, T, HV)
          g_cumsum_log2 (B, NT, HV, C) fp32
    Out:  w (B, NT, HV, C, K) | u (B, NT, HV, V, C), both in the operands' dtype; positions past the
          sequence's end are zero
    Grid: (B * NT * HV)
    """
    w, u = keys_and_values(
        _gdn_recompute_w_u_kernel,
        inputs,
        A,
        g_cumsum_log2,
        chunks,
        precision,
        config.unfused_options(inputs, precision)["recompute_w_u"],
        INTERMEDIATE=intermediate(inputs.v.dtype, precision),
    )
    return w, u


def keys_and_values(
    kernel: Any,
    inputs: GDNInputs,
    A: torch.Tensor,
    decays: torch.Tensor,
    chunks: Chunks,
    precision: Precision,
    options: dict[str, int],
    *,
    key_tensors: int = 1,
    **constants: object,
) -> tuple[torch.Tensor, ...]:
    """Launch stage 4 of GDN or of Kimi Delta Attention.  Returns w, u, and further tensors of w's
    shape that the kernel writes.

    decays: the cumulative log2 decays, of heads or of channels
    options, constants: launch options and compile-time arguments of the kernel
    key_tensors: the number of tensors of w's shape, w among them
    """
    k = inputs.k
    v = inputs.v
    heads, value_dim = inputs.v.shape[2:]
    key_dim = inputs.k.shape[3]
    operand = operand_dtype(v.dtype, precision)
    w, *others = (
        chunks.empty(heads, chunks.size, key_dim, dtype=operand) for _ in range(key_tensors)
    )
    u = chunks.empty(heads, value_dim, chunks.size, dtype=operand)
    chunks.launch(
        kernel,
        heads,
        heads,
        (A, k, v, inputs.beta, decays),
        (w, u, *others),
        inputs.values_per_key,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        OPERAND=TL_DTYPE[operand],
        UNIT=strides_unit(k, v, w),
        **constants,
        **options,
    )
    return w, u, *others


@triton.jit
def _load(pointers, mask, WHOLE: tl.constexpr):
    """Load, with zeros where the mask is false.  WHOLE: it is true everywhere, and no mask is
    needed.
    """
    if WHOLE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _store(pointers, values, mask, WHOLE: tl.constexpr):
    """Store where the mask is true.  WHOLE: it is true everywhere, and no mask is needed."""
    if WHOLE:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=mask)


@triton.jit
def _chunks_of_sequence(i_s, spans_ptr, bounds_ptr, length, nchunks):
    """(row of the batch, first chunk, chunk after the last one, first position, position after the
    last one) of sequence i_s.  The positions are 0 for an empty packed sequence.
    """
    if bounds_ptr is None:
        return i_s, 0, nchunks, tl.zeros((), tl.int64), tl.cast(length, tl.int64)
    else:
        first = tl.load(bounds_ptr + i_s).to(tl.int32)
        stop = tl.load(bounds_ptr + i_s + 1).to(tl.int32)
        begin = tl.load(spans_ptr + 2 * first, mask=first < stop, other=0)
        end = tl.load(spans_ptr + 2 * stop - 1, mask=first < stop, other=0)
        return 0, first, stop, begin, end


@triton.jit
def _gdn_chunk_state_kernel(
    tensors, strides, length, heads, nchunks, values_per_key, S: tl.constexpr
):
    """One block of V of one head of `chunk_state`, chunk after chunk, with the transposed state
    [BLOCK_V, BLOCK_K] in registers.

    PER_CHANNEL: g_cumsum_log2 and k are (B, NT, HV, C, K), and k is decayed to the chunk's end
    """
    (
        k_ptr, w_ptr, u_ptr, g_cumsum_log2_ptr, initial_state_ptr, spans_ptr, bounds_ptr,
        prev_states_ptr, v_new_ptr, final_states_ptr,
    ) = tensors  # fmt: skip
    (
        k_strides, w_strides, u_strides, g_cumsum_log2_strides, initial_state_strides,
        prev_states_strides, v_new_strides, final_states_strides,
    ) = strides  # fmt: skip
    # --- the program's sequence, head and rows of the state
    V_BLOCKS: tl.constexpr = (S.VALUE_DIM + S.BLOCK_V - 1) // S.BLOCK_V
    ALL_K: tl.constexpr = S.KEY_DIM == S.BLOCK_K
    ALL_V: tl.constexpr = S.VALUE_DIM % S.BLOCK_V == 0
    i_sh = tl.program_id(0) // V_BLOCKS
    i_s, i_h = i_sh // heads, i_sh % heads
    o_v = (tl.program_id(0) % V_BLOCKS) * S.BLOCK_V + tl.arange(0, S.BLOCK_V)
    o_k, o_i = tl.arange(0, S.BLOCK_K), tl.arange(0, S.CHUNK_SIZE)
    m_v, m_k = o_v < S.VALUE_DIM, o_k < S.KEY_DIM
    m_vk = m_v[:, None] & m_k[None, :]
    i_b, first, stop, begin, end = _chunks_of_sequence(i_s, spans_ptr, bounds_ptr, length, nchunks)

    # --- addresses in the first chunk; those of a later chunk are its number times a stride further
    k_strides, w_strides = in_units(k_strides, S.UNIT), in_units(w_strides, S.UNIT)
    prev_states_strides = in_units(prev_states_strides, S.UNIT)
    chunk = (i_b, first, i_h)
    p_w = chunk_tile(w_ptr, w_strides, chunk, o_i, o_k)
    p_u = chunk_tile(u_ptr, u_strides, chunk, o_v, o_i)
    if S.PER_CHANNEL:
        p_k = chunk_tile(k_ptr, k_strides, chunk, o_i, o_k)
    else:
        p_k = token_tile(k_ptr, k_strides, (i_b, begin, i_h // values_per_key), o_i, o_k)
    p_g = g_cumsum_log2_ptr + ptr_offset(chunk, g_cumsum_log2_strides[:3])
    p_prev = chunk_tile(prev_states_ptr, prev_states_strides, chunk, o_v, o_k)
    p_v_new = chunk_tile(v_new_ptr, v_new_strides, chunk, o_v, o_i)

    # --- the state that enters the first chunk
    b_state = tl.zeros((S.BLOCK_V, S.BLOCK_K), dtype=tl.float32)
    if initial_state_ptr is not None:
        initial_offset = ptr_offset((i_s, i_h, o_k[None, :], o_v[:, None]), initial_state_strides)
        b_state += tl.load(initial_state_ptr + initial_offset, mask=m_vk, other=0.0).to(tl.float32)

    # --- loop over chunks: store the state that enters the chunk, and load the chunk's factors
    for index in range(stop - first):
        i_chunk = tl.cast(index, tl.int64)  # number of the chunk in the sequence
        b_state_operand = b_state.to(S.OPERAND)
        _store(p_prev + i_chunk * prev_states_strides[1], b_state_operand, m_vk, ALL_K and ALL_V)
        b_w = _load(p_w + i_chunk * w_strides[1], m_k[None, :], ALL_K)  # [CHUNK_SIZE, BLOCK_K]
        b_u = _load(p_u + i_chunk * u_strides[1], m_v[:, None], ALL_V)  # [BLOCK_V, CHUNK_SIZE]
        if S.PER_CHANNEL:
            b_k = _load(p_k + i_chunk * k_strides[1], m_k[None, :], ALL_K)  # [CHUNK_SIZE, BLOCK_K]
            p_end = p_g + ptr_offset((S.CHUNK_SIZE - 1, o_k), g_cumsum_log2_strides[3:])
            p_end += i_chunk * g_cumsum_log2_strides[1]
            b_g_end = _load(p_end, m_k, ALL_K)[None, :]
        else:
            m_i = o_i < end - begin - i_chunk * S.CHUNK_SIZE
            p_k_chunk = p_k + i_chunk * S.CHUNK_SIZE * k_strides[1]
            b_k = _load(p_k_chunk, m_i[:, None] & m_k[None, :], False).to(S.OPERAND)
            p_g_chunk = p_g + i_chunk * g_cumsum_log2_strides[1]
            b_g_cumsum_log2 = tl.load(p_g_chunk + o_i)
            b_g_end = tl.load(p_g_chunk + (S.CHUNK_SIZE - 1))

        # (15): the corrected values, [BLOCK_V, CHUNK_SIZE], and (16): the state after the chunk
        b_v_new = b_u.to(tl.float32)
        b_v_new -= tl.dot(b_state_operand, tl.trans(b_w), input_precision=DOT_PRECISION)
        _store(p_v_new + i_chunk * v_new_strides[1], b_v_new.to(S.OPERAND), m_v[:, None], ALL_V)
        if S.PER_CHANNEL:
            b_decayed = b_v_new.to(S.OPERAND)
        else:
            b_to_end = decay_exp2(b_g_end - b_g_cumsum_log2).to(S.INTERMEDIATE)
            b_decayed = (b_v_new.to(S.INTERMEDIATE) * b_to_end[None, :]).to(S.OPERAND)
        b_state = tl.dot(
            b_decayed, b_k, b_state * decay_exp2(b_g_end), input_precision=DOT_PRECISION
        )
        b_state = b_state.to(S.STATE).to(tl.float32)
    final_offset = ptr_offset((i_s, i_h, o_k[None, :], o_v[:, None]), final_states_strides)
    tl.store(final_states_ptr + final_offset, b_state, mask=m_vk)


def chunk_state(
    inputs: GDNInputs,
    k: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    g_cumsum_log2: torch.Tensor,
    chunks: Chunks,
    precision: Precision,
    options: dict[str, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stage 5: the state that enters each chunk, the values that the chunk writes, and the final
    state.

        v_new[v, i]  = u[v, i] - sum_k S[v, k] * w[i, k]
        S'[v, k]     = exp2(g_end) * S[v, k]
                     + sum_i exp2(g_end - g_cumsum_log2[i]) * v_new[v, i] * k[i, k]

    S, the transposed state that enters the chunk, is rounded to the operands' dtype for v_new, and
    S', the one that leaves it, to `state_dtype`.  g_end = g_cumsum_log2[C - 1].  The other stages
    process all chunks at once.  With a decay for each channel, g_cumsum_log2 and k are (B, NT, HV,
    C, K), and k is decayed to the chunk's end already.  options: BLOCK_V and launch options

    In:   k (B, T, H, K) | w (B, NT, HV, C, K) | u (B, NT, HV, V, C)
          g_cumsum_log2 (B, NT, HV, C) fp32 | initial_state (sequences, HV, K, V) or None
    Out:  prev_states (B, NT, HV, V, K) | v_new (B, NT, HV, V, C), both in the operands' dtype
          final_states (sequences, HV, K, V) fp32
    Grid: (sequences * HV * blocks of V)
    """
    dtype = inputs.v.dtype
    heads, value_dim = inputs.v.shape[2:]
    key_dim = inputs.k.shape[3]
    operand = operand_dtype(dtype, precision)
    prev_states = chunks.empty(heads, value_dim, key_dim, dtype=operand)
    v_new = torch.empty_like(u)
    final_states = torch.empty(inputs.states_shape, device=k.device, dtype=torch.float32)
    sources = k, w, u, g_cumsum_log2, inputs.initial_state
    results = prev_states, v_new, final_states
    launch(
        _gdn_chunk_state_kernel,
        inputs.sequences * heads * triton.cdiv(value_dim, options["BLOCK_V"]),
        (*sources, chunks.spans, chunks.bounds, *results),
        (
            strides_of_each(*sources, *results),
            inputs.length,
            heads,
            chunks.count,
            inputs.values_per_key,
        ),
        CHUNK_SIZE=chunks.size,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        OPERAND=TL_DTYPE[operand],
        INTERMEDIATE=intermediate(dtype, precision),
        STATE=TL_DTYPE[precision.state_dtype],
        UNIT=strides_unit(k, w, prev_states),
        PER_CHANNEL=inputs.g.ndim == 4,
        BLOCK_K=max(16, triton.next_power_of_2(key_dim)),
        **options,
    )
    return results


@triton.jit
def _gdn_chunk_output_kernel(
    tensors, strides, length, heads, nchunks, values_per_key, scale, S: tl.constexpr
):
    """One block of V of one chunk of one head of `chunk_output`."""
    q_ptr, k_ptr, prev_states_ptr, v_new_ptr, g_cumsum_log2_ptr, spans_ptr, out_ptr = tensors
    q_strides, k_strides, prev_states_strides, v_new_strides, g_cumsum_log2_strides, out_strides = (
        strides
    )
    # heads of one chunk are in neighbouring programs, because they share q and k
    V_BLOCKS: tl.constexpr = (S.VALUE_DIM + S.BLOCK_V - 1) // S.BLOCK_V
    i_h, i_b, i_c, start, count = own_chunk(
        tl.program_id(0) // V_BLOCKS, spans_ptr, length, heads, nchunks, S.CHUNK_SIZE
    )
    if count <= 0:
        return
    chunk, key_tokens = (i_b, i_c, i_h), (i_b, start, i_h // values_per_key)
    o_v = (tl.program_id(0) % V_BLOCKS) * S.BLOCK_V + tl.arange(0, S.BLOCK_V)
    o_i = tl.arange(0, S.CHUNK_SIZE)
    m_v, m_i = o_v < S.VALUE_DIM, o_i < count

    # --- products of Q: with the state that enters the chunk [CHUNK_SIZE, BLOCK_V], and with K^T
    # [CHUNK_SIZE, CHUNK_SIZE]
    q_strides, k_strides = in_units(q_strides, S.UNIT), in_units(k_strides, S.UNIT)
    prev_states_strides = in_units(prev_states_strides, S.UNIT)
    out_strides = in_units(out_strides, S.UNIT)
    b_out = tl.zeros((S.CHUNK_SIZE, S.BLOCK_V), dtype=tl.float32)
    b_qk = tl.zeros((S.CHUNK_SIZE, S.CHUNK_SIZE), dtype=tl.float32)
    for first_k in range(0, S.KEY_DIM, S.BLOCK_K):
        o_k = first_k + tl.arange(0, S.BLOCK_K)
        m_k = o_k < S.KEY_DIM
        m_ik = m_i[:, None] & m_k[None, :]
        b_q = load_tokens(q_ptr, q_strides, key_tokens, o_i, o_k, m_ik, S.OPERAND)
        b_k = load_tokens(k_ptr, k_strides, key_tokens, o_i, o_k, m_ik, S.OPERAND)
        p_state = chunk_tile(prev_states_ptr, prev_states_strides, chunk, o_v, o_k)
        # [BLOCK_V, BLOCK_K]
        b_state = tl.load(p_state, mask=m_v[:, None] & m_k[None, :], other=0.0)
        b_out = tl.dot(b_q, tl.trans(b_state), b_out, input_precision=DOT_PRECISION)
        b_qk = tl.dot(b_q, tl.trans(b_k), b_qk, input_precision=DOT_PRECISION)

    # --- (17): decays, and the product of the scores with the chunk's corrected values
    b_g_cumsum_log2 = load_at(g_cumsum_log2_ptr, g_cumsum_log2_strides, (i_b, i_c, i_h, o_i))
    p_v_new = chunk_tile(v_new_ptr, v_new_strides, chunk, o_v, o_i)
    b_v_new = tl.load(p_v_new, mask=m_v[:, None], other=0.0)  # [BLOCK_V, CHUNK_SIZE]
    b_out *= decay_exp2(b_g_cumsum_log2).to(S.INTERMEDIATE).to(tl.float32)[:, None]
    b_decay = decay_exp2(b_g_cumsum_log2[:, None] - b_g_cumsum_log2[None, :]).to(S.INTERMEDIATE)
    b_scores = tl.where(o_i[:, None] >= o_i[None, :], b_qk.to(S.INTERMEDIATE) * b_decay, 0.0)
    b_scores = b_scores.to(S.OPERAND)
    b_out = tl.dot(b_scores, tl.trans(b_v_new), b_out, input_precision=DOT_PRECISION) * scale
    tl.store(
        token_tile(out_ptr, out_strides, (i_b, start, i_h), o_i, o_v),
        b_out.to(out_ptr.dtype.element_ty),
        mask=m_i[:, None] & m_v[None, :],
    )


def chunk_output(
    inputs: GDNInputs,
    prev_states: torch.Tensor,
    v_new: torch.Tensor,
    g_cumsum_log2: torch.Tensor,
    chunks: Chunks,
    precision: Precision,
) -> torch.Tensor:
    """Stage 6: the output, from the state that enters the chunk and from the chunk's own corrected
    values.

        qk[i, j]  = sum_k q[i, k] * k[j, k]
        out[i, v] = scale * (exp2(g_cumsum_log2[i]) * sum_k q[i, k] * S[v, k]
                  + sum_{j <= i} exp2(g_cumsum_log2[i] - g_cumsum_log2[j]) * qk[i, j] * v_new[v, j])

    In:   q, k (B, T, H, K) | prev_states S (B, NT, HV, V, K) | v_new (B, NT, HV, V, C)
          g_cumsum_log2 (B, NT, HV, C) fp32
    Out:  out (B, T, HV, V), the inputs' dtype
    Grid: (B * NT * HV * blocks of V)
    """
    q, k = inputs.q, inputs.k
    return output_of_chunks(
        _gdn_chunk_output_kernel,
        inputs,
        (q, k, prev_states, v_new, g_cumsum_log2),
        (q, k, prev_states),
        chunks,
        precision,
        config.unfused_options(inputs, precision)["chunk_output"],
        INTERMEDIATE=intermediate(inputs.v.dtype, precision),
    )


def output_of_chunks(
    kernel: Any,
    inputs: GDNInputs,
    read: tuple[torch.Tensor, ...],
    aligned: tuple[torch.Tensor, ...],
    chunks: Chunks,
    precision: Precision,
    options: dict[str, int],
    **constants: object,
) -> torch.Tensor:
    """Launch stage 6 of GDN or of Kimi Delta Attention.

    read: the tensors that the kernel reads
    aligned: those that the kernel addresses, like the output, with strides `in_units`
    options, constants: launch options and compile-time arguments of the kernel
    """
    heads, value_dim = inputs.v.shape[2:]
    out = torch.empty(inputs.v.shape, device=inputs.v.device, dtype=inputs.v.dtype)
    chunks.launch(
        kernel,
        heads * triton.cdiv(value_dim, options["BLOCK_V"]),
        heads,
        read,
        (out,),
        inputs.values_per_key,
        inputs.scale_or_default,
        KEY_DIM=inputs.q.shape[3],
        VALUE_DIM=value_dim,
        OPERAND=TL_DTYPE[operand_dtype(inputs.v.dtype, precision)],
        UNIT=strides_unit(*aligned, out),
        **constants,
        **options,
    )
    return out
