"""Kimi Delta Attention in six launches, one per stage of the algorithm: the baseline.

The stages are gate_cumsum, decayed_scores, solve_tril, recompute_w_u, chunk_state and chunk_output.
The norm of q and k, solve_tril and chunk_state are the kernels of unfused GDN.  The norm takes two
more launches, and the table of the chunks of packed sequences one.

G is the sum of g from a chunk's start, as a binary log: a channel decays by 2^(G[i] - G[j]) from
position j to position i.

Dtypes are those of unfused GDN with exact intermediates (`../gdn/config.py`), with two differences:
operands of the scores keep at least 11 significant bits (`score_products`), and relaxed
intermediates change the operands of fp32 inputs only, to bf16.

Oracle: `reference.py`.  Source: Kimi Team 2025 (arXiv:2510.26692); docs/kda-mathematics.md.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssdprof.kernels.chunks import Chunks, own_chunk
from ssdprof.kernels.functions import DOT_PRECISION, LOG2_E, decay_exp2, in_units, ptr_offset
from ssdprof.kernels.gdn import config
from ssdprof.kernels.gdn.config import block, operand_dtype, options
from ssdprof.kernels.gdn.unfused.pipeline import normalised, plan_stages, refuse_unsupported
from ssdprof.kernels.gdn.unfused.stages import (
    FORGOTTEN,
    chunk_state,
    chunk_tile,
    keys_and_values,
    load_beta,
    load_tokens,
    output_of_chunks,
    solve_tril,
    token_tile,
)
from ssdprof.kernels.kda.inputs import GDNOutput, KDAInputs
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, register
from ssdprof.kernels.tensors import strides_unit

# stages of functions (`stalls/attribute.py`); others belong to the stage that calls them
STAGES = {
    "cumulative_log_decays": "gate_cumsum",
    "_kda_gate_cumsum_kernel": "gate_cumsum",
    "_kda_decayed_scores_kernel": "decayed_scores",
    "_kda_recompute_w_u_kernel": "recompute_w_u",
    "_kda_chunk_output_kernel": "chunk_output",
}


def stage_options(inputs: KDAInputs, precision: Precision) -> dict[str, dict[str, int]]:
    """Stage -> its block sizes, whose names are in capitals, and its launch options.  solve_tril is
    not among them: it has those of GDN.

    fp32 operands have small blocks, because a matrix product holds each of them as two tf32 numbers
    in registers.
    """
    key_dim, value_dim = inputs.q.shape[3], inputs.v.shape[3]
    if operand_dtype(inputs.v.dtype, precision) == torch.float32:
        block_k, block_v = block(key_dim, 32), block(value_dim, 32)
        state = options(BLOCK_V=16, num_warps=8, num_stages=1)
        output = options(BLOCK_K=block_k, BLOCK_V=block_v, num_warps=8)
    else:
        block_k, block_v = block(key_dim, 64), block(value_dim, 64)
        state = options(BLOCK_V=block(value_dim, 32), num_stages=3)
        if key_dim > 128:
            state = options(BLOCK_V=block(value_dim, 32), num_warps=8)
        output = options(BLOCK_K=block_k, BLOCK_V=block(value_dim, 128))
    return {
        "gate_cumsum": dict(BLOCK_K=block(key_dim, 32), num_warps=4),
        "decayed_scores": options(BLOCK_K=block_k, num_warps=8, num_stages=1),
        "recompute_w_u": options(BLOCK_K=block_k, BLOCK_V=block_v),
        "chunk_state": state,
        "chunk_output": output,
    }


# --- scores with a decay for every channel.  Exponents are never positive.
#
# The anchor of a block of 2 h positions is the last position of its first half.  A pair with its
# row i in the second half and its column j in the first half has the decay 2^(G_i - G_anchor)
# 2^(G_anchor - G_j), and both exponents are at most 0 for any gate.  The pairs inside a half are
# pairs of smaller blocks: h = C / 2, ..., 2, 1 cover all pairs except the diagonal, whose decay is
# 1.  No choice of a block or an anchor depends on gates, because later gates would then change the
# bits of earlier outputs.


def score_products(operand: torch.dtype, *, is_normalised: bool) -> dict[str, Any]:
    """The dtype and the input precision of the scores' operands, as the compile-time arguments
    SCORES and PRECISION.

    Operands keep at least 11 significant bits, more than bfloat16, because the inverse amplifies
    errors of the system.  fp16 is twice as fast as tf32, but its range is large enough only for
    fp16 inputs and for normalised q and k.

    operand: dtype of the operands of the other products.
    is_normalised: whether no number of q or k is above 1.
    """
    if operand == torch.float32:
        return dict(SCORES=tl.float32, PRECISION="tf32x3")
    return dict(
        SCORES=tl.float16 if is_normalised or operand == torch.float16 else tl.float32,
        PRECISION="tf32",
    )


@triton.jit
def cumulative_log_decays(g):
    """G (C, n) in fp32: the cumulative sums over positions of g, each g first converted to a binary
    log and clamped to [FORGOTTEN, 0].  NaN stays NaN.

    g (C, n): natural logs of decays, in any dtype.
    The sums are computed in fp64 and rounded once, because they are subtracted from each other.
    """
    g = tl.clamp(g.to(tl.float32) * LOG2_E, FORGOTTEN, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.cumsum(g.to(tl.float64), axis=0).to(tl.float32)


@triton.jit
def half_decays(G, half):
    """The decay between each position and the anchor of its block of 2 * half positions, (C, n):
    since the anchor in the second half of the block, to the anchor in the first half.

    G (C, n): of `cumulative_log_decays`.
    """
    i = tl.broadcast_to(tl.arange(0, G.shape[0])[:, None], G.shape)
    return decay_exp2(-tl.abs(G - tl.gather(G, (i & ~(2 * half - 1)) + (half - 1), axis=0)))


@triton.jit
def add_scores(scores, q, k, G, PRECISION: tl.constexpr):
    """`scores` (C, C) with the part of n channels added: scores of q with k on and below the
    diagonal, and scores of k with k, transposed, above it.

    q, k: (C, n), in the dtype of operands.  G (C, n): of `cumulative_log_decays`.

    For i > j, one product computes both scores of a pair: q_i with k_j in row i and column j, and
    k_j with k_i in row j and column i.  The loop is not unrolled, because masks and factors of all
    iterations would fill the registers.
    """
    o_i = tl.arange(0, G.shape[0])
    i, j = o_i[:, None], o_i[None, :]
    scores += tl.where(i == j, tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1)[:, None], 0.0)
    half = G.shape[0] // 2
    while half > 0:
        decays = half_decays(G, half)
        rows = (tl.where((i & half) == 0, k, q).to(tl.float32) * decays).to(k.dtype)
        columns = tl.trans((k.to(tl.float32) * decays).to(k.dtype))
        product = tl.dot(rows, columns, input_precision=PRECISION)
        # only the pairs whose i and j are in different halves of one block
        scores += tl.where((i ^ j) // half == 1, product, 0.0)
        half = half // 2
    return scores


@triton.jit
def queries_with_keys(scores):
    """P (C, C), the lower triangle of the result of `add_scores` with its diagonal."""
    o_i = tl.arange(0, scores.shape[0])
    return tl.where(o_i[:, None] >= o_i[None, :], scores, 0.0)


@triton.jit
def keys_with_keys(scores):
    """L without beta, (C, C) and strictly lower triangular: the upper triangle of the result of
    `add_scores`, transposed.
    """
    o_i = tl.arange(0, scores.shape[0])
    return tl.trans(tl.where(o_i[:, None] < o_i[None, :], scores, 0.0))


# --- the stages.  In kernels, the prefix of a name says what it is: i_ an index, o_ a vector of
# indices, m_ a mask, p_ a tile of pointers, b_ a tile in registers.


@triton.jit
def _kda_gate_cumsum_kernel(tensors, strides, length, heads, nchunks, S: tl.constexpr):
    """One block of K of one chunk of one head of `gate_cumsum`."""
    g_ptr, spans_ptr, G_ptr = tensors
    g_strides, G_strides = strides
    k_blocks = tl.cdiv(S.KEY_DIM, S.BLOCK_K)
    i_h, i_b, i_c, start, count = own_chunk(
        tl.program_id(0) // k_blocks, spans_ptr, length, heads, nchunks, S.CHUNK_SIZE
    )
    if count <= 0:
        return
    o_k = (tl.program_id(0) % k_blocks) * S.BLOCK_K + tl.arange(0, S.BLOCK_K)
    o_i = tl.arange(0, S.CHUNK_SIZE)
    m_k = o_k < S.KEY_DIM
    b_g = tl.load(
        g_ptr
        + ptr_offset((i_b, start + o_i[:, None], i_h, o_k[None, :]), in_units(g_strides, S.UNIT)),
        mask=(o_i < count)[:, None] & m_k[None, :],
        other=0.0,
    )  # [CHUNK_SIZE, BLOCK_K]
    index = (i_b, i_c, i_h, o_i[:, None], o_k[None, :])
    tl.store(G_ptr + ptr_offset(index, G_strides), cumulative_log_decays(b_g), mask=m_k[None, :])


def gate_cumsum(inputs: KDAInputs, chunks: Chunks, precision: Precision) -> Tensor:
    """Stage 1: the cumulative log decay.

        G[i, k] = sum_{j <= i} clamp(g[j, k] * log2(e), FORGOTTEN, 0)

    Positions past the end of a sequence count as g = 0.

    In:   g (B, T, HV, K), natural logs
    Out:  G (B, NT, HV, C, K) fp32, binary logs
    Grid: (B * NT * HV * blocks of K)
    """
    heads, key_dim = inputs.g.shape[2:]
    options_of_stage = stage_options(inputs, precision)["gate_cumsum"]
    G = chunks.empty(heads, chunks.size, key_dim)
    chunks.launch(
        _kda_gate_cumsum_kernel,
        heads * triton.cdiv(key_dim, options_of_stage["BLOCK_K"]),
        heads,
        (inputs.g,),
        (G,),
        KEY_DIM=key_dim,
        UNIT=strides_unit(inputs.g),
        **options_of_stage,
    )
    return G


@triton.jit
def _kda_decayed_scores_kernel(
    tensors, strides, length, heads, nchunks, values_per_key, S: tl.constexpr
):
    """One chunk of one head of `decayed_scores`."""
    q_ptr, k_ptr, beta_ptr, G_ptr, spans_ptr, L_ptr, P_ptr = tensors
    q_strides, k_strides, beta_strides, G_strides, L_strides, P_strides = strides
    i_h, i_b, i_c, start, count = own_chunk(
        tl.program_id(0), spans_ptr, length, heads, nchunks, S.CHUNK_SIZE
    )
    if count <= 0:
        return
    o_i = tl.arange(0, S.CHUNK_SIZE)
    m_i = o_i < count
    chunk, key_tokens = (i_b, i_c, i_h), (i_b, start, i_h // values_per_key)
    q_strides, k_strides = in_units(q_strides, S.UNIT), in_units(k_strides, S.UNIT)
    b_scores = tl.zeros((S.CHUNK_SIZE, S.CHUNK_SIZE), tl.float32)  # of `add_scores`
    for first_k in range(0, S.KEY_DIM, S.BLOCK_K):
        o_k = first_k + tl.arange(0, S.BLOCK_K)
        m_k = o_k < S.KEY_DIM
        m_ik = m_i[:, None] & m_k[None, :]
        b_q = load_tokens(q_ptr, q_strides, key_tokens, o_i, o_k, m_ik, S.SCORES)
        b_k = load_tokens(k_ptr, k_strides, key_tokens, o_i, o_k, m_ik, S.SCORES)
        p_G = chunk_tile(G_ptr, G_strides, chunk, o_i, o_k)
        b_G = tl.load(p_G, mask=m_k[None, :], other=0.0)  # [CHUNK_SIZE, BLOCK_K]
        b_scores = add_scores(b_scores, b_q, b_k, b_G, S.PRECISION)
    b_beta = load_beta(beta_ptr, beta_strides, (i_b, start, i_h), o_i, m_i)
    b_P = queries_with_keys(b_scores).to(P_ptr.dtype.element_ty)
    tl.store(chunk_tile(P_ptr, P_strides, chunk, o_i, o_i), b_P)
    tl.store(
        chunk_tile(L_ptr, L_strides, chunk, o_i, o_i), keys_with_keys(b_scores) * b_beta[:, None]
    )


def decayed_scores(
    inputs: KDAInputs, G: Tensor, chunks: Chunks, precision: Precision, *, is_normalised: bool
) -> tuple[Tensor, Tensor]:
    """Stage 2: the triangular system of each chunk, and the scores, which are the weights of the
    chunk's corrected values in its output.

        L[i, j] = beta[i] * sum_k k[i, k] * k[j, k] * 2^(G[i, k] - G[j, k])       for j < i, else 0
        P[i, j] =           sum_k q[i, k] * k[j, k] * 2^(G[i, k] - G[j, k])       for j <= i, else 0

    is_normalised: whether no number of q or k is above 1.

    In:   q, k (B, T, H, K) | beta (B, T, HV) | G (B, NT, HV, C, K) fp32, binary logs
    Out:  L (B, NT, HV, C, C) fp32 | P (B, NT, HV, C, C) in the operands' dtype
          Both are zero in rows and columns past the end of a sequence.
    Grid: (B * NT * HV).  Neighbouring programs have the value heads of one key head, because these
          share q and k.
    """
    operand = operand_dtype(inputs.v.dtype, precision)
    heads, key_dim = inputs.g.shape[2:]
    size = chunks.size
    L = chunks.empty(heads, size, size)
    P = chunks.empty(heads, size, size, dtype=operand)
    chunks.launch(
        _kda_decayed_scores_kernel,
        heads,  # programs for each chunk
        heads,
        (inputs.q, inputs.k, inputs.beta, G),
        (L, P),
        inputs.values_per_key,
        KEY_DIM=key_dim,
        UNIT=strides_unit(inputs.q, inputs.k),
        **score_products(operand, is_normalised=is_normalised),
        **stage_options(inputs, precision)["decayed_scores"],
    )
    return L, P


@triton.jit
def _kda_recompute_w_u_kernel(
    tensors, strides, length, heads, nchunks, values_per_key, S: tl.constexpr
):
    """One chunk of one head of `recompute_w_u`."""
    A_ptr, k_ptr, v_ptr, beta_ptr, G_ptr, spans_ptr, w_ptr, u_ptr, k_end_ptr = tensors
    (
        A_strides, k_strides, v_strides, beta_strides, G_strides, w_strides, u_strides,
        k_end_strides,
    ) = strides  # fmt: skip
    k_strides, v_strides = in_units(k_strides, S.UNIT), in_units(v_strides, S.UNIT)
    i_h, i_b, i_c, start, count = own_chunk(
        tl.program_id(0), spans_ptr, length, heads, nchunks, S.CHUNK_SIZE
    )
    if count <= 0:
        return
    o_i = tl.arange(0, S.CHUNK_SIZE)
    m_i = o_i < count
    chunk, tokens = (i_b, i_c, i_h), (i_b, start, i_h)
    b_A = tl.load(chunk_tile(A_ptr, A_strides, chunk, o_i, o_i)).to(tl.float32)
    b_A = (b_A * load_beta(beta_ptr, beta_strides, tokens, o_i, m_i)[None, :]).to(S.OPERAND)

    # --- u, a block of V at a time
    for first_v in range(0, S.VALUE_DIM, S.BLOCK_V):
        o_v = first_v + tl.arange(0, S.BLOCK_V)
        m_v = o_v < S.VALUE_DIM
        m_iv = m_i[:, None] & m_v[None, :]
        b_v = load_tokens(v_ptr, v_strides, tokens, o_i, o_v, m_iv, S.OPERAND)
        b_u = tl.trans(tl.dot(b_A, b_v, input_precision=DOT_PRECISION)).to(S.OPERAND)
        tl.store(chunk_tile(u_ptr, u_strides, chunk, o_v, o_i), b_u, mask=m_v[:, None])

    # --- w, and the keys decayed to the chunk's end, a block of K at a time
    key_tokens = (i_b, start, i_h // values_per_key)
    for first_k in range(0, S.KEY_DIM, S.BLOCK_K):
        o_k = first_k + tl.arange(0, S.BLOCK_K)
        m_k = o_k < S.KEY_DIM
        m_ik = m_i[:, None] & m_k[None, :]
        b_k = load_tokens(k_ptr, k_strides, key_tokens, o_i, o_k, m_ik, tl.float32)
        # G of this chunk and head, and its last row
        chunk_G_ptr = G_ptr + ptr_offset(chunk, G_strides[:3])
        b_G = tl.load(
            chunk_G_ptr + ptr_offset((o_i[:, None], o_k[None, :]), G_strides[3:]),
            mask=m_k[None, :],
            other=0.0,
        )
        b_G_end = tl.load(
            chunk_G_ptr + ptr_offset((S.CHUNK_SIZE - 1, o_k), G_strides[3:]), mask=m_k, other=0.0
        )
        b_w = tl.dot(b_A, (b_k * decay_exp2(b_G)).to(S.OPERAND), input_precision=DOT_PRECISION)
        p_w = chunk_tile(w_ptr, w_strides, chunk, o_i, o_k)
        tl.store(p_w, b_w.to(S.OPERAND), mask=m_k[None, :])
        b_k_end = (b_k * decay_exp2(b_G_end[None, :] - b_G)).to(S.OPERAND)
        p_k_end = chunk_tile(k_end_ptr, k_end_strides, chunk, o_i, o_k)
        tl.store(p_k_end, b_k_end, mask=m_k[None, :])


def recompute_w_u(
    inputs: KDAInputs, A: Tensor, G: Tensor, chunks: Chunks, precision: Precision
) -> tuple[Tensor, Tensor, Tensor]:
    """Stage 4: keys and values of each chunk after the inverse, and keys decayed to its end.

        u[v, i]     = sum_j A[i, j] * beta[j] * v[j, v]
        w[i, k]     = sum_j A[i, j] * beta[j] * 2^G[j, k] * k[j, k]
        k_end[i, k] = 2^(G[C - 1, k] - G[i, k]) * k[i, k]

    In:   A (B, NT, HV, C, C) in the operands' dtype | k (B, T, H, K) | v (B, T, HV, V)
          beta (B, T, HV) | G (B, NT, HV, C, K) fp32, binary logs
    Out:  w, k_end (B, NT, HV, C, K) | u (B, NT, HV, V, C), all in the operands' dtype; positions
          past the end of a sequence are zero
    Grid: (B * NT * HV)
    """
    w, u, k_end = keys_and_values(
        _kda_recompute_w_u_kernel,
        inputs,
        A,
        G,
        chunks,
        precision,
        stage_options(inputs, precision)["recompute_w_u"],
        key_tensors=2,
    )
    return w, u, k_end


@triton.jit
def _kda_chunk_output_kernel(
    tensors, strides, length, heads, nchunks, values_per_key, scale, S: tl.constexpr
):
    """One block of V of one chunk of one head of `chunk_output`."""
    q_ptr, G_ptr, P_ptr, prev_states_ptr, v_new_ptr, spans_ptr, out_ptr = tensors
    q_strides, G_strides, P_strides, prev_states_strides, v_new_strides, out_strides = strides
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

    # --- b_out [BLOCK_V, CHUNK_SIZE]: the part of the state that enters the chunk
    q_strides, out_strides = in_units(q_strides, S.UNIT), in_units(out_strides, S.UNIT)
    prev_states_strides = in_units(prev_states_strides, S.UNIT)
    b_out = tl.zeros((S.BLOCK_V, S.CHUNK_SIZE), dtype=tl.float32)
    for first_k in range(0, S.KEY_DIM, S.BLOCK_K):
        o_k = first_k + tl.arange(0, S.BLOCK_K)
        m_k = o_k < S.KEY_DIM
        m_ik = m_i[:, None] & m_k[None, :]
        b_q = load_tokens(q_ptr, q_strides, key_tokens, o_i, o_k, m_ik, tl.float32)
        p_G = chunk_tile(G_ptr, G_strides, chunk, o_i, o_k)
        b_G = tl.load(p_G, mask=m_k[None, :], other=0.0)  # [CHUNK_SIZE, BLOCK_K]
        p_state = chunk_tile(prev_states_ptr, prev_states_strides, chunk, o_v, o_k)
        # [BLOCK_V, BLOCK_K]
        b_state = tl.load(p_state, mask=m_v[:, None] & m_k[None, :], other=0.0)
        b_q = (b_q * decay_exp2(b_G)).to(S.OPERAND)
        b_out = tl.dot(b_state, tl.trans(b_q), b_out, input_precision=DOT_PRECISION)

    # --- the part of the chunk's corrected values
    b_P = tl.load(chunk_tile(P_ptr, P_strides, chunk, o_i, o_i))
    p_v_new = chunk_tile(v_new_ptr, v_new_strides, chunk, o_v, o_i)
    b_v_new = tl.load(p_v_new, mask=m_v[:, None], other=0.0)  # [BLOCK_V, CHUNK_SIZE]
    b_out = tl.dot(b_v_new, tl.trans(b_P), b_out, input_precision=DOT_PRECISION) * scale
    tl.store(
        token_tile(out_ptr, out_strides, (i_b, start, i_h), o_i, o_v),
        tl.trans(b_out).to(out_ptr.dtype.element_ty),
        mask=m_i[:, None] & m_v[None, :],
    )


def chunk_output(
    inputs: KDAInputs,
    prev_states: Tensor,
    v_new: Tensor,
    P: Tensor,
    G: Tensor,
    chunks: Chunks,
    precision: Precision,
) -> Tensor:
    """Stage 6: the output, from the state that enters the chunk and from the chunk's corrected
    values.

        out[i, v] = scale * (sum_k 2^G[i, k] * q[i, k] * S[v, k]
                             + sum_{j <= i} P[i, j] * v_new[v, j])

    In:   q (B, T, H, K) | prev_states S (B, NT, HV, V, K) | v_new (B, NT, HV, V, C)
          P (B, NT, HV, C, C) | G (B, NT, HV, C, K) fp32, binary logs
    Out:  out (B, T, HV, V) in v's dtype
    Grid: (B * NT * HV * blocks of V)
    """
    return output_of_chunks(
        _kda_chunk_output_kernel,
        inputs,
        (inputs.q, G, P, prev_states, v_new),
        (inputs.q, prev_states),
        chunks,
        precision,
        stage_options(inputs, precision)["chunk_output"],
    )


# --- the implementation


def kda_unfused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm: bool = False,
    chunk_size: int = 64,
    cu_seqlens: Tensor | None = None,
    precision: Precision = Precision(),  # noqa: B008
) -> GDNOutput:
    """Kimi Delta Attention in six launches, forward only.  Arguments are those of `KDAInputs`, and
    the result is that of `run`.

    Raises ValueError for inputs that do not fit together, and UnsupportedError for unsupported
    ones.
    """
    inputs = KDAInputs(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=initial_state,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
        chunk_size=chunk_size,
        cu_seqlens=cu_seqlens,
    )
    return run(inputs, precision)


def run(inputs: KDAInputs, precision: Precision = Precision()) -> GDNOutput:  # noqa: B008
    """The output (B, T, HV, V) in v's dtype, and the final states (sequences, HV, K, V) in fp32.
    Raises the errors of `refuse_unsupported`.
    """
    refuse_unsupported(inputs)
    with torch.cuda.device(inputs.q.get_device()):  # no effect for -1, the CPU
        return six_stages(inputs, precision)


def six_stages(inputs: KDAInputs, precision: Precision) -> GDNOutput:
    """`run` without checks, on the current device."""
    is_normalised = bool(inputs.use_qk_l2norm)
    chunks = Chunks.of(inputs)
    inputs = normalised(inputs, precision)
    state_options = stage_options(inputs, precision)["chunk_state"]
    G = gate_cumsum(inputs, chunks, precision)
    L, P = decayed_scores(inputs, G, chunks, precision, is_normalised=is_normalised)
    A = solve_tril(inputs, L, chunks, precision)
    del L  # w and u can reuse its memory
    w, u, k_end = recompute_w_u(inputs, A, G, chunks, precision)
    del A
    prev_states, v_new, final_states = chunk_state(
        inputs, k_end, w, u, G, chunks, precision, state_options
    )
    del w, u, k_end
    out = chunk_output(inputs, prev_states, v_new, P, G, chunks, precision)
    return GDNOutput(out, final_states)


def plan(inputs: KDAInputs, precision: Precision = Precision()) -> Plan:  # noqa: B008
    """The launches, configurations and workspace of a call.  Allocates and launches nothing."""
    refuse_unsupported(inputs)
    chosen = stage_options(inputs, precision) | {"solve_tril": config.SOLVE_TRIL}
    return plan_stages(inputs, precision, chosen)


register(Implementation(operator="kda", name="unfused", run=run, plan=plan))
