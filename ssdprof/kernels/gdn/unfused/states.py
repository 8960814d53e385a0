# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Stages 5 and 6 of unfused GDN: the states, and the output.

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
from ssdprof.kernels.functions import DOT_PRECISION, TL_DTYPE, decay_exp2, in_units, ptr_offset
from ssdprof.kernels.gdn.config import ChunkOutputConfig, GDNChunkStateConfig, intermediate, operand_dtype
from ssdprof.kernels.launch import Described, described, launch
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.tensors import strides_of_each, strides_unit

STAGES = {"_load": "caller", "_gdn_chunk_state_kernel": "chunk_state", "_gdn_chunk_output_kernel": "chunk_output"}


@described
def _chunk_state_metadata(tensors: Any, _S: Any) -> Described:
    k, w, u, *_, prev_states, v_new, _ = tensors
    batch, nchunks, heads, _, key_dim = w.shape
    flops = 4 * u.numel() * key_dim
    return f"b{batch} c{nchunks} hv{heads} k{key_dim} v{u.shape[3]}", flops, (w, u, k, prev_states, v_new)


@triton.jit
def _load(pointers, mask, WHOLE: tl.constexpr):
    """Load, with zeros where the mask is false.  WHOLE: the mask is true everywhere."""
    if WHOLE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit(launch_metadata=_chunk_state_metadata)
