# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""SSD stage 4 of 5: C B^T within each chunk, once per group.

    CB[q, s] = sum_n C[q, n] * B[s, n]      for s <= q

Tiles above the diagonal or past the chunk's last position are not written, and chunk_scan does not use them.

In:   C, B (b, l, g, n)
Out:  CB (b, c, g, q, s), fp32 if exact and 16 bit if relaxed
Grid: (b * c * g * q-tiles * s-tiles).  One program owns one tile.
Oracle: `reference.py`.  Source: Dao and Gu 2024 (arXiv:2405.21060), section 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ssdprof.kernels.chunks import Chunks, chunk_span
from ssdprof.kernels.functions import DOT_PRECISION, ptr_offset
from ssdprof.kernels.launch import launch
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.config_table import BMM_CHUNK, CallSizes, first_fit

STAGES = {"_bmm_chunk_kernel": "bmm_chunk"}


@dataclass(frozen=True, kw_only=True)
class BmmChunkConfig:
    block_q: int = 64
    block_s: int = 64
    block_n: int = 64  # state dimensions read per iteration
    num_warps: int = 4
    num_stages: int = 3

    @classmethod
    def choose(cls, *, dstate: int, chunk_size: int, dtype: torch.dtype) -> BmmChunkConfig:
        """By `config_table.BMM_CHUNK`, limited to the sizes of the call."""
        tile = first_fit(BMM_CHUNK, CallSizes(wide=dtype == torch.float32, dstate=dstate)).take
        return cls(
            block_q=min(chunk_size, tile.block),
            block_s=min(chunk_size, tile.block),
            block_n=max(16, min(triton.next_power_of_2(dstate), tile.block_n)),
        )


def _metadata(_grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    _, B, _, CB = args["tensors"]
    batch, seqlen, ngroups, dstate = B.shape
    return {
        "name": f"{kernel.name} b{batch} l{seqlen} g{ngroups} n{dstate}",
        "flops": CB.numel() * dstate,  # 2 per element of the causal half
        "bytes": 2 * B.numel() * B.element_size() + CB.numel() * CB.element_size() // 2,
    }


@triton.jit(launch_metadata=_metadata)
def _bmm_chunk_kernel(tensors, strides, seqlen, ngroups, nchunks, S: tl.constexpr):
    C_ptr, B_ptr, spans_ptr, CB_ptr = tensors
    C_strides, B_strides, CB_strides = strides
    # --- this program's tile
    Q_TILES: tl.constexpr = (S.CHUNK_SIZE + S.BLOCK_Q - 1) // S.BLOCK_Q
    S_TILES: tl.constexpr = (S.CHUNK_SIZE + S.BLOCK_S - 1) // S.BLOCK_S
    i_tile = tl.program_id(0) % (Q_TILES * S_TILES)
    i_bcg = tl.program_id(0) // (Q_TILES * S_TILES)
    i_g, i_bc = i_bcg % ngroups, i_bcg // ngroups
    i_b, i_c = i_bc // nchunks, i_bc % nchunks
    start, length = chunk_span(spans_ptr, i_c, seqlen, S.CHUNK_SIZE)
    first_q, first_s = (i_tile // S_TILES) * S.BLOCK_Q, (i_tile % S_TILES) * S.BLOCK_S
    if (first_s >= first_q + S.BLOCK_Q) | (first_q >= length):
        return
    o_q, o_s = first_q + tl.arange(0, S.BLOCK_Q), first_s + tl.arange(0, S.BLOCK_S)
    m_q, m_s = o_q < length, o_s < length

    # --- sum over the state dimension
    acc = tl.zeros((S.BLOCK_Q, S.BLOCK_S), dtype=tl.float32)
    for n in range(0, S.DSTATE, S.BLOCK_N):
        o_n = n + tl.arange(0, S.BLOCK_N)
        m_n = o_n < S.DSTATE
        b_C = tl.load(
            C_ptr + ptr_offset((i_b, start + o_q[:, None], i_g, o_n[None, :]), C_strides),
            mask=m_q[:, None] & m_n[None, :], other=0.0,
        )  # [BLOCK_Q, BLOCK_N]  # fmt: skip
        b_B = tl.load(
            B_ptr + ptr_offset((i_b, start + o_s[None, :], i_g, o_n[:, None]), B_strides),
            mask=m_n[:, None] & m_s[None, :], other=0.0,
        )  # [BLOCK_N, BLOCK_S]  # fmt: skip
        acc = tl.dot(b_C, b_B, acc, input_precision=DOT_PRECISION)

    tl.store(
        CB_ptr + ptr_offset((i_b, i_c, i_g, o_q[:, None], o_s[None, :]), CB_strides), acc.to(CB_ptr.dtype.element_ty)
    )


def bmm_chunk(
    C: torch.Tensor, B: torch.Tensor, chunks: Chunks, *, precision: Precision, config: BmmChunkConfig | None = None
) -> torch.Tensor:
    """Launch the kernel.  Shapes are in the module docstring; `SSDInputs` has checked them."""
    batch, seqlen, ngroups, dstate = B.shape
    config = config or BmmChunkConfig.choose(dstate=dstate, chunk_size=chunks.size, dtype=B.dtype)
    CB = torch.empty(
        batch, chunks.count, ngroups, chunks.size, chunks.size,
        device=B.device, dtype=precision.intermediate_dtype(B.dtype),
    )  # fmt: skip
    tiles = triton.cdiv(chunks.size, config.block_q) * triton.cdiv(chunks.size, config.block_s)
    launch(
        _bmm_chunk_kernel,
        batch * chunks.count * ngroups * tiles,
        (C, B, chunks.spans, CB),
        ((C.stride(), B.stride(), CB.stride()), seqlen, ngroups, chunks.count),
        CHUNK_SIZE=chunks.size, DSTATE=dstate,
        BLOCK_Q=config.block_q, BLOCK_S=config.block_s, BLOCK_N=config.block_n,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return CB
