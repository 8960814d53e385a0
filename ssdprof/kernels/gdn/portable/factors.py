# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""First launch: computes, for every chunk and value head, the factors that do not depend on the state.

With d_i = exp(g_1 + ... + g_i) in the chunk, S the state that enters it, Q and K normalised if the call asks for it,

    A = (I + tril(diag(beta) K K^T, -1))^-1                    scaled_dot_kkt, solve_tril
    X_j = beta_j (d_end / d_j) (A^T K)_j                       state_factor
    W_ij = scale beta_j (d_i / d_j) (tril(Q K^T) A)_ij         out_factor
    Y = V - d K S,   S' = d_end S + X^T Y,   out = scale d Q S + W Y      second launch: `scan.py`

A does not depend on g: the decay from j to i factors out of both products.  The norms of the rows of q and k are fp32
factors of the results and of the rows of A, so that q and k are not rounded again.

In:   q, k (B, T, H, K) | g, beta (B, T, HV) | cu_seqlens (sequences + 1)
Out:  state_factor (slots, HV, C, K padded to blocks) | out_factor (slots, HV, C, C), both in the operands' dtype
      rows (slots, HV, 2, C) fp32: factors of the rows of K S and of Q S
      chunks (slots, HV, 2) fp32: d_end, and log2 of an upper bound of the factor of a state's norm over the chunk
Grid: (slots * HV), heads fastest, so that the value heads of one k head run at the same time.
Oracle: `reference.py`.  Source: Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464); docs/gdn-mathematics.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ssdprof.kernels.functions import DOT_PRECISION, LOG2_E, decay_exp2, ptr_offset, sequence_bounds

FORGOTTEN = tl.constexpr(-160.0)  # 2^-160 is zero in fp32; a lower g would cost later differences their precision
L2NORM_EPS = tl.constexpr(1e-6)
LEAF = tl.constexpr(16)  # least rows of a product

STAGES = {
    "first_slot": "setup", "piece_of_slot": "setup", "between_halves": "solve_tril", "leaf_inverses": "solve_tril",
    "unit_lower_inverse": "solve_tril", "_gdn_factors_kernel": "setup", "load_rows": "caller",
    "log2_decays": "gate_cumsum",
}  # fmt: skip


# --- division of sequences into pieces: chunks, or segments of several chunks.
#
# Each piece has a slot.  In a batch, all sequences have equally many slots.  The slots of packed sequence i, which
# begins at b, start at b // size + i.  This leaves room for one partial piece per sequence, and needs no sum over
# earlier sequences.  Some slots stay empty.


def slot_count(length: int, sequences: int, size: int, *, packed: bool) -> int:
    """Slots for pieces of `size` positions, for `sequences` of `length` each, or packed into `length` positions."""
    return length // size + sequences if packed else sequences * -(-length // size)


