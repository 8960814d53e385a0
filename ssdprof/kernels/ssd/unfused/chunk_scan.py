# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""SSD stage 5 of 5: the output, from the state that enters the chunk and from the chunk's own positions.

    a         = dA_cumsum
    y[q, p]   = exp(a[q]) * sum_n C[q, n] * prev_states[p, n]
              + sum_{s <= q} CB[q, s] * exp(a[q] - a[s]) * dt[s] * x[s, p]
    out[q, p] = (y[q, p] + D * x[q, p]) * silu(z[q, p])

Let r be the first position of a program's block of q.  For every s before the block, exp(a[q] - a[s]) =
exp(a[q] - a[r]) * exp(a[r] - a[s]): one factor per row and one per column, both at most 1.  Only blocks on the diagonal
need an exponential per element.

In:   CB (b, c, g, q, s) | x, z (b, l, h, p) | C (b, l, g, n) | dt, dA_cumsum_log2 (b, h, c, q) fp32
      prev_states (b, c, h, p, n) | D (h) or (h, p)
Out:  out (b, l, h, p), x's dtype
Grid: (b * c * h * q-blocks * p-tiles).  One program owns one block of positions of one chunk and head.
Oracle: `reference.py`.  Source: Dao and Gu 2024 (arXiv:2405.21060), section 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ssdprof.kernels.chunks import Chunks, chunk_span
from ssdprof.kernels.functions import DOT_PRECISION, decay_exp2, ptr_offset
from ssdprof.kernels.launch import launch
from ssdprof.kernels.ssd.config_table import CHUNK_SCAN, CallSizes, first_fit
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.tensors import strides_of_each

STAGES = {"_chunk_scan_kernel": "chunk_scan"}


