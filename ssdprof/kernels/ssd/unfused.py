"""SSD in five launches, one per stage of the algorithm, in the order of the stages: the baseline.
Packed sequences need one more launch, for the table of chunks (`kernels/chunks.py`).

`ssd_unfused(...)` takes tensors, as `ssd_fused` does; the registered implementation, `run`, takes
`SSDInputs`.  By default, dtypes are those of the original unfused kernels of state-spaces/mamba.
The function of a stage launches its kernel on the current device, and relies on shapes that
`SSDInputs` has checked.  Block sizes: `config.py`, `UNFUSED`.

Inputs: x, z (b, l, h, p) | dt_raw (b, l, h) | A, dt_bias (h) | B, C (b, l, g, n) | D (h) or (h, p)
Stages: dt, dA_cumsum_log2 (b, h, c, q) fp32 | states (b, c, h, p, n) fp32 | prev_states likewise,
        state_dtype | CB (b, c, g, q, s)

dA_cumsum_log2 is the glossary's dA_cumsum times log2(e), so that decays are powers of 2.  In
`_chunk_scan_kernel`, b_sum_q and b_sum_s are its numbers at positions q and s, and sum_first is
that at the first position of the program's block.

In kernels, the prefix of a name says what it is: i_ an index, o_ a vector of indices, m_ a mask, b_
a tile or vector in registers.  Other single numbers have no prefix.

Oracle: `reference.py`.  Source: Dao and Gu 2024 (arXiv:2405.21060), section 6.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssdprof.kernels.chunks import Chunks, chunk_span, own_chunk
from ssdprof.kernels.device import INTERPRETED, refuse_device, refuse_gradient
from ssdprof.kernels.functions import (
    DOT_PRECISION,
    LOG2_E,
    TL_DTYPE,
    decay_exp2,
    load_at,
    ptr_offset,
    store_at,
)
from ssdprof.kernels.launch import launch
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, UnsupportedError, register
from ssdprof.kernels.ssd.config import UNFUSED, unfused_blocks
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.tensors import strides_of_each

MAX_HEADDIM, MAX_DSTATE = 128, 256

# stages of functions: `stalls/attribute.py`
STAGES = {
    "_softplus": "chunk_cumsum",
    "_chunk_cumsum_kernel": "chunk_cumsum",
    "_chunk_state_kernel": "chunk_state",
    "_state_passing_kernel": "state_passing",
    "_bmm_chunk_kernel": "bmm_chunk",
    "_chunk_scan_kernel": "chunk_scan",
}


def _constants(blocks: Mapping[str, int]) -> dict[str, int]:
    """The compile-time arguments of a kernel, which are blocks with their names in capitals, and
    the launch options, whose names stay.

    blocks: sizes of blocks, and launch options, by name.
    """
    return {
        name.upper() if name.startswith("block") else name: value for name, value in blocks.items()
    }


@triton.jit
def _softplus(x):
    """log(1 + exp(x)); above 20, where both agree in fp32, x."""
    e = tl.exp(tl.minimum(x, 20.0, propagate_nan=tl.PropagateNan.ALL))
    u = 1.0 + e
    # log(u) is that of the rounded u; the factor e / (u - 1) corrects the rounding, which matters
    # for small e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, log1p)


@triton.jit
def _chunk_cumsum_kernel(
    tensors, strides, seqlen, nheads, nchunks, dt_low, dt_high, S: tl.constexpr
):
    """One chunk of a block of heads of `chunk_cumsum`."""
    dt_raw_ptr, A_ptr, dt_bias_ptr, spans_ptr, dt_ptr, dA_cumsum_log2_ptr = tensors
    dt_raw_strides, A_strides, dt_bias_strides, dt_strides, dA_cumsum_log2_strides = strides
    # --- the program's heads and chunk
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

    # --- time step, [BLOCK_H, CHUNK_SIZE]
    b_dt = load_at(
        dt_raw_ptr, dt_raw_strides, (i_b, start + o_q[None, :], o_h[:, None]), mask=m
    ).to(tl.float32)
    if dt_bias_ptr is not None:
        b_dt += load_at(dt_bias_ptr, dt_bias_strides, (o_h,), mask=m_h).to(tl.float32)[:, None]
    if S.DT_SOFTPLUS:
        b_dt = _softplus(b_dt)
    b_dt = tl.clamp(b_dt, dt_low, dt_high, propagate_nan=tl.PropagateNan.ALL)
    b_dt = tl.where(m, b_dt, 0.0)

    # --- cumulative log decay.  Later stages subtract these sums, so that their rounding becomes a
    # relative error of the decay.  It does not show in 16-bit outputs, but it does in fp32 ones.
    # Therefore the sums of dt in fp32 are computed in fp64 and rounded once
    SUM_DTYPE: tl.constexpr = (
        tl.float64 if dt_raw_ptr.dtype.element_ty == tl.float32 else tl.float32
    )
    b_A = load_at(A_ptr, A_strides, (o_h,), mask=m_h).to(SUM_DTYPE) * LOG2_E
    b_dA_cumsum_log2 = tl.cumsum(b_dt.to(SUM_DTYPE) * b_A[:, None], axis=1).to(tl.float32)

    index = (i_b, o_h[:, None], i_c, o_q[None, :])
    store_at(dt_ptr, dt_strides, index, b_dt, mask=m_h[:, None])
    store_at(dA_cumsum_log2_ptr, dA_cumsum_log2_strides, index, b_dA_cumsum_log2, mask=m_h[:, None])


def chunk_cumsum(inputs: SSDInputs, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Stage 1: the time step of every position, and its cumulative log decay in the chunk.

        dt[q] = clamp(softplus(dt_raw[q] + dt_bias), low, high), 0 past the end of the sequence
        dA_cumsum_log2[q] = sum_{s <= q} dt[s] * A * log2(e)

    Softplus is applied only with dt_softplus.  Logarithms have base 2, because later stages take
    exp2 of their differences many times per element.

    In:   dt_raw (b, l, h) | A (h) | dt_bias (h) or None
    Out:  dt, dA_cumsum_log2 (b, h, c, q) fp32.  Unused chunks of packed sequences are not written
    Grid: (b * c * h-blocks).  One program owns one chunk of a block of heads.
    """
    blocks = unfused_blocks("chunk_cumsum")
    batch, _, nheads = inputs.dt.shape
    shape = (batch, nheads, chunks.count, chunks.size)
    dt, dA_cumsum_log2 = (
        torch.empty(shape, device=inputs.device, dtype=torch.float32) for _ in range(2)
    )
    chunks.launch(
        _chunk_cumsum_kernel,
        triton.cdiv(nheads, blocks["block_h"]),
        nheads,
        (inputs.dt, inputs.A, inputs.dt_bias),
        (dt, dA_cumsum_log2),
        *map(float, inputs.dt_limit),
        DT_SOFTPLUS=inputs.dt_softplus,
        **_constants(blocks),
    )
    return dt, dA_cumsum_log2