def _gdn_chunk_state_kernel(tensors, strides, length, heads, nchunks, values_per_key, S: tl.constexpr):
    (
        k_ptr, w_ptr, u_ptr, g_cumsum_log2_ptr, initial_state_ptr, spans_ptr, bounds_ptr, prev_states_ptr, v_new_ptr,
        final_states_ptr,
    ) = tensors  # fmt: skip
    (
        k_strides, w_strides, u_strides, g_cumsum_log2_strides, initial_state_strides, prev_states_strides,
        v_new_strides, final_states_strides,
    ) = strides  # fmt: skip
    # --- this program's rows of a state
    V_BLOCKS: tl.constexpr = (S.VALUE_DIM + S.BLOCK_V - 1) // S.BLOCK_V
    ALL_K: tl.constexpr = S.KEY_DIM == S.BLOCK_K
    ALL_V: tl.constexpr = S.VALUE_DIM % S.BLOCK_V == 0
    i_sh = tl.program_id(0) // V_BLOCKS
    i_s, i_h = i_sh // heads, i_sh % heads
    o_v = (tl.program_id(0) % V_BLOCKS) * S.BLOCK_V + tl.arange(0, S.BLOCK_V)
    o_k, o_i = tl.arange(0, S.BLOCK_K), tl.arange(0, S.CHUNK_SIZE)
    m_v, m_k = o_v < S.VALUE_DIM, o_k < S.KEY_DIM
    m_vk = m_v[:, None] & m_k[None, :]
    if bounds_ptr is None:
        i_b, first, after = i_s, 0, nchunks
        begin, end = tl.zeros((), tl.int64), tl.cast(length, tl.int64)
    else:
        i_b, first, after = 0, tl.load(bounds_ptr + i_s).to(tl.int32), tl.load(bounds_ptr + i_s + 1).to(tl.int32)
        begin = tl.load(spans_ptr + 2 * first, mask=first < after, other=0)
        end = tl.load(spans_ptr + 2 * after - 1, mask=first < after, other=0)

    # --- addresses of the first chunk; those of later chunks are multiples of a stride further
    k_strides, w_strides = in_units(k_strides, S.UNIT), in_units(w_strides, S.UNIT)
    prev_states_strides = in_units(prev_states_strides, S.UNIT)
    p_w = w_ptr + ptr_offset((i_b, first, i_h, o_i[:, None], o_k[None, :]), w_strides)
    p_u = u_ptr + ptr_offset((i_b, first, i_h, o_v[:, None], o_i[None, :]), u_strides)
    p_k = k_ptr + ptr_offset((i_b, begin + o_i[:, None], i_h // values_per_key, o_k[None, :]), k_strides)
    p_g = g_cumsum_log2_ptr + ptr_offset((i_b, first, i_h), g_cumsum_log2_strides[:3])
    p_prev = prev_states_ptr + ptr_offset((i_b, first, i_h, o_v[:, None], o_k[None, :]), prev_states_strides)
    p_new = v_new_ptr + ptr_offset((i_b, first, i_h, o_v[:, None], o_i[None, :]), v_new_strides)

    # --- loop over chunks
    state = tl.zeros((S.BLOCK_V, S.BLOCK_K), dtype=tl.float32)
    if initial_state_ptr is not None:
        initial_offset = ptr_offset((i_s, i_h, o_k[None, :], o_v[:, None]), initial_state_strides)
        state += tl.load(initial_state_ptr + initial_offset, mask=m_vk, other=0.0).to(tl.float32)
    for turn in range(after - first):
        step = tl.cast(turn, tl.int64)
        state_operand = state.to(S.OPERAND)
        if ALL_K and ALL_V:
            tl.store(p_prev + step * prev_states_strides[1], state_operand)
        else:
            tl.store(p_prev + step * prev_states_strides[1], state_operand, mask=m_vk)
        b_w = _load(p_w + step * w_strides[1], m_k[None, :], ALL_K)  # [CHUNK_SIZE, BLOCK_K]
        b_u = _load(p_u + step * u_strides[1], m_v[:, None], ALL_V)  # [BLOCK_V, CHUNK_SIZE]
        m_i = o_i < end - begin - step * S.CHUNK_SIZE
        b_k = tl.load(
            p_k + step * S.CHUNK_SIZE * k_strides[1], mask=m_i[:, None] & m_k[None, :], other=0.0
        ).to(S.OPERAND)  # [CHUNK_SIZE, BLOCK_K]  # fmt: skip
        p_g_chunk = p_g + step * g_cumsum_log2_strides[1]
        b_g = tl.load(p_g_chunk + o_i)
        g_end = tl.load(p_g_chunk + (S.CHUNK_SIZE - 1))

        v_new = b_u.to(tl.float32) - tl.dot(state_operand, tl.trans(b_w), input_precision=DOT_PRECISION)
        if ALL_V:
            tl.store(p_new + step * v_new_strides[1], v_new.to(S.OPERAND))
        else:
            tl.store(p_new + step * v_new_strides[1], v_new.to(S.OPERAND), mask=m_v[:, None])
        to_end = decay_exp2(g_end - b_g).to(S.INTERMEDIATE)
        decayed = (v_new.to(S.INTERMEDIATE) * to_end[None, :]).to(S.OPERAND)
        state = tl.dot(decayed, b_k, state * decay_exp2(g_end), input_precision=DOT_PRECISION)
        state = state.to(S.STATE).to(tl.float32)
    final_offset = ptr_offset((i_s, i_h, o_k[None, :], o_v[:, None]), final_states_strides)
    tl.store(final_states_ptr + final_offset, state, mask=m_vk)


def chunk_state(
    k: torch.Tensor, w: torch.Tensor, u: torch.Tensor, g_cumsum_log2: torch.Tensor, chunks: Chunks, *,
    inputs_dtype: torch.dtype, precision: Precision, initial_state: torch.Tensor | None = None,
    config: GDNChunkStateConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """GDN stage 5 of 6: the state that enters each chunk, the values that the chunk writes, and the final state.

        v_new[v, i]  = u[v, i] - sum_k S[v, k] * w[i, k]
        S'[v, k]     = exp(g_end) * S[v, k] + sum_i exp(g_end - g_cumsum[i]) * v_new[v, i] * k[i, k]

    S is the transposed state that enters the chunk, stored as prev_states, and g_end = g_cumsum[C - 1].  This is the
    serial stage: a program keeps a block of rows of S in fp32 registers from chunk to chunk.  Rows of S are the result
    of one product and the first operand of the other, which is read from registers.

    In:   k (B, T, H, K) | w (B, NT, HV, C, K) | u (B, NT, HV, V, C) | g_cumsum_log2 (B, NT, HV, C) fp32
          initial_state (sequences, HV, K, V) or None
    Out:  prev_states (B, NT, HV, V, K) | v_new (B, NT, HV, V, C), both in the operands' dtype
          final_states (sequences, HV, K, V) fp32
    Grid: (sequences * HV * v-blocks).  One program owns a block of one head's state and loops over its chunks.
    """
    batch, length, key_heads, key_dim = k.shape
    heads, value_dim = u.shape[2:4]
    operand = operand_dtype(inputs_dtype, precision)
    config = config or GDNChunkStateConfig.choose(
        key_dim=key_dim, value_dim=value_dim, operand=operand, states=chunks.sequences * heads
    )
    prev_states = torch.empty(batch, chunks.count, heads, value_dim, key_dim, device=k.device, dtype=operand)
    v_new = torch.empty_like(u)
    final_states = torch.empty(chunks.sequences, heads, key_dim, value_dim, device=k.device, dtype=torch.float32)
    launch(
        _gdn_chunk_state_kernel,
        chunks.sequences * heads * triton.cdiv(value_dim, config.block_v),
        (k, w, u, g_cumsum_log2, initial_state, chunks.spans, chunks.bounds, prev_states, v_new, final_states),
        (
            strides_of_each(k, w, u, g_cumsum_log2, initial_state, prev_states, v_new, final_states),
            length, heads, chunks.count, heads // key_heads,
        ),
        CHUNK_SIZE=chunks.size, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        OPERAND=TL_DTYPE[operand], INTERMEDIATE=intermediate(inputs_dtype, precision),
        STATE=TL_DTYPE[precision.state_dtype],
        UNIT=strides_unit(k, w, prev_states), BLOCK_K=max(16, triton.next_power_of_2(key_dim)), BLOCK_V=config.block_v,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return prev_states, v_new, final_states


@described
def _chunk_output_metadata(tensors: Any, _S: Any) -> Described:
    q, k, prev_states, v_new, *_, out = tensors
    batch, length, heads, value_dim = out.shape
    flops = 2 * v_new.numel() * (q.shape[3] + v_new.shape[4] // 2)
    return f"b{batch} t{length} hv{heads} k{q.shape[3]} v{value_dim}", flops, (q, k, prev_states, v_new, out)


@triton.jit(launch_metadata=_chunk_output_metadata)
def _gdn_chunk_output_kernel(tensors, strides, length, heads, nchunks, values_per_key, scale, S: tl.constexpr):
    q_ptr, k_ptr, prev_states_ptr, v_new_ptr, g_cumsum_log2_ptr, spans_ptr, out_ptr = tensors
    q_strides, k_strides, prev_states_strides, v_new_strides, g_cumsum_log2_strides, out_strides = strides
    # --- this program's values; heads of one chunk are in neighbouring programs, because they share q and k
    V_BLOCKS: tl.constexpr = (S.VALUE_DIM + S.BLOCK_V - 1) // S.BLOCK_V
    i_bch = tl.program_id(0) // V_BLOCKS
    i_h, i_bc = i_bch % heads, i_bch // heads
    i_b, i_c = i_bc // nchunks, i_bc % nchunks
    start, count = chunk_span(spans_ptr, i_c, length, S.CHUNK_SIZE)
    if count <= 0:
        return
    i_kh = i_h // values_per_key
    o_v = (tl.program_id(0) % V_BLOCKS) * S.BLOCK_V + tl.arange(0, S.BLOCK_V)
    o_i = tl.arange(0, S.CHUNK_SIZE)
    m_v, m_i = o_v < S.VALUE_DIM, o_i < count

    # --- products with q
    q_strides, k_strides = in_units(q_strides, S.UNIT), in_units(k_strides, S.UNIT)
    prev_states_strides, out_strides = in_units(prev_states_strides, S.UNIT), in_units(out_strides, S.UNIT)
    acc = tl.zeros((S.CHUNK_SIZE, S.BLOCK_V), dtype=tl.float32)
    scores = tl.zeros((S.CHUNK_SIZE, S.CHUNK_SIZE), dtype=tl.float32)
    for first_k in range(0, S.KEY_DIM, S.BLOCK_K):
        o_k = first_k + tl.arange(0, S.BLOCK_K)
        m_k = o_k < S.KEY_DIM
        m_ik = m_i[:, None] & m_k[None, :]
        b_q = tl.load(
            q_ptr + ptr_offset((i_b, start + o_i[:, None], i_kh, o_k[None, :]), q_strides), mask=m_ik, other=0.0
        ).to(S.OPERAND)  # [CHUNK_SIZE, BLOCK_K]  # fmt: skip
        b_k = tl.load(
            k_ptr + ptr_offset((i_b, start + o_i[:, None], i_kh, o_k[None, :]), k_strides), mask=m_ik, other=0.0
        ).to(S.OPERAND)  # [CHUNK_SIZE, BLOCK_K]  # fmt: skip
        b_S = tl.load(
            prev_states_ptr + ptr_offset((i_b, i_c, i_h, o_v[:, None], o_k[None, :]), prev_states_strides),
            mask=m_v[:, None] & m_k[None, :], other=0.0,
        )  # [BLOCK_V, BLOCK_K]  # fmt: skip
        acc = tl.dot(b_q, tl.trans(b_S), acc, input_precision=DOT_PRECISION)
        scores = tl.dot(b_q, tl.trans(b_k), scores, input_precision=DOT_PRECISION)

    # --- decays, and the chunk's own values
    b_g = tl.load(g_cumsum_log2_ptr + ptr_offset((i_b, i_c, i_h, o_i), g_cumsum_log2_strides))
    b_v_new = tl.load(
        v_new_ptr + ptr_offset((i_b, i_c, i_h, o_v[:, None], o_i[None, :]), v_new_strides),
        mask=m_v[:, None], other=0.0,
    )  # [BLOCK_V, CHUNK_SIZE]  # fmt: skip
    acc *= decay_exp2(b_g).to(S.INTERMEDIATE).to(tl.float32)[:, None]
    decay = decay_exp2(b_g[:, None] - b_g[None, :]).to(S.INTERMEDIATE)
    b_scores = tl.where(o_i[:, None] >= o_i[None, :], scores.to(S.INTERMEDIATE) * decay, 0.0).to(S.OPERAND)
    acc = tl.dot(b_scores, tl.trans(b_v_new), acc, input_precision=DOT_PRECISION) * scale
    tl.store(
        out_ptr + ptr_offset((i_b, start + o_i[:, None], i_h, o_v[None, :]), out_strides),
        acc.to(out_ptr.dtype.element_ty), mask=m_i[:, None] & m_v[None, :],
    )  # fmt: skip


def chunk_output(
    q: torch.Tensor, k: torch.Tensor, prev_states: torch.Tensor, v_new: torch.Tensor, g_cumsum_log2: torch.Tensor,
    chunks: Chunks, *, scale: float, out_dtype: torch.dtype, precision: Precision,
    config: ChunkOutputConfig | None = None,
) -> torch.Tensor:  # fmt: skip
    """GDN stage 6 of 6: the output, from the state that enters the chunk and from the chunk's own corrected values.

        out[i, v] = scale * (exp(g_cumsum[i]) * sum_k q[i, k] * S[v, k]
                             + sum_{j <= i} exp(g_cumsum[i] - g_cumsum[j]) * (sum_k q[i, k] * k[j, k]) * v_new[v, j])

    In:   q, k (B, T, H, K) | prev_states S (B, NT, HV, V, K) | v_new (B, NT, HV, V, C)
          g_cumsum_log2 (B, NT, HV, C) fp32
    Out:  out (B, T, HV, V), the inputs' dtype
    Grid: (B * NT * HV * v-blocks).  One program owns a block of the values of one chunk and head.
    """
    batch, length, key_heads, key_dim = q.shape
    heads, value_dim = v_new.shape[2:4]
    operand = operand_dtype(out_dtype, precision)
    config = config or ChunkOutputConfig.choose(key_dim=key_dim, value_dim=value_dim, operand=operand)
    out = torch.empty(batch, length, heads, value_dim, device=q.device, dtype=out_dtype)
    launch(
        _gdn_chunk_output_kernel,
        batch * chunks.count * heads * triton.cdiv(value_dim, config.block_v),
        (q, k, prev_states, v_new, g_cumsum_log2, chunks.spans, out),
        (
            strides_of_each(q, k, prev_states, v_new, g_cumsum_log2, out),
            length, heads, chunks.count, heads // key_heads, float(scale),
        ),
        CHUNK_SIZE=chunks.size, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        OPERAND=TL_DTYPE[operand], INTERMEDIATE=intermediate(out_dtype, precision),
        UNIT=strides_unit(q, k, prev_states, out), BLOCK_K=config.block_k, BLOCK_V=config.block_v,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out
