"""The portable kernels, in two launches.  The first one computes, for every chunk and value head,
the factors that do not depend on the state.  The second one computes the output, with the state in
registers from chunk to chunk.

With d_i = exp(g_1 + ... + g_i) in the chunk, d_end that of its last position, S the state that
enters the chunk and S' the one that leaves it, and Q and K normalised if the call asks for it
(docs/gdn-mathematics.md, equations 18 to 25, and 28 for a chunk's bound),

    A = (I + tril(diag(beta) K K^T, -1))^-1                    scaled_dot_kkt, solve_tril
    X_j = beta_j (d_end / d_j) (A^T K)_j                       state_factor
    W_ij = scale beta_j (d_i / d_j) (tril(Q K^T) A)_ij         out_factor
    Y = V - d K S,   S' = d_end S + X^T Y,   out = scale d Q S + W Y      second launch

A does not depend on g: the decay from j to i factors out of both products.  The reciprocal norms
of the rows of q and k are fp32 factors of the results and of the rows of A, so that q and k are not
rounded again.  From one chunk to the next, two products depend on each other: K S and X^T Y.

One program of the second launch owns one slice of V of one head of one segment.  A segment that
does not begin its sequence needs the state that enters it.  The program computes it by starting at
an earlier chunk, without output.  From that chunk to the segment, the norm of any state falls to at
most 2^-24 of itself, less than a rounding of fp32.  If there is no such chunk, the program starts
at the sequence's start.  No program waits for another.

In:      q, k (B, T, H, K) | v (B, T, HV, V) | g, beta (B, T, HV)
         initial_state (sequences, HV, K, V) | cu_seqlens (sequences + 1)
Between: state_factor (slots, HV, C, K padded to blocks), operands' dtype: X
         out_factor (slots, HV, C, C), operands' dtype: W
         rows (slots, HV, 2, C) fp32: factors of the rows of K S and of Q S
         chunks (slots, HV, 2) fp32: d_end, and log2 of an upper bound of the factor by which the
             chunk changes a state's norm
Out:     out (B, T, HV, V), v's dtype | final_states (sequences, HV, K, V) fp32
Grids:   (slots * HV), heads fastest, so that the value heads of one key head run at the same time;
         then (segments of all sequences * HV * slices of V), slices fastest, then heads
Oracle: `reference.py`.  Source: Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464);
docs/gdn-mathematics.md.
"""

from collections.abc import Callable
from math import gcd

import torch
import triton
import triton.language as tl

from ssdprof.kernels.functions import (
    DOT_PRECISION,
    LOG2_E,
    TL_DTYPE,
    decay_exp2,
    ptr_offset,
    sequence_bounds,
)
from ssdprof.kernels.gdn.config import GDNPortableConfig, inverse_products, operand_dtype
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput, state_strides
from ssdprof.kernels.gdn.unfused.stages import FORGOTTEN, L2NORM_EPS
from ssdprof.kernels.inputs import PreparedLaunch
from ssdprof.kernels.launch import Launcher
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.tensors import offset_dtype, strides_of, tile_strides

# rows of the largest blocks that are inverted in fp32 whatever MERGE is: the fewest rows of an
# operand of a product
LEAF = tl.constexpr(16)
# log2 of the factor at which the rest of a state is neglected: it is less than a rounding of fp32
NEGLIGIBLE = tl.constexpr(-24.0)
# A power of 2 that P has as a factor and W has not: without it, products with very short keys would
# have few digits in fp16.  With a scale of 128^-1/2 and normalised q, the whole factor is 1.4.
UP = tl.constexpr(16.0)
LOOK_BACK = tl.constexpr(128)  # chunks: one iteration of `chunks_to_forget` reads their bounds

# shape and dtype of each tensor that the first launch writes for the second
FactorShapes = list[tuple[tuple[int, ...], torch.dtype]]

# stages of functions: `stalls/attribute.py`
STAGES = {
    "first_slot": "setup", "piece_of_slot": "setup", "whole_sequence": "setup",
    "between_halves": "solve_tril", "leaf_inverses": "solve_tril",
    "unit_lower_inverse": "solve_tril", "operand_terms": "solve_tril",
    "_gdn_factors_kernel": "setup", "log2_decays": "gate_cumsum", "chunks_to_forget": "warm_up",
    "take_state": "setup", "store_state": "setup.store",
    "residual": "chunk_state.residual", "next_state": "chunk_state.update",
    "_gdn_scan_kernel": "setup", "segment_of_program": "setup",
}  # fmt: skip


# --- division of sequences into pieces of SIZE positions: chunks, or segments of several chunks.
#
# Each piece has a slot.  In a batch, all sequences have equally many slots.  The slots of packed
# sequence i, which begins at position b, start at b // SIZE + i.  This leaves room for one partial
# piece per sequence, and needs no sum over earlier sequences.  Some slots stay empty.


