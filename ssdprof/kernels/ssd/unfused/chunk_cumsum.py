# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""SSD stage 1 of 5: the time step of every position, and its cumulative log decay in the chunk.

    dt[q]             = clamp(softplus(dt_raw[q] + dt_bias), low, high), and 0 past the end of the sequence
    dA_cumsum_log2[q] = sum_{s <= q} dt[s] * A * log2(e)

Logarithms have base 2, because later stages take exp2 of their differences many times per element.

In:   dt_raw (b, l, h) | A (h) | dt_bias (h) or None
Out:  dt, dA_cumsum_log2 (b, h, c, q) fp32
Grid: (b * c * h-blocks).  One program owns one chunk of a block of heads.
Oracle: `reference.py`.  Source: Dao and Gu 2024 (arXiv:2405.21060), section 6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ssdprof.kernels.chunks import Chunks, chunk_span
from ssdprof.kernels.functions import ptr_offset
from ssdprof.kernels.launch import launch
from ssdprof.kernels.tensors import strides_of_each

LOG2_E = tl.constexpr(math.log2(math.e))

STAGES = {"_softplus": "chunk_cumsum", "_chunk_cumsum_kernel": "chunk_cumsum"}


@dataclass(frozen=True, kw_only=True)
class ChunkCumsumConfig:
    """block_h: heads per program.  Heads are innermost in dt_raw, and 16 of them in 16 bit fill a 32-byte sector."""

    block_h: int = 16
    num_warps: int = 4


def _metadata(_grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    dt_raw = args["tensors"][0]
    batch, seqlen, nheads = dt_raw.shape
    elements = batch * seqlen * nheads
    return {
        "name": f"{kernel.name} b{batch} l{seqlen} h{nheads}",
        "flops": 2 * elements,
        "bytes": elements * (dt_raw.element_size() + 8),
    }


@triton.jit
def _softplus(x):
    """log(1 + exp(x)).  Returns x above 20, where both agree in fp32."""
    e = tl.exp(tl.minimum(x, 20.0, propagate_nan=tl.PropagateNan.ALL))
    u = 1.0 + e
    # log(u) is that of the rounded u; the factor e / (u - 1) corrects the rounding, which matters for small e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, log1p)


@triton.jit(launch_metadata=_metadata)
def _chunk_cumsum_kernel(tensors, strides, seqlen, nheads, nchunks, dt_low, dt_high, S: tl.constexpr):
    dt_raw_ptr, A_ptr, dt_bias_ptr, spans_ptr, dt_ptr, dA_cumsum_log2_ptr = tensors
    dt_raw_strides, A_strides, dt_bias_strides, dt_strides, dA_cumsum_log2_strides = strides
    # --- this program's heads and chunk
    h_blocks = tl.cdiv(nheads, S.BLOCK_H)
    i_bc = tl.program_id(0) // h_blocks
    i_b, i_c = i_bc // nchunks, i_bc % nchunks
    start, length = chunk_span(spans_ptr, i_c, seqlen, S.CHUNK_SIZE)
    if length <= 0:
        return
    o_h = (tl.program_id(0) % h_blocks) * S.BLOCK_H + tl.arange(0, S.BLOCK_H)
    o_q = tl.arange(0, S.CHUNK_SIZE)
    m_h = o_h < nheads
    m = m_h[:, None] & (o_q < length)[None, :]

    # --- time step
    dt_raw_offset = ptr_offset((i_b, start + o_q[None, :], o_h[:, None]), dt_raw_strides)
    b_dt = tl.load(dt_raw_ptr + dt_raw_offset, mask=m, other=0.0).to(tl.float32)  # [BLOCK_H, CHUNK_SIZE]
    if dt_bias_ptr is not None:
        b_bias = tl.load(dt_bias_ptr + ptr_offset((o_h,), dt_bias_strides), mask=m_h, other=0.0).to(tl.float32)
        b_dt += b_bias[:, None]
    if S.DT_SOFTPLUS:
        b_dt = _softplus(b_dt)
    b_dt = tl.clamp(b_dt, dt_low, dt_high, propagate_nan=tl.PropagateNan.ALL)
    b_dt = tl.where(m, b_dt, 0.0)

    # --- cumulative log decay
    # later stages subtract these sums, so that their rounding becomes a relative error of the decay.  It is not visible
    # with 16-bit inputs.  With fp32 inputs it is, so their sums are computed in fp64 and rounded once
    SUM_DTYPE: tl.constexpr = tl.float64 if dt_raw_ptr.dtype.element_ty == tl.float32 else tl.float32
    b_A = tl.load(A_ptr + ptr_offset((o_h,), A_strides), mask=m_h, other=0.0).to(SUM_DTYPE) * LOG2_E
    b_dA_cumsum_log2 = tl.cumsum(b_dt.to(SUM_DTYPE) * b_A[:, None], axis=1).to(tl.float32)

    index = (i_b, o_h[:, None], i_c, o_q[None, :])
    tl.store(dt_ptr + ptr_offset(index, dt_strides), b_dt, mask=m_h[:, None])
    tl.store(dA_cumsum_log2_ptr + ptr_offset(index, dA_cumsum_log2_strides), b_dA_cumsum_log2, mask=m_h[:, None])


def chunk_cumsum(
    dt_raw: torch.Tensor,
    A: torch.Tensor,
    chunks: Chunks,
    *,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    config: ChunkCumsumConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dt, dA_cumsum_log2).  Shapes are in the module docstring; `SSDInputs` has checked them."""
    config = config or ChunkCumsumConfig()
    batch, seqlen, nheads = dt_raw.shape
    shape = (batch, nheads, chunks.count, chunks.size)
    dt = torch.empty(shape, device=dt_raw.device, dtype=torch.float32)
    dA_cumsum_log2 = torch.empty(shape, device=dt_raw.device, dtype=torch.float32)
    launch(
        _chunk_cumsum_kernel,
        batch * chunks.count * triton.cdiv(nheads, config.block_h),
        (dt_raw, A, dt_bias, chunks.spans, dt, dA_cumsum_log2),
        (
            strides_of_each(dt_raw, A, dt_bias, dt, dA_cumsum_log2),
            seqlen, nheads, chunks.count, *map(float, dt_limit),
        ),
        DT_SOFTPLUS=dt_softplus, CHUNK_SIZE=chunks.size, BLOCK_H=config.block_h,
        num_warps=config.num_warps,
    )  # fmt: skip
    return dt, dA_cumsum_log2
