# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""SSD stage 2 of 5: the state after each chunk, starting from a zero state.

    states[p, n] = sum_q exp(dA_cumsum[-1] - dA_cumsum[q]) * dt[q] * x[q, p] * B[q, n]

In:   x (b, l, h, p) | B (b, l, g, n) | dt, dA_cumsum_log2 (b, h, c, q) fp32
Out:  states (b, c, h, p, n) fp32
Grid: (b * c * h * p-tiles * n-tiles).  One program owns one (p, n) tile of one chunk of one head.
Oracle: `reference.py`.  Source: Dao and Gu 2024 (arXiv:2405.21060), section 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ssdprof.kernels.chunks import Chunks, chunk_span
from ssdprof.kernels.functions import DOT_PRECISION, TL_DTYPE, decay_exp2, ptr_offset
from ssdprof.kernels.launch import launch
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.config_table import CHUNK_STATE, CallSizes, first_fit
from ssdprof.kernels.tensors import strides_of_each

STAGES = {"_chunk_state_kernel": "chunk_state"}


@dataclass(frozen=True, kw_only=True)
class ChunkStateConfig:
    block_p: int = 64
    block_n: int = 128
    block_q: int = 64  # positions of the chunk read per iteration
    num_warps: int = 4
    num_stages: int = 3

    @classmethod
    def choose(cls, *, headdim: int, dstate: int, chunk_size: int, dtype: torch.dtype) -> ChunkStateConfig:
        """By `config_table.CHUNK_STATE`, limited to the sizes of the call."""
        tile = first_fit(CHUNK_STATE, CallSizes(wide=dtype == torch.float32, headdim=headdim, dstate=dstate)).take
        return cls(
            block_p=max(16, min(triton.next_power_of_2(headdim), tile.block_p)),
            block_n=max(16, min(triton.next_power_of_2(dstate), tile.block_n)),
            block_q=min(chunk_size, tile.block_q),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


def _metadata(_grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    x, B, *_, states = args["tensors"]
    batch, seqlen, nheads, headdim = x.shape
    return {
        "name": f"{kernel.name} b{batch} l{seqlen} h{nheads} p{headdim} n{B.shape[3]}",
        "flops": 2 * x.numel() * B.shape[3],
        "bytes": sum(t.numel() * t.element_size() for t in (x, B, states)),
    }


@triton.jit(launch_metadata=_metadata)
def _chunk_state_kernel(tensors, strides, seqlen, nheads, nchunks, heads_per_group, S: tl.constexpr):
    x_ptr, B_ptr, dt_ptr, dA_cumsum_log2_ptr, spans_ptr, states_ptr = tensors
    x_strides, B_strides, dt_strides, dA_cumsum_log2_strides, states_strides = strides
    # --- this program's tile; heads of one chunk are in neighbouring programs, because they share B
    P_TILES: tl.constexpr = (S.HEADDIM + S.BLOCK_P - 1) // S.BLOCK_P
    N_TILES: tl.constexpr = (S.DSTATE + S.BLOCK_N - 1) // S.BLOCK_N
    i_tile = tl.program_id(0) % (P_TILES * N_TILES)
    i_bch = tl.program_id(0) // (P_TILES * N_TILES)
    i_h, i_bc = i_bch % nheads, i_bch // nheads
    i_b, i_c = i_bc // nchunks, i_bc % nchunks
    i_g = i_h // heads_per_group
    start, length = chunk_span(spans_ptr, i_c, seqlen, S.CHUNK_SIZE)
    if length <= 0:
        return
    o_p = (i_tile // N_TILES) * S.BLOCK_P + tl.arange(0, S.BLOCK_P)
    o_n = (i_tile % N_TILES) * S.BLOCK_N + tl.arange(0, S.BLOCK_N)
    m_p, m_n = o_p < S.HEADDIM, o_n < S.DSTATE

    # --- sum over the chunk
    end = tl.load(dA_cumsum_log2_ptr + ptr_offset((i_b, i_h, i_c, S.CHUNK_SIZE - 1), dA_cumsum_log2_strides))
    acc = tl.zeros((S.BLOCK_P, S.BLOCK_N), dtype=tl.float32)
    for q in range(0, length, S.BLOCK_Q):
        o_q = q + tl.arange(0, S.BLOCK_Q)
        o_l = start + o_q
        m_l = o_q < length
        b_x = tl.load(
            x_ptr + ptr_offset((i_b, o_l[None, :], i_h, o_p[:, None]), x_strides),
            mask=m_p[:, None] & m_l[None, :], other=0.0,
        )  # [BLOCK_P, BLOCK_Q]  # fmt: skip
        b_B = tl.load(
            B_ptr + ptr_offset((i_b, o_l[:, None], i_g, o_n[None, :]), B_strides),
            mask=m_l[:, None] & m_n[None, :], other=0.0,
        )  # [BLOCK_Q, BLOCK_N]  # fmt: skip
        b_dt = tl.load(dt_ptr + ptr_offset((i_b, i_h, i_c, o_q), dt_strides))
        b_dA = tl.load(dA_cumsum_log2_ptr + ptr_offset((i_b, i_h, i_c, o_q), dA_cumsum_log2_strides))
        weight = (decay_exp2(end - b_dA) * b_dt).to(S.INTERMEDIATE)
        # scale x, not B: the scaled operand then stays in registers
        b_x = (b_x.to(S.INTERMEDIATE) * weight[None, :]).to(b_B.dtype)
        acc = tl.dot(b_x, b_B, acc, input_precision=DOT_PRECISION)

    tl.store(
        states_ptr + ptr_offset((i_b, i_c, i_h, o_p[:, None], o_n[None, :]), states_strides),
        acc, mask=m_p[:, None] & m_n[None, :],
    )  # fmt: skip


def chunk_state(
    x: torch.Tensor,
    B: torch.Tensor,
    dt: torch.Tensor,
    dA_cumsum_log2: torch.Tensor,
    chunks: Chunks,
    *,
    precision: Precision,
    config: ChunkStateConfig | None = None,
) -> torch.Tensor:
    """Launch the kernel.  Shapes are in the module docstring; `SSDInputs` has checked them."""
    batch, seqlen, nheads, headdim = x.shape
    ngroups, dstate = B.shape[2:]
    config = config or ChunkStateConfig.choose(headdim=headdim, dstate=dstate, chunk_size=chunks.size, dtype=x.dtype)
    states = torch.empty(batch, chunks.count, nheads, headdim, dstate, device=x.device, dtype=torch.float32)
    tiles = triton.cdiv(headdim, config.block_p) * triton.cdiv(dstate, config.block_n)
    launch(
        _chunk_state_kernel,
        batch * chunks.count * nheads * tiles,
        (x, B, dt, dA_cumsum_log2, chunks.spans, states),
        (
            strides_of_each(x, B, dt, dA_cumsum_log2, states),
            seqlen, nheads, chunks.count, nheads // ngroups,
        ),
        CHUNK_SIZE=chunks.size, HEADDIM=headdim, DSTATE=dstate,
        INTERMEDIATE=TL_DTYPE[precision.intermediate_dtype(x.dtype)],
        BLOCK_P=config.block_p, BLOCK_N=config.block_n, BLOCK_Q=config.block_q,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return states