@dataclass(frozen=True, kw_only=True)
class ChunkScanConfig:
    block_q: int = 128  # a multiple of block_s
    block_p: int = 64
    block_s: int = 32  # source positions per iteration
    block_n: int = 128  # state dimensions per product with the entering state
    num_warps: int = 4
    num_stages: int = 3

    @classmethod
    def choose(cls, inputs: SSDInputs) -> ChunkScanConfig:
        """By `config_table.CHUNK_SCAN`, limited to the sizes of the call."""
        headdim, dstate, wide = inputs.x.shape[3], inputs.C.shape[3], inputs.x.dtype == torch.float32
        call = CallSizes(wide=wide, headdim=headdim, dstate=dstate, gate=inputs.z is not None)
        tile = first_fit(CHUNK_SCAN, call).take
        return cls(
            block_q=min(inputs.power_of_two_chunk, tile.block_q),
            block_p=max(16, min(triton.next_power_of_2(headdim), tile.block_p)),
            block_s=min(inputs.power_of_two_chunk, tile.block_s),
            block_n=max(16, min(triton.next_power_of_2(dstate), tile.block_n)),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


def _metadata(_grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    CB, x, _, _, C, prev_states, _, z, *_ = args["tensors"]
    batch, seqlen, nheads, headdim = x.shape
    chunk_size, dstate = CB.shape[-1], C.shape[-1]
    read = sum(t.numel() * t.element_size() for t in (x, C, prev_states, z) if t is not None)
    return {
        "name": f"{kernel.name} b{batch} l{seqlen} h{nheads} p{headdim} n{dstate}",
        "flops": x.numel() * (2 * dstate + chunk_size),
        "bytes": read + CB.numel() * CB.element_size() // 2 + x.numel() * x.element_size(),
    }


@triton.jit(launch_metadata=_metadata)
def _chunk_scan_kernel(tensors, strides, seqlen, nheads, nchunks, heads_per_group, S: tl.constexpr):
    CB_ptr, x_ptr, dt_ptr, dA_cumsum_log2_ptr, C_ptr, prev_states_ptr, D_ptr, z_ptr, spans_ptr, out_ptr = tensors
    (
        CB_strides, x_strides, dt_strides, dA_cumsum_log2_strides, C_strides, prev_states_strides, D_strides,
        z_strides, out_strides,
    ) = strides  # fmt: skip
    # --- this program's block; heads of one chunk are in neighbouring programs, because they share CB and C
    P_TILES: tl.constexpr = (S.HEADDIM + S.BLOCK_P - 1) // S.BLOCK_P
    Q_BLOCKS: tl.constexpr = S.CHUNK_SIZE // S.BLOCK_Q
    i_tile = tl.program_id(0) % (P_TILES * Q_BLOCKS)
    i_bch = tl.program_id(0) // (P_TILES * Q_BLOCKS)
    i_h, i_bc = i_bch % nheads, i_bch // nheads
    i_b, i_c = i_bc // nchunks, i_bc % nchunks
    i_g = i_h // heads_per_group
    start, length = chunk_span(spans_ptr, i_c, seqlen, S.CHUNK_SIZE)
    first_q = (i_tile // P_TILES) * S.BLOCK_Q
    if first_q >= length:
        return
    o_q, o_p = first_q + tl.arange(0, S.BLOCK_Q), (i_tile % P_TILES) * S.BLOCK_P + tl.arange(0, S.BLOCK_P)
    m_q, m_p = o_q < length, o_p < S.HEADDIM
    b_dA_q = tl.load(dA_cumsum_log2_ptr + ptr_offset((i_b, i_h, i_c, o_q), dA_cumsum_log2_strides))
    dA_first = tl.load(dA_cumsum_log2_ptr + ptr_offset((i_b, i_h, i_c, first_q), dA_cumsum_log2_strides))

    # stage chunk_scan.previous: what entered the chunk, decayed to the block's first row
    acc = tl.zeros((S.BLOCK_Q, S.BLOCK_P), dtype=tl.float32)
    for n in range(0, S.DSTATE, S.BLOCK_N):
        o_n = n + tl.arange(0, S.BLOCK_N)
        m_n = o_n < S.DSTATE
        b_C = tl.load(
            C_ptr + ptr_offset((i_b, start + o_q[:, None], i_g, o_n[None, :]), C_strides),
            mask=m_q[:, None] & m_n[None, :], other=0.0,
        )  # [BLOCK_Q, BLOCK_N]  # fmt: skip
        b_state = tl.load(
            prev_states_ptr + ptr_offset((i_b, i_c, i_h, o_p[None, :], o_n[:, None]), prev_states_strides),
            mask=m_n[:, None] & m_p[None, :], other=0.0,
        )  # [BLOCK_N, BLOCK_P]  # fmt: skip
        acc = tl.dot(b_C, b_state.to(b_C.dtype), acc, input_precision=DOT_PRECISION)
    acc *= decay_exp2(dA_first)

    # stage chunk_scan.current: the chunk's positions before the block, decayed to its first row, then to each row
    for s in range(0, first_q, S.BLOCK_S):
        o_s = s + tl.arange(0, S.BLOCK_S)
        b_dt = tl.load(dt_ptr + ptr_offset((i_b, i_h, i_c, o_s), dt_strides))
        b_dA_s = tl.load(dA_cumsum_log2_ptr + ptr_offset((i_b, i_h, i_c, o_s), dA_cumsum_log2_strides))
        b_CB = tl.load(CB_ptr + ptr_offset((i_b, i_c, i_g, o_q[:, None], o_s[None, :]), CB_strides))
        b_x = tl.load(
            x_ptr + ptr_offset((i_b, start + o_s[:, None], i_h, o_p[None, :]), x_strides),
            mask=m_p[None, :], other=0.0,
        )  # [BLOCK_S, BLOCK_P]  # fmt: skip
        weight = (decay_exp2(dA_first - b_dA_s) * b_dt).to(b_CB.dtype)
        acc = tl.dot((b_CB * weight[None, :]).to(b_x.dtype), b_x, acc, input_precision=DOT_PRECISION)
    acc *= decay_exp2(b_dA_q - dA_first)[:, None]

    # stage chunk_scan.current: the block's own positions
    for s in range(first_q, tl.minimum(first_q + S.BLOCK_Q, length), S.BLOCK_S):
        o_s = s + tl.arange(0, S.BLOCK_S)
        m_s = o_s < length
        b_dt = tl.load(dt_ptr + ptr_offset((i_b, i_h, i_c, o_s), dt_strides))
        b_dA_s = tl.load(dA_cumsum_log2_ptr + ptr_offset((i_b, i_h, i_c, o_s), dA_cumsum_log2_strides))
        b_CB = tl.load(CB_ptr + ptr_offset((i_b, i_c, i_g, o_q[:, None], o_s[None, :]), CB_strides))
        b_x = tl.load(
            x_ptr + ptr_offset((i_b, start + o_s[:, None], i_h, o_p[None, :]), x_strides),
            mask=m_s[:, None] & m_p[None, :], other=0.0,
        )  # [BLOCK_S, BLOCK_P]  # fmt: skip
        weight = (decay_exp2(b_dA_q[:, None] - b_dA_s[None, :]) * b_dt[None, :]).to(b_CB.dtype)
        # CB above the diagonal was never written and may be NaN
        b_scores = tl.where(o_q[:, None] >= o_s[None, :], b_CB * weight, 0.0)
        acc = tl.dot(b_scores.to(b_x.dtype), b_x, acc, input_precision=DOT_PRECISION)

    # stage chunk_scan.residual: skip and gate
    row_index = (i_b, start + o_q[:, None], i_h, o_p[None, :])
    m = m_q[:, None] & m_p[None, :]
    if D_ptr is not None:
        if len(D_strides) == 2:
            b_D = tl.load(D_ptr + ptr_offset((i_h, o_p), D_strides), mask=m_p, other=0.0).to(tl.float32)[None, :]
        else:
            b_D = tl.load(D_ptr + ptr_offset((i_h,), D_strides)).to(tl.float32)
        acc += b_D * tl.load(x_ptr + ptr_offset(row_index, x_strides), mask=m, other=0.0).to(tl.float32)
    if z_ptr is not None:
        b_z = tl.load(z_ptr + ptr_offset(row_index, z_strides), mask=m, other=0.0).to(tl.float32)
        acc *= b_z * tl.sigmoid(b_z)
    tl.store(out_ptr + ptr_offset(row_index, out_strides), acc.to(out_ptr.dtype.element_ty), mask=m)


def chunk_scan(
    inputs: SSDInputs,
    dt: torch.Tensor,
    dA_cumsum_log2: torch.Tensor,
    prev_states: torch.Tensor,
    CB: torch.Tensor,
    chunks: Chunks,
    *,
    config: ChunkScanConfig | None = None,
) -> torch.Tensor:
    """Launch the kernel; x, z, C and D come from `inputs`.  Shapes are in the module docstring.

    Operands determine the precision: products with CB are computed in CB's dtype.
    """
    x, C, D, z = inputs.x, inputs.C, inputs.D, inputs.z
    _, seqlen, nheads, headdim = x.shape
    dstate = C.shape[3]
    config = config or ChunkScanConfig.choose(inputs)
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    tiles = chunks.size // config.block_q * triton.cdiv(headdim, config.block_p)
    launch(
        _chunk_scan_kernel,
        x.shape[0] * chunks.count * nheads * tiles,
        (CB, x, dt, dA_cumsum_log2, C, prev_states, D, z, chunks.spans, out),
        (
            strides_of_each(CB, x, dt, dA_cumsum_log2, C, prev_states, D, z, out),
            seqlen, nheads, chunks.count, inputs.heads_per_group,
        ),
        CHUNK_SIZE=chunks.size, HEADDIM=headdim, DSTATE=dstate,
        BLOCK_Q=config.block_q, BLOCK_P=config.block_p, BLOCK_S=config.block_s, BLOCK_N=config.block_n,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out
