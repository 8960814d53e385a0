# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""GDN stage 1 of 6: the cumulative log decay of each position in its chunk.

    g_cumsum_log2[i] = sum_{j <= i} clamp(g[j] * log2(e), FORGOTTEN, 0)

Logarithms have base 2, because later stages take exp2 of their differences many times per element.  Positions past the
end of the sequence count as g = 0.

In:   g (B, T, HV)
Out:  g_cumsum_log2 (B, NT, HV, C) fp32
Grid: (B * NT * head-blocks).  One program owns one chunk of a block of heads.
Oracle: `gate_cumsum` in tests/kernels/gdn_stages.py.  Source: Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from ssdprof.kernels.chunks import Chunks, chunk_span
from ssdprof.kernels.functions import ptr_offset
from ssdprof.kernels.gdn.unfused.configs import GateCumsumConfig
from ssdprof.kernels.launch import launch

LOG2_E = tl.constexpr(math.log2(math.e))
# 2^-160 is zero in fp32.  A lower g, in particular -inf, would cost differences of later sums their precision.
FORGOTTEN = tl.constexpr(-160.0)

STAGES = {"_gdn_gate_cumsum_kernel": "gate_cumsum"}


def _metadata(_grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    g = args["tensors"][0]
    batch, length, heads = g.shape
    return {
        "name": f"{kernel.name} b{batch} t{length} hv{heads}",
        "flops": 2 * g.numel(),
        "bytes": g.numel() * (g.element_size() + 4),
    }


@triton.jit(launch_metadata=_metadata)
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
    """Launch the kernel.  Shapes are in the module docstring; `GDNInputs` has checked them."""
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