@triton.jit
def first_slot(sequence, begin, seqlen, PACKED: tl.constexpr, SIZE: tl.constexpr):
    """Slot of a sequence's first piece."""
    if PACKED:
        return (begin // SIZE).to(tl.int32) + sequence
    else:
        return sequence * tl.cdiv(seqlen, SIZE)


@triton.jit
def piece_of_slot(slot, cu_seqlens_ptr, cu_seqlens_stride, seqlen, sequences, SIZE: tl.constexpr):
    """(sequence, batch entry, index of the piece in its sequence, first position and length of that sequence).

    A piece that begins at or past the end does not exist, except the first one of an empty sequence.
    """
    if cu_seqlens_ptr is None:
        pieces = tl.cdiv(seqlen, SIZE)
        sequence = slot // pieces
        return sequence, sequence, slot % pieces, tl.zeros((), tl.int64), seqlen
    else:
        low, high = tl.zeros((), tl.int32), tl.cast(sequences, tl.int32)  # finds the last sequence not after `slot`
        while high - low > 1:
            middle = (low + high) // 2
            begin, _ = sequence_bounds(middle, cu_seqlens_ptr, cu_seqlens_stride)
            later = first_slot(middle, begin, seqlen, True, SIZE) > slot
            low, high = tl.where(later, low, middle), tl.where(later, middle, high)
        begin, length = sequence_bounds(low, cu_seqlens_ptr, cu_seqlens_stride)
        return low, tl.zeros((), tl.int32), slot - first_slot(low, begin, seqlen, True, SIZE), begin, length


# --- the inverse of I + L in registers, with L strictly lower triangular.
#
#     [I + L1        ]^-1   [   A1         ]
#     [  C     I + L2]    = [-A2 C A1   A2 ]
#
# Let A be the block diagonal matrix of the inverses of the diagonal blocks of s rows, and let C hold the entries of L
# between the two halves of each block of 2s rows.  Then A - A C A holds the inverses of the diagonal blocks of 2s rows.
# Every entry of these products is an entry of an inverse, which stays small even for collinear keys.  A Neumann series
# would compute powers of L, which do not stay small.
#
# Blocks of up to 16 rows are inverted in fp32 (tf32x3).  The products that join them have operands in MERGE.  fp16 has
# the precision of tf32 and costs half, but its range is guaranteed to be sufficient only for normalised keys.


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


# --- the first launch


@triton.jit
def load_rows(ptr, strides, o_t, m_t, o_k, KEY_DIM: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr):
    """Load positions o_t and dimensions o_k of q or k of one head; zeros past KEY_DIM and where m_t is false."""
    p = ptr + o_t[:, None] * strides[1] + o_k[None, :].to(o_t.dtype) * strides[3]
    if ALIGNED and WHOLE:
        return tl.load(p)
    elif WHOLE:
        return tl.load(p, mask=m_t[:, None], other=0.0)
    else:
        return tl.load(p, mask=m_t[:, None] & (o_k < KEY_DIM)[None, :], other=0.0)


@triton.jit
def log2_decays(g_ptr, stride, o_t, m_t):
    """g in log2 units, clamped to [FORGOTTEN, 0]; 0 past the sequence's end.  NaN stays NaN."""
    g = tl.load(g_ptr + o_t.to(tl.int64) * stride, mask=m_t, other=0.0).to(tl.float32)
    return tl.clamp(g * LOG2_E, FORGOTTEN, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["seqlen", "sequences"])
def _gdn_factors_kernel(tensors, strides, seqlen, sequences, scale, S: tl.constexpr):
    q_ptr, k_ptr, g_ptr, beta_ptr, cu_seqlens_ptr, state_factor_ptr, out_factor_ptr, rows_ptr, chunks_ptr = tensors
    q_strides, k_strides, g_strides, beta_strides, cu_seqlens_strides = strides
    # stage setup: which chunk of which head is mine
    slot, i_h = tl.program_id(0) // S.VALUE_HEADS, tl.program_id(0) % S.VALUE_HEADS
    cu_seqlens_stride = None if cu_seqlens_ptr is None else cu_seqlens_strides[0]
    _, i_b, i_c, begin, length = piece_of_slot(slot, cu_seqlens_ptr, cu_seqlens_stride, seqlen, sequences, S.CHUNK)
    t = i_c * S.CHUNK
    if t >= length:
        return
    BLOCKS: tl.constexpr = (S.KEY_DIM + S.BLOCK_K - 1) // S.BLOCK_K
    WHOLE: tl.constexpr = S.KEY_DIM % S.BLOCK_K == 0
    i_k = i_h // S.VALUES_PER_KEY
    o_t, o_k = tl.arange(0, S.CHUNK), tl.arange(0, S.BLOCK_K)
    m_t = o_t < length - t
    q_ptr = tl.multiple_of(q_ptr + ptr_offset((i_b, begin + t, i_k), q_strides[:3]), S.ALIGNMENT)
    k_ptr = tl.multiple_of(k_ptr + ptr_offset((i_b, begin + t, i_k), k_strides[:3]), S.ALIGNMENT)
    place = tl.program_id(0).to(tl.int64)

    # stage gate_cumsum
    g_cumsum_log2 = tl.cumsum(
        log2_decays(g_ptr + ptr_offset((i_b, begin + t, i_h), g_strides), g_strides[1], o_t, m_t), axis=0
    )
    beta_ptr += ptr_offset((i_b, begin + t, i_h), beta_strides)
    beta = tl.load(beta_ptr + o_t.to(tl.int64) * beta_strides[1], mask=m_t, other=0.0).to(tl.float32)
    end = tl.sum(tl.where(o_t == S.CHUNK - 1, g_cumsum_log2, 0.0), axis=0)

    # stage scaled_dot_kkt
    kk, k_squares = tl.zeros((S.CHUNK, S.CHUNK), tl.float32), tl.zeros((S.CHUNK,), tl.float32)
    for n in tl.static_range(BLOCKS):
        k = load_rows(k_ptr, k_strides, o_t.to(S.OFFSET), m_t, n * S.BLOCK_K + o_k, S.KEY_DIM, S.ALIGNED, WHOLE)
        k_squares += tl.sum(k.to(tl.float32) * k.to(tl.float32), axis=1)
        kk = tl.dot(k.to(S.OPERAND), tl.trans(k.to(S.OPERAND)), kk, input_precision=DOT_PRECISION)
    k_length = tl.full((S.CHUNK,), 1.0, tl.float32)  # reciprocal of the norm
    if S.L2NORM:
        k_length = tl.rsqrt(k_squares + L2NORM_EPS)
    kk *= (beta * k_length)[:, None] * k_length[None, :]

    # stage solve_tril
    A = (unit_lower_inverse(kk, S.MERGE, S.MERGE_PRECISION) * k_length[:, None]).to(S.OPERAND)

    # stage state_factor
    qk, q_squares = tl.zeros((S.CHUNK, S.CHUNK), tl.float32), tl.zeros((S.CHUNK,), tl.float32)
    to_end = decay_exp2(end - g_cumsum_log2) * beta
    for n in tl.static_range(BLOCKS):
        o_n = n * S.BLOCK_K + o_k
        k = load_rows(k_ptr, k_strides, o_t.to(S.OFFSET), m_t, o_n, S.KEY_DIM, S.ALIGNED, WHOLE).to(S.OPERAND)
        q = load_rows(q_ptr, q_strides, o_t.to(S.OFFSET), m_t, o_n, S.KEY_DIM, S.ALIGNED, WHOLE)
        if S.L2NORM:
            q_squares += tl.sum(q.to(tl.float32) * q.to(tl.float32), axis=1)
        qk = tl.dot(q.to(S.OPERAND), tl.trans(k), qk, input_precision=DOT_PRECISION)
        X = tl.dot(tl.trans(A), k, input_precision=DOT_PRECISION) * to_end[:, None]
        tile = place * (S.CHUNK * BLOCKS * S.BLOCK_K) + o_t[:, None] * (BLOCKS * S.BLOCK_K) + o_n[None, :]
        tl.store(state_factor_ptr + tile, X.to(state_factor_ptr.dtype.element_ty))

    # stage out_factor
    q_scale = tl.full((S.CHUNK,), 1.0, tl.float32) * scale
    if S.L2NORM:
        q_scale *= tl.rsqrt(q_squares + L2NORM_EPS)
    causal = o_t[:, None] >= o_t[None, :]
    P = tl.where(causal, qk * q_scale[:, None], 0.0).to(S.OPERAND)
    W = tl.dot(P, A, input_precision=DOT_PRECISION)
    W *= decay_exp2(g_cumsum_log2[:, None] - g_cumsum_log2[None, :]) * beta[None, :]
    tile = place * (S.CHUNK * S.CHUNK) + o_t[:, None] * S.CHUNK + o_t[None, :]
    tl.store(out_factor_ptr + tile, tl.where(causal, W, 0.0).to(out_factor_ptr.dtype.element_ty))

    # stage rows
    since_start = decay_exp2(g_cumsum_log2)
    rows_ptr += place * (2 * S.CHUNK)
    tl.store(rows_ptr + o_t, since_start * k_length)
    tl.store(rows_ptr + S.CHUNK + o_t, since_start * q_scale)
    # with unit keys and beta up to 2, a position does not stretch a state; longer keys or a larger beta may
    stretch = tl.abs(1.0 - beta * k_squares * (k_length * k_length))
    stretch_log2 = tl.log2(tl.maximum(stretch, 1.0, propagate_nan=tl.PropagateNan.ALL))
    tl.store(chunks_ptr + place * 2, decay_exp2(end))
    tl.store(chunks_ptr + place * 2 + 1, end + tl.sum(stretch_log2, axis=0))
