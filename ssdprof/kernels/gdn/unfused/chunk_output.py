# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""GDN stage 6 of 6: the output, from the state that enters the chunk and from the chunk's own corrected values.

    out[i, v] = scale * (exp(g_cumsum[i]) * sum_k q[i, k] * S[v, k]
                         + sum_{j <= i} exp(g_cumsum[i] - g_cumsum[j]) * (sum_k q[i, k] * k[j, k]) * v_new[v, j])

In:   q, k (B, T, H, K) | prev_states S (B, NT, HV, V, K) | v_new (B, NT, HV, V, C) | g_cumsum_log2 (B, NT, HV, C) fp32
Out:  out (B, T, HV, V), the inputs' dtype
Grid: (B * NT * HV * v-blocks).  One program owns a block of the values of one chunk and head.
Oracle: `chunk_output` in tests/kernels/gdn_stages.py.  Source: Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464),
section 3.3.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ssdprof.kernels.chunks import Chunks, chunk_span
from ssdprof.kernels.functions import DOT_PRECISION, TL_DTYPE, decay_exp2, in_units, ptr_offset
from ssdprof.kernels.gdn.unfused.configs import ChunkOutputConfig
from ssdprof.kernels.gdn.unfused.precisions import intermediate, operand_dtype
from ssdprof.kernels.launch import launch
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.tensors import strides_of_each, strides_unit

STAGES = {"_gdn_chunk_output_kernel": "chunk_output"}


def _metadata(_grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    q, k, prev_states, v_new, *_, out = args["tensors"]
    batch, length, heads, value_dim = out.shape
    return {
        "name": f"{kernel.name} b{batch} t{length} hv{heads} k{q.shape[3]} v{value_dim}",
        "flops": 2 * v_new.numel() * (q.shape[3] + v_new.shape[4] // 2),
        "bytes": sum(t.numel() * t.element_size() for t in (q, k, prev_states, v_new, out)),
    }


@triton.jit(launch_metadata=_metadata)
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
    q: torch.Tensor,
    k: torch.Tensor,
    prev_states: torch.Tensor,
    v_new: torch.Tensor,
    g_cumsum_log2: torch.Tensor,
    chunks: Chunks,
    *,
    scale: float,
    out_dtype: torch.dtype,
    precision: Precision,
    config: ChunkOutputConfig | None = None,
) -> torch.Tensor:
    """Launch the kernel.  Shapes are in the module docstring; `GDNInputs` has checked them."""
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
