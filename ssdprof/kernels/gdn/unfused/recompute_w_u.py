# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""GDN stage 4 of 6: keys and values of each chunk after the inverse, which do not depend on the state.

    u[v, i] = sum_j A[i, j] * beta[j] * v[j, v]
    w[i, k] = sum_j A[i, j] * beta[j] * exp(g_cumsum[j]) * k[j, k]

The factors of j are multiplied into A, so that the matrix products use k and v unchanged.

In:   A (B, NT, HV, C, C) operands' dtype | k (B, T, H, K) | v (B, T, HV, V) | beta (B, T, HV)
      g_cumsum_log2 (B, NT, HV, C) fp32
Out:  w (B, NT, HV, C, K) | u (B, NT, HV, V, C), both in the operands' dtype; rows past the sequence's end are zero
Grid: (B * NT * HV).  One program owns one chunk of one value head.
Oracle: `recompute_w_u` in tests/kernels/gdn_stages.py.  Source: Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464),
section 3.3.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ssdprof.kernels.chunks import Chunks, chunk_span
from ssdprof.kernels.functions import DOT_PRECISION, TL_DTYPE, decay_exp2, in_units, ptr_offset
from ssdprof.kernels.gdn.unfused.configs import RecomputeWUConfig
from ssdprof.kernels.gdn.unfused.precisions import intermediate, operand_dtype
from ssdprof.kernels.launch import launch
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.tensors import strides_of_each, strides_unit

STAGES = {"_gdn_recompute_w_u_kernel": "recompute_w_u"}


def _metadata(_grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    A, k, v, *_, w, u = args["tensors"]
    batch, length, heads, value_dim = v.shape
    return {
        "name": f"{kernel.name} b{batch} t{length} hv{heads} k{k.shape[3]} v{value_dim}",
        "flops": 2 * A.numel() * (k.shape[3] + value_dim),
        "bytes": sum(t.numel() * t.element_size() for t in (A, k, v, w, u)),
    }


@triton.jit(launch_metadata=_metadata)
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
    A: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    g_cumsum_log2: torch.Tensor,
    chunks: Chunks,
    *,
    precision: Precision,
    config: RecomputeWUConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(w, u).  Shapes are in the module docstring; `GDNInputs` has checked them."""
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