@triton.jit
def first_slot(sequence, begin, seqlen, PACKED: tl.constexpr, SIZE: tl.constexpr):
    """Slot of a sequence's first piece.

    begin: its first position in a pack.  seqlen: positions of each sequence in a batch.
    """
    if PACKED:
        return (begin // SIZE).to(tl.int32) + sequence
    else:
        return sequence * tl.cdiv(seqlen, SIZE)


@triton.jit
def piece_of_slot(slot, cu_seqlens_ptr, cu_seqlens_strides, seqlen, sequences, SIZE: tl.constexpr):
    """(sequence, row of the batch, index of the piece in its sequence, first position and length of
    that sequence).

    A slot is empty if its piece begins at or past the end of the sequence.  Piece 0 of an empty
    sequence is such a slot too, but the second launch uses it to copy the sequence's state.
    """
    if cu_seqlens_ptr is None:
        pieces = tl.cdiv(seqlen, SIZE)
        sequence = slot // pieces
        return sequence, sequence, slot % pieces, tl.zeros((), tl.int64), seqlen
    else:
        # binary search for the last sequence whose first slot is not after `slot`
        low, high = tl.zeros((), tl.int32), tl.cast(sequences, tl.int32)
        while high - low > 1:
            middle = (low + high) // 2
            begin, _ = sequence_bounds(middle, cu_seqlens_ptr, cu_seqlens_strides[0])
            later = first_slot(middle, begin, seqlen, True, SIZE) > slot
            low, high = tl.where(later, low, middle), tl.where(later, middle, high)
        begin, length = sequence_bounds(low, cu_seqlens_ptr, cu_seqlens_strides[0])
        return (
            low,
            tl.zeros((), tl.int32),
            slot - first_slot(low, begin, seqlen, True, SIZE),
            begin,
            length,
        )


@triton.jit
def whole_sequence(sequence, cu_seqlens_ptr, cu_seqlens_strides, seqlen):
    """(row of the batch, first position, length) of a sequence."""
    if cu_seqlens_ptr is None:
        return sequence, tl.zeros((), tl.int64), seqlen
    else:
        begin, length = sequence_bounds(sequence, cu_seqlens_ptr, cu_seqlens_strides[0])
        return 0, begin, length


# --- the inverse of I + L in registers, with L strictly lower triangular (13), (13a).
#
#     [I + L1        ]^-1   [   A1         ]
#     [  C     I + L2]    = [-A2 C A1   A2 ]
#
# Let A be the block diagonal matrix of the inverses of the diagonal blocks of I + L of s rows, and
# let C hold the entries of L between the two halves of each block of 2s rows.  Then A - A C A holds
# the inverses of the diagonal blocks of 2s rows.  Every entry of A C A is, up to its sign, an entry
# of an inverse, which stays small even for collinear keys.  A Neumann series would compute powers
# of L, which do not stay small.
#
# Blocks of up to 16 rows are inverted in fp32 (tf32x3).  The products that join these blocks have
# operands of the dtype MERGE.  fp16 has the precision of tf32 and costs half, but its range is
# guaranteed to be sufficient only for normalised keys and beta from 0 to 2.


@triton.jit
def between_halves(i, j, half: tl.constexpr):
    """Whether entry (i, j) lies between the lower and the upper half of a diagonal block of 2 *
    half rows.
    """
    return (i // (2 * half) == j // (2 * half)) & (i // half > j // half)


@triton.jit
def leaf_inverses(L):
    """(I + L)^-1 for each of n matrices L (n, LEAF, LEAF)."""
    o_i = tl.arange(0, LEAF)
    i, j = o_i[None, :, None], o_i[None, None, :]
    # blocks of 2 rows, whose inverse needs no product
    A = tl.where(i == j, 1.0, 0.0) - tl.where(between_halves(i, j, 1), L, 0.0)
    for log2_half in tl.static_range(1, 4):  # join halves of 2, 4 and 8 rows
        C = tl.where(between_halves(i, j, 2**log2_half), L, 0.0)
        A -= tl.dot(A, tl.dot(C, A, input_precision=DOT_PRECISION), input_precision=DOT_PRECISION)
    return A


@triton.jit
def unit_lower_inverse(L, MERGE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^-1 for L (s, s) fp32, where s is 16, 32, 64 or 128.  Reads only entries below the
    diagonal.

    MERGE: dtype of the operands of the products that join blocks of 16 rows
    PRECISION: input precision of these products if MERGE is fp32
    """
    SIZE: tl.constexpr = L.shape[0]
    LEAVES: tl.constexpr = SIZE // LEAF
    o_n = tl.arange(0, LEAVES)
    # L as (block row, row, block column, column), and its diagonal blocks: each sum over block
    # columns has one term that is not masked
    diagonal = (o_n[:, None] == o_n[None, :])[:, None, :, None]
    leaves = tl.sum(tl.where(diagonal, tl.reshape(L, (LEAVES, LEAF, LEAVES, LEAF)), 0.0), axis=2)
    # their inverses on the diagonal of a matrix (s, s)
    A = tl.reshape(leaf_inverses(leaves), (LEAVES, LEAF, 1, LEAF))
    A = tl.reshape(tl.where(diagonal, A, 0.0), (SIZE, SIZE))
    o_i = tl.arange(0, SIZE)
    for log2_half in tl.static_range(4, 7):  # join halves of 16, 32 and 64 rows
        if 2**log2_half < SIZE:
            C = tl.where(between_halves(o_i[:, None], o_i[None, :], 2**log2_half), L, 0.0)
            factor = A.to(MERGE)
            product = tl.dot(C.to(MERGE), factor, input_precision=PRECISION)
            A -= tl.dot(factor, product.to(MERGE), input_precision=PRECISION)
    return A


@triton.jit
def operand_terms(A, OPERAND: tl.constexpr):
    """The fp32 matrix A as a sum of operands of products: one if OPERAND is fp32, else two.

    For a run of equal keys, entries of the inverse cancel in its products with K and Q K^T, and the
    rounding errors of all of its rows to 16 bits add up.
    """
    if A.dtype == OPERAND:
        return (A,)
    else:
        high = A.to(OPERAND)
        return high, (A - high.to(tl.float32)).to(OPERAND)


# --- the first launch


@triton.jit
def load_rows(
    ptr, strides, o_t, m_t, o_k, KEY_DIM: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr
):
    """Load positions o_t and dimensions o_k of q or k of one head: (position, BLOCK_K), zeros past
    KEY_DIM and where m_t is false.

    ptr: pointer to the head's row at position 0 of o_t.  ALIGNED: m_t is true everywhere.  WHOLE:
    no o_k is past KEY_DIM.
    """
    pointers = ptr + o_t[:, None] * strides[1] + o_k[None, :].to(o_t.dtype) * strides[3]
    if ALIGNED and WHOLE:
        return tl.load(pointers)
    elif WHOLE:
        return tl.load(pointers, mask=m_t[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=m_t[:, None] & (o_k < KEY_DIM)[None, :], other=0.0)


@triton.jit
def log2_decays(g_ptr, stride, o_t, m_t):
    """g of a chunk's positions in log2 units (C), clamped to [FORGOTTEN, 0]; 0 past the sequence's
    end.  NaN stays NaN.  g_ptr: to the chunk's first position.  stride: between positions
    """
    g = tl.load(g_ptr + o_t.to(tl.int64) * stride, mask=m_t, other=0.0).to(tl.float32)
    return tl.clamp(g * LOG2_E, FORGOTTEN, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_squares(ptr, strides, m_t, S: tl.constexpr):
    """|k_i|^2 of a chunk (C), in fp32.  ptr: to the first row.  m_t: which positions exist."""
    o_t, o_k = tl.arange(0, S.CHUNK).to(S.OFFSET), tl.arange(0, S.BLOCK_K)
    WHOLE: tl.constexpr = S.KEY_DIM % S.BLOCK_K == 0
    squares = tl.zeros((S.CHUNK,), tl.float32)
    for n in tl.static_range((S.KEY_DIM + S.BLOCK_K - 1) // S.BLOCK_K):
        o_n = n * S.BLOCK_K + o_k
        k = load_rows(ptr, strides, o_t, m_t, o_n, S.KEY_DIM, S.ALIGNED, WHOLE).to(tl.float32)
        squares += tl.sum(k * k, axis=1)
    return squares


@triton.jit(do_not_specialize=["seqlen", "sequences"])
def _gdn_factors_kernel(tensors, strides, seqlen, sequences, scale, S: tl.constexpr):
    """The first launch: X, W, the factors of rows, the decay and the bound of one chunk of a value
    head.
    """
    (
        q_ptr, k_ptr, g_ptr, beta_ptr, cu_seqlens_ptr, state_factor_ptr, out_factor_ptr, rows_ptr,
        chunks_ptr,
    ) = tensors  # fmt: skip
    q_strides, k_strides, g_strides, beta_strides, cu_seqlens_strides = strides
    # stage setup: the program's chunk and head
    slot, i_h = tl.program_id(0) // S.VALUE_HEADS, tl.program_id(0) % S.VALUE_HEADS
    _, i_b, i_c, begin, length = piece_of_slot(
        slot, cu_seqlens_ptr, cu_seqlens_strides, seqlen, sequences, S.CHUNK
    )
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
    head_slot = tl.program_id(0).to(tl.int64)

    # stage gate_cumsum: log2 of the decay since the chunk's start (C), and over the whole chunk
    g_ptr += ptr_offset((i_b, begin + t, i_h), g_strides)
    g_cumsum_log2 = tl.cumsum(log2_decays(g_ptr, g_strides[1], o_t, m_t), axis=0)
    beta_ptr += ptr_offset((i_b, begin + t, i_h), beta_strides)
    beta = tl.load(beta_ptr + o_t.to(tl.int64) * beta_strides[1], mask=m_t, other=0.0).to(
        tl.float32
    )
    end = tl.sum(tl.where(o_t == S.CHUNK - 1, g_cumsum_log2, 0.0), axis=0)

    # stage scaled_dot_kkt: L0 (C, C) of (18), with the norms of (25); only entries below the
    # diagonal are used.  fp32 keys are normalised before their products: for a run of equal keys,
    # all entries of L would have the same rounding error of e^2 |k|^2, and these errors add up.
    NORMALISE: tl.constexpr = S.L2NORM and tl.float32 == S.OPERAND
    L, k_squares = tl.zeros((S.CHUNK, S.CHUNK), tl.float32), tl.zeros((S.CHUNK,), tl.float32)
    k_factor = tl.full((S.CHUNK,), 1.0, tl.float32)  # reciprocal of the norm: e of (25)
    if NORMALISE:
        k_squares = row_squares(k_ptr, k_strides, m_t, S)
        k_factor = tl.rsqrt(k_squares + L2NORM_EPS)
    for n in tl.static_range(BLOCKS):
        o_n = n * S.BLOCK_K + o_k
        k = load_rows(k_ptr, k_strides, o_t.to(S.OFFSET), m_t, o_n, S.KEY_DIM, S.ALIGNED, WHOLE)
        if NORMALISE:
            k *= k_factor[:, None]
        else:
            k_squares += tl.sum(k.to(tl.float32) * k.to(tl.float32), axis=1)
        L = tl.dot(k.to(S.OPERAND), tl.trans(k.to(S.OPERAND)), L, input_precision=DOT_PRECISION)
    e = tl.full((S.CHUNK,), 1.0, tl.float32)  # factor of the keys in the products below
    if S.L2NORM and not NORMALISE:
        k_factor = tl.rsqrt(k_squares + L2NORM_EPS)
        e = k_factor
    L *= (beta * e)[:, None] * e[None, :]

    # stage solve_tril: diag(e) A (C, C)
    inverse = unit_lower_inverse(L, S.MERGE, S.MERGE_PRECISION) * e[:, None]
    A = operand_terms(inverse, S.OPERAND)

    # stage state_factor: X (C, K), and Q K^T (C, C) from the same blocks of k
    qk, q_squares = tl.zeros((S.CHUNK, S.CHUNK), tl.float32), tl.zeros((S.CHUNK,), tl.float32)
    to_end = decay_exp2(end - g_cumsum_log2) * beta
    for n in tl.static_range(BLOCKS):
        o_n = n * S.BLOCK_K + o_k
        k = load_rows(k_ptr, k_strides, o_t.to(S.OFFSET), m_t, o_n, S.KEY_DIM, S.ALIGNED, WHOLE)
        if NORMALISE:
            k *= k_factor[:, None]
        k = k.to(S.OPERAND)
        q = load_rows(q_ptr, q_strides, o_t.to(S.OFFSET), m_t, o_n, S.KEY_DIM, S.ALIGNED, WHOLE)
        if S.L2NORM:
            q_squares += tl.sum(q.to(tl.float32) * q.to(tl.float32), axis=1)
        qk = tl.dot(q.to(S.OPERAND), tl.trans(k), qk, input_precision=DOT_PRECISION)
        X = tl.zeros((S.CHUNK, S.BLOCK_K), tl.float32)
        for term in tl.static_range(len(A)):
            X = tl.dot(tl.trans(A[term]), k, X, input_precision=DOT_PRECISION)
        X *= to_end[:, None]
        tile = (
            head_slot * (S.CHUNK * BLOCKS * S.BLOCK_K)
            + o_t[:, None] * (BLOCKS * S.BLOCK_K)
            + o_n[None, :]
        )
        tl.store(state_factor_ptr + tile, X.to(state_factor_ptr.dtype.element_ty))

    # stage out_factor: W (C, C)
    q_factor = tl.full((S.CHUNK,), 1.0, tl.float32) * scale  # scale / norm; without L2NORM, scale
    if S.L2NORM:
        q_factor *= tl.rsqrt(q_squares + L2NORM_EPS)
    causal = o_t[:, None] >= o_t[None, :]
    P = tl.where(causal, qk * (q_factor * UP)[:, None], 0.0).to(S.OPERAND)
    W = tl.zeros((S.CHUNK, S.CHUNK), tl.float32)
    for term in tl.static_range(len(A)):
        W = tl.dot(P, A[term], W, input_precision=DOT_PRECISION)
    W *= decay_exp2(g_cumsum_log2[:, None] - g_cumsum_log2[None, :]) * (beta / UP)[None, :]
    tile = head_slot * (S.CHUNK * S.CHUNK) + o_t[:, None] * S.CHUNK + o_t[None, :]
    tl.store(out_factor_ptr + tile, tl.where(causal, W, 0.0).to(out_factor_ptr.dtype.element_ty))

    # stage rows: factors of the rows of K S and of Q S (C), the chunk's decay, and its bound (28)
    since_start = decay_exp2(g_cumsum_log2)
    rows_ptr += head_slot * (2 * S.CHUNK)
    tl.store(rows_ptr + o_t, since_start * k_factor)
    tl.store(rows_ptr + S.CHUNK + o_t, since_start * q_factor)
    # with unit keys and beta from 0 to 2, a position does not stretch a state; longer keys or
    # another beta may
    stretch = tl.abs(1.0 - beta * k_squares * (k_factor * k_factor))
    stretch_log2 = tl.log2(tl.maximum(stretch, 1.0, propagate_nan=tl.PropagateNan.ALL))
    tl.store(chunks_ptr + head_slot * 2, decay_exp2(end))
    tl.store(chunks_ptr + head_slot * 2 + 1, end + tl.sum(stretch_log2, axis=0))


# --- the second launch


@triton.jit
def chunks_to_forget(bounds_ptr, stride, count):
    """How many chunks directly before a chunk it takes until a state that enters the first of them
    is negligible at the chunk itself; `count` if it never is.

    bounds_ptr: to the bound of the chunk in `chunks`: log2 of the factor by which a chunk changes a
        state's norm at most.  stride: between the bounds of two chunks
    count: the number of all chunks before it in the sequence
    """
    o_c = tl.arange(0, LOOK_BACK)
    # needed: the result, `count` as long as no sum suffices.  seen: chunks whose bounds have been
    # read.  bound_sum: the sum of these bounds
    needed, seen = tl.cast(count, tl.int32), 0
    bound_sum = 0.0
    while (needed == count) & (seen < count):
        m_c = seen + o_c < count
        bound = tl.load(bounds_ptr - (seen + o_c + 1).to(tl.int64) * stride, mask=m_c, other=0.0)
        bound_sums = bound_sum + tl.cumsum(bound, axis=0)
        needed = tl.min(tl.where(m_c & (bound_sums <= NEGLIGIBLE), seen + o_c + 1, needed), axis=0)
        bound_sum += tl.sum(bound, axis=0)
        seen += LOOK_BACK
    return needed


@triton.jit
def take_state(ptr, state_k, state_v, strides, m_v, KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load a slice of V of a stored state: a tuple of blocks of K in fp32, (BLOCK_V, BLOCK_K) or
    transposed.

    state_k, state_v: indices along K, of the first block, and along V; one is a column and one a
        row, so that together they have that shape.
    ptr: the state's element (0, first of the slice)
    """
    state = ()
    for n in tl.static_range((KEY_DIM + BLOCK_K - 1) // BLOCK_K):
        o_n = state_k + n * BLOCK_K
        block = tl.load(
            ptr + o_n * strides[2] + state_v * strides[3], mask=m_v & (o_n < KEY_DIM), other=0.0
        )
        state = state + (block.to(tl.float32),)
    return state


@triton.jit
def store_state(
    ptr, state, state_k, state_v, strides, m_v, KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Store a slice of V of a state.  Arguments are those of `take_state`."""
    for n in tl.static_range(len(state)):
        o_n = state_k + n * BLOCK_K
        tile = o_n * strides[2] + state_v * strides[3]
        tl.store(ptr + tile, state[n], mask=m_v & (o_n < KEY_DIM))


@triton.jit
def state_product(state, ptr, strides, m_t, ALIGNED: tl.constexpr, S: tl.constexpr):
    """K S or Q S: (C, BLOCK_V), or its transpose if V_ROWS.

    state: a tuple of blocks of K.  ptr: to the row of the chunk's first position in k or q.
    strides: of that tensor.  m_t: which positions exist.  ALIGNED: m_t is true everywhere.
    """
    o_t, o_k = tl.arange(0, S.CHUNK).to(S.OFFSET), tl.arange(0, S.BLOCK_K).to(S.OFFSET)
    WHOLE: tl.constexpr = S.KEY_DIM % S.BLOCK_K == 0
    if S.V_ROWS:
        total = tl.zeros((state[0].shape[0], o_t.shape[0]), tl.float32)
    else:
        total = tl.zeros((o_t.shape[0], state[0].shape[1]), tl.float32)
    for n in tl.static_range(len(state)):
        o_n = o_k + n * S.BLOCK_K
        rows = load_rows(ptr, strides, o_t, m_t, o_n, S.KEY_DIM, ALIGNED, WHOLE).to(S.OPERAND)
        if S.V_ROWS:
            total = tl.dot(
                state[n].to(S.OPERAND), tl.trans(rows), total, input_precision=DOT_PRECISION
            )
        else:
            total = tl.dot(rows, state[n].to(S.OPERAND), total, input_precision=DOT_PRECISION)
    return total


@triton.jit
def residual(product, v_ptr, m_v, row_ptr, S: tl.constexpr):
    """Y = V - d K S as an operand: (C, BLOCK_V), or its transpose if V_ROWS.

    product: K S.  v_ptr, m_v: pointers to the tile of v, and its mask.  row_ptr: to the factors (C)
    of the rows of K S
    """
    v = tl.load(v_ptr, mask=m_v, other=0.0).to(tl.float32)
    row = tl.load(row_ptr + tl.arange(0, S.CHUNK))
    return (v - product * (row[None, :] if S.V_ROWS else row[:, None])).to(S.OPERAND)


@triton.jit
def next_state(state, Y, state_factor_ptr, decay, S: tl.constexpr):
    """The state after the chunk, d_end S + X^T Y, as blocks of K.

    state: blocks of K.  Y: of `residual`.  state_factor_ptr: to X of the chunk (C, K padded).
    decay: d_end
    """
    PADDED: tl.constexpr = len(state) * S.BLOCK_K
    o_c, o_k = tl.arange(0, S.CHUNK), tl.arange(0, S.BLOCK_K)
    blocks = ()
    for n in tl.static_range(len(state)):
        X = tl.load(state_factor_ptr + o_c[:, None] * PADDED + (n * S.BLOCK_K + o_k)[None, :])
        if S.V_ROWS:
            block = tl.dot(Y, X, state[n] * decay, input_precision=DOT_PRECISION)
        else:
            block = tl.dot(tl.trans(X), Y, state[n] * decay, input_precision=DOT_PRECISION)
        blocks = blocks + (block,)
    return blocks


@triton.jit
def finish_output(out, Y, rows_ptr, out_factor_ptr, head_slot, S: tl.constexpr):
    """The output of a chunk, scale d Q S + W Y: (C, BLOCK_V), or its transpose if V_ROWS.

    out: Q S.  Y: of `residual`.  rows_ptr, out_factor_ptr: to the factors of rows and to W of all
    chunks.  head_slot: index of the chunk's slot and head among these
    """
    o_c = tl.arange(0, S.CHUNK)
    row = tl.load(rows_ptr + head_slot * (2 * S.CHUNK) + S.CHUNK + o_c)
    W_ptr = out_factor_ptr + head_slot * (S.CHUNK * S.CHUNK)
    W = tl.load(W_ptr + o_c[:, None] * S.CHUNK + o_c[None, :])
    if S.V_ROWS:
        return tl.dot(Y, tl.trans(W), out * row[None, :], input_precision=DOT_PRECISION)
    else:
        return tl.dot(W, Y, out * row[:, None], input_precision=DOT_PRECISION)


@triton.jit
def pass_chunks(
    state, first, stop, length, first_head_slot, keys, values, m_v, output, factors, S: tl.constexpr
):
    """The state after chunks `first` to `stop` - 1, from the state that enters them.  Also stores
    their outputs, unless `output` is None.

    length: positions of the sequence
    first_head_slot: index of the slot of the sequence's first chunk and of the head in what the
        first launch wrote; that of a later chunk is VALUE_HEADS further per chunk
    keys: pointer to the sequence's k, and its strides
    values: pointer to the sequence's v, its stride between positions, and the offsets of a tile
        (C, BLOCK_V), or (BLOCK_V, C) if V_ROWS
    m_v: which of the tile's columns of V exist
    output: pointer to q and its strides, then, as in `values`, to the output; None: no output is
        stored, and no chunk is partial
    factors: pointers to what the first launch wrote: state_factor, out_factor, rows and chunks
    """
    k_ptr, k_strides = keys
    v_ptr, v_step, v_tile = values
    state_factor_ptr, out_factor_ptr, rows_ptr, chunks_ptr = factors
    PADDED: tl.constexpr = len(state) * S.BLOCK_K
    ALIGNED: tl.constexpr = S.ALIGNED or output is None
    for i_c in tl.range(first, stop, num_stages=S.SCAN_STAGES):
        # where the chunk's v, k and factors lie, and which of its positions exist
        t = tl.cast(i_c, tl.int64) * S.CHUNK
        v_rows_ptr = tl.multiple_of(v_ptr + t * v_step, S.ALIGNMENT)
        head_slot = first_head_slot + tl.cast(i_c, tl.int64) * S.VALUE_HEADS
        m_t, m_tile = tl.arange(0, S.CHUNK) >= 0, m_v
        if output is not None:
            m_t = tl.arange(0, S.CHUNK) < length - i_c * S.CHUNK
        if not ALIGNED:
            m_tile = m_v & (m_t[None, :] if S.V_ROWS else m_t[:, None])
        k_rows_ptr = tl.multiple_of(k_ptr + t * k_strides[1], S.ALIGNMENT)
        # the products with the state that enters the chunk, K S and Q S
        product = state_product(state, k_rows_ptr, k_strides, m_t, ALIGNED, S)
        if output is not None:
            q_ptr, q_strides, out_ptr, out_step, out_tile = output
            q_rows_ptr = tl.multiple_of(q_ptr + t * q_strides[1], S.ALIGNMENT)
            out = state_product(state, q_rows_ptr, q_strides, m_t, ALIGNED, S)
        # the state after the chunk, and the chunk's output
        Y = residual(product, v_rows_ptr + v_tile, m_tile, rows_ptr + head_slot * (2 * S.CHUNK), S)
        decay = tl.load(chunks_ptr + head_slot * 2)
        state = next_state(state, Y, state_factor_ptr + head_slot * (S.CHUNK * PADDED), decay, S)
        if output is not None:
            out = finish_output(out, Y, rows_ptr, out_factor_ptr, head_slot, S)
            out_rows_ptr = out_ptr + t * out_step + out_tile
            tl.store(out_rows_ptr, out.to(out_ptr.dtype.element_ty), mask=m_tile)
    return state


@triton.jit
def segment_of_program(
    rank, cu_seqlens_ptr, cu_seqlens_strides, seqlen, sequences, S: tl.constexpr
):
    """The results of `piece_of_slot` for the program's segment, the `rank`-th of a head.  Without
    CUT, a segment is a whole sequence.
    """
    if S.CUT:
        return piece_of_slot(
            rank, cu_seqlens_ptr, cu_seqlens_strides, seqlen, sequences, S.SEGMENT * S.CHUNK
        )
    else:
        i_b, begin, length = whole_sequence(rank, cu_seqlens_ptr, cu_seqlens_strides, seqlen)
        return rank, i_b, 0, begin, length


@triton.jit(do_not_specialize=["seqlen", "sequences"])
def _gdn_scan_kernel(tensors, strides, seqlen, sequences, S: tl.constexpr):
    """The second launch: the output and the final state of one slice of V of one segment of one
    head, chunk after chunk, with the state in registers.
    """
    (
        q_ptr, k_ptr, v_ptr, state_factor_ptr, out_factor_ptr, rows_ptr, chunks_ptr,
        initial_states_ptr, cu_seqlens_ptr, out_ptr, final_states_ptr,
    ) = tensors  # fmt: skip
    factors = state_factor_ptr, out_factor_ptr, rows_ptr, chunks_ptr
    (
        q_strides, k_strides, v_strides, initial_states_strides, cu_seqlens_strides, out_strides,
        final_states_strides,
    ) = strides  # fmt: skip
    # stage setup: the program's segment and slice; its chunks are `first` to `stop` - 1
    SLICES: tl.constexpr = (S.VALUE_DIM + S.BLOCK_V - 1) // S.BLOCK_V
    UNITS: tl.constexpr = S.VALUE_HEADS * SLICES
    # rank: of the segment among all segments of a head.  unit: head and slice of V
    rank, unit = tl.program_id(0) // UNITS, tl.program_id(0) % UNITS
    i_h, first_v = unit // SLICES, (unit % SLICES) * S.BLOCK_V
    i_k = i_h // S.VALUES_PER_KEY
    sequence, i_b, segment, begin, length = segment_of_program(
        rank, cu_seqlens_ptr, cu_seqlens_strides, seqlen, sequences, S
    )
    nchunks = tl.cdiv(length, S.CHUNK)
    first, stop = tl.cast(0, tl.int32), nchunks
    if S.CUT:
        first = segment * S.SEGMENT
        stop = tl.minimum(first + S.SEGMENT, nchunks)
        if (segment > 0) & (first >= nchunks):
            return
    start = first
    slot = first_slot(sequence, begin, seqlen, cu_seqlens_ptr is not None, S.CHUNK)
    first_head_slot = slot.to(tl.int64) * S.VALUE_HEADS + i_h
    if S.CUT:
        start -= chunks_to_forget(
            chunks_ptr + 2 * (first_head_slot + tl.cast(first, tl.int64) * S.VALUE_HEADS) + 1,
            2 * S.VALUE_HEADS,
            first,
        )

    # stage setup: where the program's tensors lie
    o_t, o_k = tl.arange(0, S.CHUNK).to(S.OFFSET), tl.arange(0, S.BLOCK_K).to(S.OFFSET)
    o_v = tl.arange(0, S.BLOCK_V).to(S.OFFSET)
    # true everywhere if V is a multiple of BLOCK_V, so that no mask is computed
    m_v = (o_v < S.VALUE_DIM - first_v) | (S.VALUE_DIM % S.BLOCK_V == 0)
    # indices of tiles of the state, and of v and out: if V_ROWS, (BLOCK_V, BLOCK_K) and
    # (BLOCK_V, CHUNK); otherwise their transposes
    if S.V_ROWS:
        state_v, state_k, tile_t, m_value = o_v[:, None], o_k[None, :], o_t[None, :], m_v[:, None]
    else:
        state_v, state_k, tile_t, m_value = o_v[None, :], o_k[:, None], o_t[:, None], m_v[None, :]
    v_tile = state_v * v_strides[3] + tile_t * v_strides[1]
    out_tile = state_v * out_strides[3] + tile_t * out_strides[1]
    q_ptr += ptr_offset((i_b, begin, i_k), q_strides[:3])
    k_ptr += ptr_offset((i_b, begin, i_k), k_strides[:3])
    v_ptr += ptr_offset((i_b, begin, i_h, first_v), v_strides)
    out_ptr += ptr_offset((i_b, begin, i_h, first_v), out_strides)

    # the state in blocks of K: zeros, or the initial state
    state = ()
    for _ in tl.static_range((S.KEY_DIM + S.BLOCK_K - 1) // S.BLOCK_K):
        state = state + (tl.zeros((state_v + state_k).shape, tl.float32),)
    state_index = (sequence, i_h, 0, first_v)
    if initial_states_ptr is not None and start == 0:
        initial_ptr = initial_states_ptr + ptr_offset(state_index, initial_states_strides)
        state = take_state(
            initial_ptr, state_k, state_v, initial_states_strides, m_value, S.KEY_DIM, S.BLOCK_K
        )

    keys, values = (k_ptr, k_strides), (v_ptr, v_strides[1], v_tile)
    # stage warm_up: the state that enters the segment
    if S.CUT:
        state = pass_chunks(
            state, start, first, length, first_head_slot, keys, values, m_value, None, factors, S
        )

    # stage chunk_output: the output, chunk after chunk
    output = (q_ptr, q_strides, out_ptr, out_strides[1], out_tile)
    state = pass_chunks(
        state, first, stop, length, first_head_slot, keys, values, m_value, output, factors, S
    )

    # stage setup.store
    if stop == nchunks:
        final_ptr = final_states_ptr + ptr_offset(state_index, final_states_strides)
        store_state(
            final_ptr, state, state_k, state_v, final_states_strides, m_value, S.KEY_DIM, S.BLOCK_K
        )


# --- the launches


def factor_shapes(
    inputs: GDNInputs, precision: Precision, config: GDNPortableConfig
) -> FactorShapes:
    """Shape and dtype of each tensor that the first launch writes for the second, in this order."""
    heads = inputs.v.shape[2]
    slots = inputs.slot_count(config.chunk)
    return [
        *operand_shapes(inputs, precision, config.chunk, config.block_k),
        ((slots, heads, 2, config.chunk), torch.float32),  # rows: factors of rows
        ((slots, heads, 2), torch.float32),  # chunks: decay and bound
    ]


def operand_shapes(
    inputs: GDNInputs, precision: Precision, chunk: int, block_k: int, key_tiles: int = 1
) -> FactorShapes:
    """Shape and dtype of those tensors that the second launch reads as operands: `key_tiles` of
    C x K, with K padded to whole blocks, and then one of C x C.
    """
    padded = triton.cdiv(inputs.q.shape[3], block_k) * block_k
    slots, heads = inputs.slot_count(chunk), inputs.v.shape[2]
    operand = operand_dtype(inputs.q.dtype, precision)
    widths = [padded] * key_tiles + [chunk]
    return [((slots, heads, chunk, width), operand) for width in widths]


def portable_launch(
    inputs: GDNInputs, precision: Precision, config: GDNPortableConfig, *, state_v_first: bool
) -> PreparedLaunch:
    """A call of both kernels, for all inputs of one signature.

    state_v_first: final states are (sequences, HV, V, K) in memory.
    """
    heads, value_dim = inputs.v.shape[2:]
    chunk = config.chunk
    shapes = factor_shapes(inputs, precision, config)
    final_strides = state_strides(*inputs.states_shape[1:], v_first=state_v_first)
    segments = inputs.sequences
    if config.segment:
        segments = inputs.slot_count(config.segment * chunk)
    operand = operand_dtype(inputs.q.dtype, precision)
    launchers = _launchers(inputs, config, operand, final_strides)
    programs = (
        inputs.slot_count(chunk) * heads,
        segments * heads * triton.cdiv(value_dim, config.block_v),
    )
    return two_launches(inputs, shapes, final_strides, launchers, programs, ("q", "k", "v"))


def _launchers(
    inputs: GDNInputs,
    config: GDNPortableConfig,
    operand: torch.dtype,
    final_strides: tuple[int, ...],
) -> tuple[Launcher, Launcher]:
    """The kernels of the first and of the second launch, with their arguments except tensors.

    operand: dtype of operands.  final_strides: strides of the final states.
    """
    out = torch.empty(inputs.v.shape, device="meta")  # for its strides
    tiled = inputs.q, inputs.k, inputs.v
    q_strides, k_strides, v_strides, out_strides = map(tile_strides, (*tiled, out))
    cu_strides = strides_of(inputs.cu_seqlens)
    sizes = inputs.length, inputs.sequences
    common = options_of(inputs, operand, config.chunk, tiled, final_strides)
    common |= dict(VALUES_PER_KEY=inputs.values_per_key, BLOCK_K=config.block_k)
    factors = Launcher(
        _gdn_factors_kernel,
        (
            (q_strides, k_strides, inputs.g.stride(), inputs.beta.stride(), cu_strides),
            *sizes,
            inputs.scale_or_default,
        ),
        common
        | options_of_factors(inputs, operand, config.factors_warps, config.factors_registers),
    )
    initial_strides = strides_of(inputs.initial_state)
    scan = Launcher(
        _gdn_scan_kernel,
        (
            (
                q_strides,
                k_strides,
                v_strides,
                initial_strides,
                cu_strides,
                out_strides,
                final_strides,
            ),
            *sizes,
        ),
        common
        | dict(
            VALUE_DIM=inputs.v.shape[3],
            SEGMENT=config.segment,
            CUT=config.segment > 0,
            BLOCK_V=config.block_v,
            V_ROWS=config.v_rows,
            SCAN_STAGES=config.scan_stages,
            num_warps=config.num_warps,
        ),
    )
    return factors, scan


def two_launches(
    inputs: GDNInputs,
    shapes: FactorShapes,
    final_strides: tuple[int, ...],
    launchers: tuple[Callable[..., None], Callable[..., None]],
    programs: tuple[int, int],
    names: tuple[str, ...],
) -> PreparedLaunch:
    """A call of two kernels, of GDN or of Kimi Delta Attention, for all inputs of one signature.

    shapes: shape and dtype of each tensor that the first one writes for the second
    final_strides: strides of the final states
    launchers, programs: the two kernels, and their numbers of programs
    names: the inputs that the second one takes before these tensors
    """
    index = inputs.q.get_device()
    states_shape = inputs.states_shape
    first, second = launchers

    def call(call_inputs: GDNInputs) -> GDNOutput:
        """Allocate the factors and the outputs, and launch both kernels."""
        with torch.cuda.device(index):  # no effect for -1, the CPU
            device = call_inputs.q.device
            cu_seqlens = call_inputs.cu_seqlens
            between = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
            first(
                programs[0],
                call_inputs.q,
                call_inputs.k,
                call_inputs.g,
                call_inputs.beta,
                cu_seqlens,
                *between,
            )
            out = torch.empty_like(call_inputs.v, memory_format=torch.contiguous_format)
            final_states = torch.empty_strided(
                states_shape, final_strides, dtype=torch.float32, device=device
            )
            second_inputs = (getattr(call_inputs, name) for name in names)
            second(
                programs[1],
                *second_inputs,
                *between,
                call_inputs.initial_state,
                cu_seqlens,
                out,
                final_states,
            )
        return GDNOutput(out, final_states)

    return call


def options_of(
    inputs: GDNInputs,
    operand: torch.dtype,
    chunk: int,
    tiled: tuple[torch.Tensor, ...],
    final_strides: tuple[int, ...],
) -> dict[str, object]:
    """Compile-time arguments of both launches.

    operand: dtype of operands.  chunk: positions per chunk
    tiled: the inputs that are read in tiles.  final_strides: strides of the final states
    """
    key_dim, value_dim = inputs.q.shape[3], inputs.v.shape[3]
    out = torch.empty(inputs.v.shape, device="meta")  # for its strides
    return dict(
        VALUE_HEADS=inputs.v.shape[2],
        KEY_DIM=key_dim,
        CHUNK=chunk,
        OPERAND=TL_DTYPE[operand],
        ALIGNED=inputs.cu_seqlens is None and inputs.length % chunk == 0,
        ALIGNMENT=_alignment(*tiled),
        OFFSET=offset_dtype(
            chunk,
            (*tiled, out),
            (key_dim, value_dim),
            strides_of(inputs.initial_state),
            final_strides,
        ),
    )


def options_of_factors(
    inputs: GDNInputs, operand: torch.dtype, warps: int, registers: int
) -> dict[str, object]:
    """Compile-time arguments and launch options of the first launch only.

    operand: dtype of operands.  registers: most registers per thread; 0: no limit
    """
    normalised = bool(inputs.use_qk_l2norm)
    options: dict[str, object] = dict(
        L2NORM=normalised,
        MERGE=tl.float16 if normalised and operand != torch.float32 else tl.float32,
        MERGE_PRECISION=inverse_products(operand),
        num_warps=warps,
    )
    if registers:
        options["maxnreg"] = registers
    return options


def _alignment(*tensors: torch.Tensor) -> int:
    """Alignment in bytes, up to 16, of the rows of these tensors (B, T, heads, columns).

    Triton itself detects it only for strides that are multiples of 16 elements.
    """
    alignment = 16
    for tensor in tensors:
        rows = (stride * tensor.element_size() for stride in tensor.stride()[:3])
        alignment = gcd(alignment, tensor.data_ptr(), *rows)
    return alignment