@triton.jit
def _chunk_state_kernel(
    tensors, strides, seqlen, nheads, nchunks, heads_per_group, S: tl.constexpr
):
    """One (p, n) tile of one chunk of one head of `chunk_state`."""
    x_ptr, B_ptr, dt_ptr, dA_cumsum_log2_ptr, spans_ptr, states_ptr = tensors
    x_strides, B_strides, dt_strides, dA_cumsum_log2_strides, states_strides = strides
    # --- the program's tile.  Heads of one chunk are in neighbouring programs, because they share B
    P_TILES: tl.constexpr = (S.HEADDIM + S.BLOCK_P - 1) // S.BLOCK_P
    N_TILES: tl.constexpr = (S.DSTATE + S.BLOCK_N - 1) // S.BLOCK_N
    i_tile = tl.program_id(0) % (P_TILES * N_TILES)
    unit = tl.program_id(0) // (P_TILES * N_TILES)
    i_h, i_b, i_c, start, length = own_chunk(unit, spans_ptr, seqlen, nheads, nchunks, S.CHUNK_SIZE)
    i_g = i_h // heads_per_group
    if length <= 0:
        return
    o_p = (i_tile // N_TILES) * S.BLOCK_P + tl.arange(0, S.BLOCK_P)
    o_n = (i_tile % N_TILES) * S.BLOCK_N + tl.arange(0, S.BLOCK_N)
    m_p, m_n = o_p < S.HEADDIM, o_n < S.DSTATE

    # --- sum over the chunk, [BLOCK_P, BLOCK_N].  `load_at` would load the same values, but ptxas
    # makes other instructions of it here
    end = tl.load(
        dA_cumsum_log2_ptr + ptr_offset((i_b, i_h, i_c, S.CHUNK_SIZE - 1), dA_cumsum_log2_strides)
    )
    b_states = tl.zeros((S.BLOCK_P, S.BLOCK_N), dtype=tl.float32)
    for q in range(0, length, S.BLOCK_Q):
        o_q = q + tl.arange(0, S.BLOCK_Q)
        o_l = start + o_q
        m_l = o_q < length
        b_x = tl.load(
            x_ptr + ptr_offset((i_b, o_l[None, :], i_h, o_p[:, None]), x_strides),
            mask=m_p[:, None] & m_l[None, :],
            other=0.0,
        )  # [BLOCK_P, BLOCK_Q]
        b_B = tl.load(
            B_ptr + ptr_offset((i_b, o_l[:, None], i_g, o_n[None, :]), B_strides),
            mask=m_l[:, None] & m_n[None, :],
            other=0.0,
        )  # [BLOCK_Q, BLOCK_N]
        b_dt = tl.load(dt_ptr + ptr_offset((i_b, i_h, i_c, o_q), dt_strides))
        b_dA_cumsum_log2 = tl.load(
            dA_cumsum_log2_ptr + ptr_offset((i_b, i_h, i_c, o_q), dA_cumsum_log2_strides)
        )
        b_weight = (decay_exp2(end - b_dA_cumsum_log2) * b_dt).to(S.INTERMEDIATE)
        # scale x, not B: the scaled operand then stays in registers
        b_x = (b_x.to(S.INTERMEDIATE) * b_weight[None, :]).to(b_B.dtype)
        b_states = tl.dot(b_x, b_B, b_states, input_precision=DOT_PRECISION)

    tl.store(
        states_ptr + ptr_offset((i_b, i_c, i_h, o_p[:, None], o_n[None, :]), states_strides),
        b_states,
        mask=m_p[:, None] & m_n[None, :],
    )


def chunk_state(
    inputs: SSDInputs, dt: Tensor, dA_cumsum_log2: Tensor, chunks: Chunks, precision: Precision
) -> Tensor:
    """Stage 2: the state after each chunk, starting from a zero state.

        a            = dA_cumsum_log2
        states[p, n] = sum_q 2^(a[-1] - a[q]) * dt[q] * x[q, p] * B[q, n]

    In:   x (b, l, h, p) | B (b, l, g, n) | dt, dA_cumsum_log2 (b, h, c, q) fp32
    Out:  states (b, c, h, p, n) fp32
    Grid: (b * c * h * p-tiles * n-tiles).  One program owns one (p, n) tile of one chunk of one
          head.
    """
    nheads, headdim = inputs.x.shape[2:]
    dstate = inputs.B.shape[3]
    blocks = _blocks("chunk_state", inputs)
    states = chunks.empty(nheads, headdim, dstate)
    tiles = triton.cdiv(headdim, blocks["block_p"]) * triton.cdiv(dstate, blocks["block_n"])
    chunks.launch(
        _chunk_state_kernel,
        nheads * tiles,
        nheads,
        (inputs.x, inputs.B, dt, dA_cumsum_log2),
        (states,),
        inputs.heads_per_group,
        HEADDIM=headdim,
        DSTATE=dstate,
        INTERMEDIATE=TL_DTYPE[precision.intermediate_dtype(inputs.x.dtype)],
        **_constants(blocks),
    )
    return states


@triton.jit
def _state_passing_kernel(tensors, strides, nheads, nchunks, S: tl.constexpr):
    """One block of one head's state of `state_passing`, chunk after chunk."""
    (
        states_ptr, dA_cumsum_log2_ptr, initial_states_ptr, bounds_ptr, prev_states_ptr,
        final_states_ptr,
    ) = tensors  # fmt: skip
    (
        states_strides, dA_cumsum_log2_strides, initial_states_strides, prev_states_strides,
        final_states_strides,
    ) = strides  # fmt: skip
    # --- the program's block of (p, n) of a state, and the chunks of its sequence
    BLOCKS: tl.constexpr = (S.HEADDIM * S.DSTATE + S.BLOCK - 1) // S.BLOCK
    i_sh = tl.program_id(0) // BLOCKS
    i_s, i_h = i_sh // nheads, i_sh % nheads
    o_pn = (tl.program_id(0) % BLOCKS) * S.BLOCK + tl.arange(0, S.BLOCK)
    o_p, o_n = o_pn // S.DSTATE, o_pn % S.DSTATE
    m = o_pn < S.HEADDIM * S.DSTATE
    if bounds_ptr is None:
        i_b, first, stop = i_s, 0, nchunks
    else:
        i_b = 0
        first = tl.load(bounds_ptr + i_s).to(tl.int32)
        stop = tl.load(bounds_ptr + i_s + 1).to(tl.int32)

    # --- loop over chunks
    b_state = tl.zeros((S.BLOCK,), dtype=tl.float32)
    if initial_states_ptr is not None:
        b_state += load_at(
            initial_states_ptr, initial_states_strides, (i_s, i_h, o_p, o_n), mask=m
        ).to(tl.float32)
    for i_c in tl.range(first, stop, num_stages=S.NUM_STAGES):
        b_states = load_at(states_ptr, states_strides, (i_b, i_c, i_h, o_p, o_n), mask=m)
        end = load_at(dA_cumsum_log2_ptr, dA_cumsum_log2_strides, (i_b, i_h, i_c, S.CHUNK_SIZE - 1))
        store_at(prev_states_ptr, prev_states_strides, (i_b, i_c, i_h, o_p, o_n), b_state, mask=m)
        b_state = b_state * decay_exp2(end) + b_states
    store_at(final_states_ptr, final_states_strides, (i_s, i_h, o_p, o_n), b_state, mask=m)


def state_passing(
    inputs: SSDInputs, states: Tensor, dA_cumsum_log2: Tensor, chunks: Chunks, precision: Precision
) -> tuple[Tensor, Tensor]:
    """Stage 3: the state that enters each chunk, and the final state.

        prev_states[0]   = initial_states, or 0
        prev_states[c+1] = 2^dA_cumsum_log2[c, -1] * prev_states[c] + states[c]

    The final state is the one that would enter a chunk after the last.  States accumulate in fp32
    registers.  Only the stored copies are rounded to the dtype of prev_states.

    In:   states (b, c, h, p, n) fp32 | dA_cumsum_log2 (b, h, c, q) fp32 | initial_states
          (sequences, h, p, n) or None
    Out:  prev_states (b, c, h, p, n), the precision's state_dtype
          final_states (sequences, h, p, n) fp32
    Grid: (sequences * h * pn-blocks).  One program owns a block of one head's state and loops over
          its chunks.
    """
    blocks = unfused_blocks("state_passing")
    initial_states = inputs.initial_states
    if INTERPRETED:  # the interpreter takes as long for a large block as for a small one
        blocks["block"] = 4096
    _, _, nheads, headdim, dstate = states.shape
    prev_states = torch.empty_like(states, dtype=precision.state_dtype)
    final_states = torch.empty(inputs.states_shape, device=states.device, dtype=torch.float32)
    strides = strides_of_each(states, dA_cumsum_log2, initial_states, prev_states, final_states)
    launch(
        _state_passing_kernel,
        inputs.sequences * nheads * triton.cdiv(headdim * dstate, blocks["block"]),
        (states, dA_cumsum_log2, initial_states, chunks.bounds, prev_states, final_states),
        (strides, nheads, chunks.count),
        CHUNK_SIZE=chunks.size,
        HEADDIM=headdim,
        DSTATE=dstate,
        BLOCK=blocks["block"],
        NUM_STAGES=blocks["num_stages"],
        num_warps=blocks["num_warps"],
    )
    return prev_states, final_states


@triton.jit
def _bmm_chunk_kernel(tensors, strides, seqlen, ngroups, nchunks, S: tl.constexpr):
    """One tile of one chunk of one group of `bmm_chunk`."""
    C_ptr, B_ptr, spans_ptr, CB_ptr = tensors
    C_strides, B_strides, CB_strides = strides
    # --- the program's tile, unless it lies above the diagonal or past the chunk's end
    Q_TILES: tl.constexpr = (S.CHUNK_SIZE + S.BLOCK_Q - 1) // S.BLOCK_Q
    S_TILES: tl.constexpr = (S.CHUNK_SIZE + S.BLOCK_S - 1) // S.BLOCK_S
    i_tile = tl.program_id(0) % (Q_TILES * S_TILES)
    unit = tl.program_id(0) // (Q_TILES * S_TILES)
    i_g, i_b, i_c, start, length = own_chunk(
        unit, spans_ptr, seqlen, ngroups, nchunks, S.CHUNK_SIZE
    )
    first_q, first_s = (i_tile // S_TILES) * S.BLOCK_Q, (i_tile % S_TILES) * S.BLOCK_S
    if (first_s >= first_q + S.BLOCK_Q) | (first_q >= length):
        return
    o_q, o_s = first_q + tl.arange(0, S.BLOCK_Q), first_s + tl.arange(0, S.BLOCK_S)
    m_q, m_s = o_q < length, o_s < length

    # --- sum over N, [BLOCK_Q, BLOCK_S]
    b_CB = tl.zeros((S.BLOCK_Q, S.BLOCK_S), dtype=tl.float32)
    for n in range(0, S.DSTATE, S.BLOCK_N):
        o_n = n + tl.arange(0, S.BLOCK_N)
        m_n = o_n < S.DSTATE
        # [BLOCK_Q, BLOCK_N] and [BLOCK_N, BLOCK_S]
        b_C = load_at(
            C_ptr,
            C_strides,
            (i_b, start + o_q[:, None], i_g, o_n[None, :]),
            mask=m_q[:, None] & m_n[None, :],
        )
        b_B = load_at(
            B_ptr,
            B_strides,
            (i_b, start + o_s[None, :], i_g, o_n[:, None]),
            mask=m_n[:, None] & m_s[None, :],
        )
        b_CB = tl.dot(b_C, b_B, b_CB, input_precision=DOT_PRECISION)

    store_at(CB_ptr, CB_strides, (i_b, i_c, i_g, o_q[:, None], o_s[None, :]), b_CB)


def bmm_chunk(inputs: SSDInputs, chunks: Chunks, precision: Precision) -> Tensor:
    """Stage 4: C B^T within each chunk, once per group.

        CB[q, s] = sum_n C[q, n] * B[s, n]      for s <= q

    Tiles above the diagonal or past the chunk's last position are not written.  What chunk_scan
    reads of them does not affect its output.

    In:   C, B (b, l, g, n)
    Out:  CB (b, c, g, q, s), fp32 if intermediates are exact and 16 bit if they are relaxed
    Grid: (b * c * g * q-tiles * s-tiles).  One program owns one tile.
    """
    ngroups, dstate = inputs.B.shape[2:]
    blocks = _blocks("bmm_chunk", inputs)
    CB = chunks.empty(
        ngroups, chunks.size, chunks.size, dtype=precision.intermediate_dtype(inputs.B.dtype)
    )
    tiles = triton.cdiv(chunks.size, blocks["block_q"]) * triton.cdiv(
        chunks.size, blocks["block_s"]
    )
    chunks.launch(
        _bmm_chunk_kernel,
        ngroups * tiles,
        ngroups,
        (inputs.C, inputs.B),
        (CB,),
        DSTATE=dstate,
        **_constants(blocks),
    )
    return CB


@triton.jit
def _chunk_scan_kernel(tensors, strides, seqlen, nheads, nchunks, heads_per_group, S: tl.constexpr):
    """One block of positions and one p-tile of one chunk of one head of `chunk_scan`."""
    (
        CB_ptr, x_ptr, dt_ptr, dA_cumsum_log2_ptr, C_ptr, prev_states_ptr, D_ptr, z_ptr, spans_ptr,
        out_ptr,
    ) = tensors  # fmt: skip
    (
        CB_strides, x_strides, dt_strides, dA_cumsum_log2_strides, C_strides, prev_states_strides,
        D_strides, z_strides, out_strides,
    ) = strides  # fmt: skip
    # --- the program's block [BLOCK_Q, BLOCK_P] of the output.  Heads of one chunk are in
    # neighbouring programs, because they share CB and C
    P_TILES: tl.constexpr = (S.HEADDIM + S.BLOCK_P - 1) // S.BLOCK_P
    Q_BLOCKS: tl.constexpr = S.CHUNK_SIZE // S.BLOCK_Q
    i_tile = tl.program_id(0) % (P_TILES * Q_BLOCKS)
    # `own_chunk` and `load_at` would do the same, but ptxas makes other instructions of them here
    i_bch = tl.program_id(0) // (P_TILES * Q_BLOCKS)
    i_h, i_bc = i_bch % nheads, i_bch // nheads
    i_b, i_c = i_bc // nchunks, i_bc % nchunks
    i_g = i_h // heads_per_group
    start, length = chunk_span(spans_ptr, i_c, seqlen, S.CHUNK_SIZE)
    first_q = (i_tile // P_TILES) * S.BLOCK_Q
    if first_q >= length:
        return
    first_p = (i_tile % P_TILES) * S.BLOCK_P
    o_q, o_p = first_q + tl.arange(0, S.BLOCK_Q), first_p + tl.arange(0, S.BLOCK_P)
    m_q, m_p = o_q < length, o_p < S.HEADDIM
    b_sum_q = tl.load(dA_cumsum_log2_ptr + ptr_offset((i_b, i_h, i_c, o_q), dA_cumsum_log2_strides))
    sum_first = tl.load(
        dA_cumsum_log2_ptr + ptr_offset((i_b, i_h, i_c, first_q), dA_cumsum_log2_strides)
    )

    # stage chunk_scan.previous: the contribution of the state that entered the chunk, decayed to
    # the block's first row
    b_out = tl.zeros((S.BLOCK_Q, S.BLOCK_P), dtype=tl.float32)
    for n in range(0, S.DSTATE, S.BLOCK_N):
        o_n = n + tl.arange(0, S.BLOCK_N)
        m_n = o_n < S.DSTATE
        b_C = tl.load(
            C_ptr + ptr_offset((i_b, start + o_q[:, None], i_g, o_n[None, :]), C_strides),
            mask=m_q[:, None] & m_n[None, :],
            other=0.0,
        )  # [BLOCK_Q, BLOCK_N]
        b_state = tl.load(
            prev_states_ptr
            + ptr_offset((i_b, i_c, i_h, o_p[None, :], o_n[:, None]), prev_states_strides),
            mask=m_n[:, None] & m_p[None, :],
            other=0.0,
        )  # [BLOCK_N, BLOCK_P]
        b_out = tl.dot(b_C, b_state.to(b_C.dtype), b_out, input_precision=DOT_PRECISION)
    b_out *= decay_exp2(sum_first)

    # stage chunk_scan.current: the contributions of the chunk's positions before the block, decayed
    # to its first row; then the decay of all contributions so far to each row
    for s in range(0, first_q, S.BLOCK_S):
        o_s = s + tl.arange(0, S.BLOCK_S)
        b_dt = tl.load(dt_ptr + ptr_offset((i_b, i_h, i_c, o_s), dt_strides))
        b_sum_s = tl.load(
            dA_cumsum_log2_ptr + ptr_offset((i_b, i_h, i_c, o_s), dA_cumsum_log2_strides)
        )
        b_CB = tl.load(CB_ptr + ptr_offset((i_b, i_c, i_g, o_q[:, None], o_s[None, :]), CB_strides))
        b_x = tl.load(
            x_ptr + ptr_offset((i_b, start + o_s[:, None], i_h, o_p[None, :]), x_strides),
            mask=m_p[None, :],
            other=0.0,
        )  # [BLOCK_S, BLOCK_P]
        b_weight = (decay_exp2(sum_first - b_sum_s) * b_dt).to(b_CB.dtype)
        b_out = tl.dot(
            (b_CB * b_weight[None, :]).to(b_x.dtype), b_x, b_out, input_precision=DOT_PRECISION
        )
    b_out *= decay_exp2(b_sum_q - sum_first)[:, None]

    # stage chunk_scan.current: the contributions of the block's positions
    for s in range(first_q, tl.minimum(first_q + S.BLOCK_Q, length), S.BLOCK_S):
        o_s = s + tl.arange(0, S.BLOCK_S)
        m_s = o_s < length
        b_dt = tl.load(dt_ptr + ptr_offset((i_b, i_h, i_c, o_s), dt_strides))
        b_sum_s = tl.load(
            dA_cumsum_log2_ptr + ptr_offset((i_b, i_h, i_c, o_s), dA_cumsum_log2_strides)
        )
        b_CB = tl.load(CB_ptr + ptr_offset((i_b, i_c, i_g, o_q[:, None], o_s[None, :]), CB_strides))
        b_x = tl.load(
            x_ptr + ptr_offset((i_b, start + o_s[:, None], i_h, o_p[None, :]), x_strides),
            mask=m_s[:, None] & m_p[None, :],
            other=0.0,
        )  # [BLOCK_S, BLOCK_P]
        b_weight = (decay_exp2(b_sum_q[:, None] - b_sum_s[None, :]) * b_dt[None, :]).to(b_CB.dtype)
        # CB above the diagonal was never written and may be NaN
        b_scores = tl.where(o_q[:, None] >= o_s[None, :], b_CB * b_weight, 0.0)
        b_out = tl.dot(b_scores.to(b_x.dtype), b_x, b_out, input_precision=DOT_PRECISION)

    # stage chunk_scan.residual: skip and gate
    row_index = (i_b, start + o_q[:, None], i_h, o_p[None, :])
    m = m_q[:, None] & m_p[None, :]
    if D_ptr is not None:
        if len(D_strides) == 2:
            b_D = tl.load(D_ptr + ptr_offset((i_h, o_p), D_strides), mask=m_p, other=0.0).to(
                tl.float32
            )[None, :]
        else:
            b_D = tl.load(D_ptr + ptr_offset((i_h,), D_strides)).to(tl.float32)
        b_out += b_D * tl.load(x_ptr + ptr_offset(row_index, x_strides), mask=m, other=0.0).to(
            tl.float32
        )
    if z_ptr is not None:
        b_z = tl.load(z_ptr + ptr_offset(row_index, z_strides), mask=m, other=0.0).to(tl.float32)
        b_out *= b_z * tl.sigmoid(b_z)
    tl.store(
        out_ptr + ptr_offset(row_index, out_strides), b_out.to(out_ptr.dtype.element_ty), mask=m
    )


def chunk_scan(
    inputs: SSDInputs,
    dt: Tensor,
    dA_cumsum_log2: Tensor,
    prev_states: Tensor,
    CB: Tensor,
    chunks: Chunks,
) -> Tensor:
    """Stage 5: the output, from the state that enters the chunk and from the chunk's own positions.

        a         = dA_cumsum_log2
        y[q, p]   = 2^a[q] * sum_n C[q, n] * prev_states[p, n]
                  + sum_{s <= q} CB[q, s] * 2^(a[q] - a[s]) * dt[s] * x[s, p]
        out[q, p] = (y[q, p] + D * x[q, p]) * silu(z[q, p])

    Let r be the first position of a program's block of q.  For every s before the block, 2^(a[q] -
    a[s]) = 2^(a[q] - a[r]) * 2^(a[r] - a[s]): one factor per row and one per column, both at most
    1.  Only blocks on the diagonal need an exponential per element.

    Intermediates have the dtype of CB.

    In:   x, z (b, l, h, p) | C (b, l, g, n) | D (h) or (h, p) | dt, dA_cumsum_log2 (b, h, c, q)
          fp32 | prev_states (b, c, h, p, n) | CB (b, c, g, q, s).  D and z may be None
    Out:  out (b, l, h, p) in x's dtype
    Grid: (b * c * h * q-blocks * p-tiles).  One program owns one block of positions of one chunk
          and head.
    """
    x = inputs.x
    nheads, headdim = x.shape[2:]
    blocks = _blocks("chunk_scan", inputs)
    if INTERPRETED:  # the interpreter takes as long for a large block as for a small one
        blocks["block_s"] = blocks["block_q"]
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    tiles = chunks.size // blocks["block_q"] * triton.cdiv(headdim, blocks["block_p"])
    chunks.launch(
        _chunk_scan_kernel,
        nheads * tiles,
        nheads,
        (CB, x, dt, dA_cumsum_log2, inputs.C, prev_states, inputs.D, inputs.z),
        (out,),
        inputs.heads_per_group,
        HEADDIM=headdim,
        DSTATE=inputs.C.shape[3],
        **_constants(blocks),
    )
    return out


# --- the pipeline


def ssd_unfused(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int = 256,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_states: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    precision: Precision = Precision(),  # noqa: B008
    batch_invariant: bool = False,  # noqa: ARG001
) -> SSDOutput:
    """The SSD (Mamba-2) operator in five launches, forward only.  Arguments and result are those of
    `ssd_fused`.

    chunk_size: positions per chunk, rounded down to a power of two from 16 to 256.
    batch_invariant: has no effect, because every call is batch invariant.

    precision: relaxed intermediates of fp32 inputs are bf16, in contrast to those of `ssd_fused`.
    A must be finite: a head with -inf gets NaN, because sums of -inf are subtracted.

    In contrast to `ssd_fused`, it does not support torch.compile(fullgraph=True).

    Raises ValueError for inputs that do not fit together, and UnsupportedError for inputs that
    `_refuse_unsupported` refuses, such as P above MAX_HEADDIM.
    """
    inputs = SSDInputs(
        x=x,
        dt=dt,
        A=A,
        B=B,
        C=C,
        chunk_size=chunk_size,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        initial_states=initial_states,
        cu_seqlens=cu_seqlens,
    )
    return run(inputs, precision)


def run(inputs: SSDInputs, precision: Precision = Precision()) -> SSDOutput:  # noqa: B008
    """Output in x's dtype, final states in fp32; with `state_every`, those on the way have been
    rounded to the state dtype.  Raises UnsupportedError for inputs that `_refuse_unsupported`
    refuses.
    """
    _refuse_unsupported(inputs)
    with torch.cuda.device(inputs.x.get_device()):  # no effect for -1, the CPU
        return five_stages(inputs, precision)


def five_stages(inputs: SSDInputs, precision: Precision) -> SSDOutput:
    """`run` without checks, on the current device."""
    chunks = Chunks.of(inputs)
    dt, dA_cumsum_log2 = chunk_cumsum(inputs, chunks)
    states = chunk_state(inputs, dt, dA_cumsum_log2, chunks, precision)
    prev_states, final_states = state_passing(inputs, states, dA_cumsum_log2, chunks, precision)
    del states  # CB can reuse its memory
    CB = bmm_chunk(inputs, chunks, precision)
    out = chunk_scan(inputs, dt, dA_cumsum_log2, prev_states, CB, chunks)
    if inputs.state_every:
        step = inputs.state_every // chunks.size
        final_states = torch.cat(
            [prev_states[:, step::step].float(), final_states[:, None]], 1
        ).flatten(0, 1)
    return SSDOutput(out, final_states)


def plan(inputs: SSDInputs, precision: Precision = Precision()) -> Plan:  # noqa: B008
    """The launches, configurations and workspace of a call.  Allocates and launches nothing.

    Not counted are 16 bytes per chunk and 8 per sequence for the table of packed sequences, and the
    launches and memory with which torch joins the states of `state_every`.
    """
    _refuse_unsupported(inputs)
    batch, _, nheads, headdim = inputs.x.shape
    ngroups, dstate = inputs.B.shape[2:]
    nchunks = batch * inputs.chunk_count
    size = inputs.power_of_two_chunk
    dtype = inputs.x.dtype
    gate_bytes = 2 * 4 * nchunks * nheads * size  # dt and dA_cumsum_log2, in fp32
    state_numbers = nchunks * nheads * headdim * dstate  # of `states`, and of `prev_states`
    CB_bytes = nchunks * ngroups * size**2 * precision.intermediate_dtype(dtype).itemsize
    launches, reason = 5, "five stages, one launch each"
    if inputs.cu_seqlens is not None:
        launches, reason = 6, f"{reason}, and one for the chunk table"
    config = {"chunk_size": size}
    for stage in UNFUSED:
        config |= {f"{stage}.{name}": value for name, value in _blocks(stage, inputs).items()}
    return Plan(
        variant="interpreter" if INTERPRETED else "portable",
        launches=launches,
        config=config,
        # CB takes the memory of `states`, which is fp32
        workspace_bytes=gate_bytes
        + precision.state_dtype.itemsize * state_numbers
        + max(4 * state_numbers, CB_bytes),
        reason=reason,
    )


def _blocks(stage: str, inputs: SSDInputs) -> dict[str, int]:
    """Block sizes and launch options of a stage, for the sizes of a call."""
    headdim = inputs.x.shape[3]
    dstate = inputs.B.shape[3]
    chunk = inputs.power_of_two_chunk
    gate = inputs.z is not None
    return unfused_blocks(
        stage, inputs.x.dtype, chunk=chunk, headdim=headdim, dstate=dstate, gate=gate
    )


def _refuse_unsupported(inputs: SSDInputs) -> None:
    """Raises UnsupportedError for P above MAX_HEADDIM or N above MAX_DSTATE, for inputs that
    require a gradient and, outside Triton's interpreter, for tensors that are not on a GPU.
    """
    for name, value, limit in (
        ("headdim", inputs.x.shape[3], MAX_HEADDIM),
        ("dstate", inputs.B.shape[3], MAX_DSTATE),
    ):
        if value > limit:
            raise UnsupportedError(f"unfused: {name} is at most {limit}, not {value}")
    refuse_gradient("unfused", vars(inputs).values())
    refuse_device("unfused", inputs.x, oldest=(0, 0))


def _keeps(inputs: SSDInputs) -> bool:
    """Whether the implementation can return the states after every `state_every` positions: if all
    of them lie between chunks, they are among `prev_states`.
    """
    return inputs.cu_seqlens is None and inputs.state_every % inputs.power_of_two_chunk == 0


register(Implementation(operator="ssd", name="unfused", run=run, plan=plan, keeps=_keeps))
