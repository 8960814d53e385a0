# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""GDN stage 2 of 6: the triangular system of each chunk.

    L[i, j] = beta[i] * exp(g_cumsum[i] - g_cumsum[j]) * sum_k k[i, k] * k[j, k]      for j < i, else 0

The sum is computed once for all value heads of a key head.  Blocks of 16 x 16 above the diagonal are not written, and
solve_tril does not read them.

In:   k (B, T, H, K) | beta (B, T, HV) | g_cumsum_log2 (B, NT, HV, C) fp32
Out:  L (B, NT, HV, C, C) fp32
Grid: (B * NT * H).  One program owns one chunk of one key head, and all its value heads.
Oracle: `scaled_dot_kkt` in tests/kernels/gdn_stages.py.  Source: Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464),
section 3.3.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ssdprof.kernels.chunks import Chunks, chunk_span
from ssdprof.kernels.functions import DOT_PRECISION, TL_DTYPE, decay_exp2, in_units, ptr_offset
from ssdprof.kernels.gdn.unfused.configs import LEAF, ScaledDotKktConfig
from ssdprof.kernels.launch import launch
from ssdprof.kernels.tensors import strides_unit

STAGES = {"_gdn_scaled_dot_kkt_kernel": "scaled_dot_kkt"}


def _metadata(_grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    k, *_, L = args["tensors"]
    batch, length, heads, key_dim = k.shape
    return {
        "name": f"{kernel.name} b{batch} t{length} h{heads} k{key_dim}",
        "flops": 2 * k.numel() * L.shape[-1],
        "bytes": k.numel() * k.element_size() + L.numel() * 4 * 5 // 8,
    }


@triton.jit(launch_metadata=_metadata)
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
    k: torch.Tensor,
    beta: torch.Tensor,
    g_cumsum_log2: torch.Tensor,
    chunks: Chunks,
    *,
    operand: torch.dtype,
    config: ScaledDotKktConfig | None = None,
) -> torch.Tensor:
    """Launch the kernel.  Shapes are in the module docstring; `GDNInputs` has checked them."""
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
