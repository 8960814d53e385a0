# mypy: allow-untyped-defs, allow-untyped-decorators
"""SSD, all five stages in one launch, in plain Triton: for sm_80 and newer, and for the interpreter.

    a_t   = sum_{s <= t in chunk} dt_s A log2(e)                                 chunk_cumsum
    h     = 2^(a_end) h + sum_t 2^(a_end - a_t) dt_t x_t B_t^T                   chunk_state, state_passing
    out_t = 2^(a_t) h C_t + sum_{s <= t} (C_t B_s) 2^(a_t - a_s) dt_s x_s        bmm_chunk, chunk_scan

A sequence is cut into segments, a segment into chunks.  One program owns one segment of one slice of one head's P, and
keeps the state in registers.  It goes over its segment twice: first backwards, for the state that the segment adds to a
zero state; then, once the segment before has handed over its state, forwards, for the output.  The last segment of a
sequence needs no first pass.  The chunk here is a matter of speed: it changes no result beyond rounding and has nothing
to do with `SSDInputs.chunk_size`.

The first pass stops where the decay to the segment's end has underflowed: what lies before would be multiplied by a
zero.  (A NaN or Inf there reaches later segments in the recurrence, and does not here.)

In:   x, z (b, l, h, p) | dt (b, l, h) | A, dt_bias (h) | B, C (b, l, g, n) | D (h) or (h, p)
      initial_states (sequences, h, p, n) | cu_seqlens (sequences + 1)
Out:  out (b, l, h, p), x's dtype | final_states (sequences, h, p, n) fp32
Work: gates (h * p-slices, 2, b * l) fp32: dt and a, written and read by one program
      states (sequences, h, p, n) state_dtype: the one that is being handed over; final_states itself if fp32
      sync (32 + 8 * sequences * h * p-slices) int32, zeroed: the ticket counter, and segments handed over per slice
Grid: (segments * h * p-slices), heads fastest, then sequences, then segments; for packed sequences an upper bound.
      The ticket and not the program's number says which segment: a program waits only for lower tickets, which have
      started, so that progress needs no more than one running program.
Oracle: `reference.py`.  Source: Dao and Gu 2024 (arXiv:2405.21060), section 6; docs/ssd-mathematics.md for segments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ssdprof.kernels._triton import DOT_PRECISION, TL_DTYPE, decay_exp2
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput

LOG2_E = tl.constexpr(math.log2(math.e))
FORGOTTEN = tl.constexpr(-160.0)  # 2^-160 is zero in fp32, with room for rounding: the least positive one is 2^-149
GATE_ROWS = tl.constexpr(8)  # chunks prepared side by side
SEQUENCE_BLOCK = tl.constexpr(128)  # packed sequences looked at side by side
FLAGS = tl.constexpr(32)  # where flags begin in sync, in int32
FLAG_STRIDE = tl.constexpr(8)  # one flag per 32-byte sector


# ---------------------------------------------------------------------------------------------------- which segment


@triton.jit
def take_ticket(sync_ptr, HANDOVER: tl.constexpr):
    """Earlier tickets belong to programs that run or have ended.  Where nobody waits, the program's number will do."""
    if HANDOVER:
        return tl.atomic_add(sync_ptr, 1, sem="relaxed")
    else:
        return tl.program_id(0)


@triton.jit
def segment_chunks(nchunks, MIN_CHUNKS: tl.constexpr, MAX_CHUNKS: tl.constexpr, MAX_SEGMENTS: tl.constexpr):
    """Chunks per segment of a sequence of `nchunks`.  It depends on nothing else, for the sake of batch invariance."""
    return tl.minimum(tl.maximum(tl.cdiv(nchunks, MAX_SEGMENTS), MIN_CHUNKS), MAX_CHUNKS)


@triton.jit
def find_segment(rank, cu_seqlens_ptr, cu_seqlens_stride, sequences, CHUNK: tl.constexpr, RULE: tl.constexpr):
    """(sequence, segment, first position, length) of the `rank`-th segment of packed sequences; sequence -1 past the
    last."""
    sequence = -1
    segment = 0
    begin = tl.zeros((), tl.int64)
    length = tl.zeros((), tl.int64)
    before = 0
    for block in range(0, sequences, SEQUENCE_BLOCK):
        o_s = block + tl.arange(0, SEQUENCE_BLOCK)
        m_s = o_s < sequences
        start = tl.load(cu_seqlens_ptr + o_s * cu_seqlens_stride, mask=m_s, other=0).to(tl.int64)
        stop = tl.load(cu_seqlens_ptr + (o_s + 1) * cu_seqlens_stride, mask=m_s, other=0).to(tl.int64)
        nchunks = tl.cdiv(stop - start, CHUNK).to(tl.int32)
        # an empty sequence has one empty segment, which hands its initial state on as its final one
        segments = tl.maximum(tl.cdiv(nchunks, segment_chunks(nchunks, RULE[0], RULE[1], RULE[2])), 1)
        segments = tl.where(m_s, segments, 0)
        after = before + tl.cumsum(segments, axis=0)
        mine = (after - segments <= rank) & (rank < after)
        sequence += tl.sum(tl.where(mine, o_s + 1, 0), axis=0)
        segment += tl.sum(tl.where(mine, rank - (after - segments), 0), axis=0)
        begin += tl.sum(tl.where(mine, start, 0), axis=0)
        length += tl.sum(tl.where(mine, stop - start, 0), axis=0)
        before += tl.sum(segments, axis=0)
    return sequence, segment, begin, length


# ------------------------------------------------------------------------------------------------------- the stages
# Pointers come as (a scalar base, 64 bit) + (a constant tile of offsets): the base moves from chunk to chunk, and the
# tile costs no registers where its strides are compile-time constants.


@triton.jit
def softplus(v):
    """log(1 + exp(v)) without overflow, and without losing the tail of small exp(v)."""
    e = tl.exp2(-tl.abs(v) * LOG2_E)
    u = 1.0 + e
    # log(u) belongs to the rounded u; e / (u - 1) takes the rounding back
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL) + log1p


@triton.jit
def chunk_cumsum(
    dt_ptr, dt_stride, A, dt_bias, dt_low, dt_high, gates_ptr, gates_plane, first, count, length,
    DT_SOFTPLUS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Stage 1, for chunks first .. first + count - 1 at once: dt and a to memory.

    Returns how many chunks, counted from the segment's end, can still be felt there.  Kept in memory, because every
    other stage wants these vectors in another layout, and a load makes that cheaper than an exchange between threads.
    """
    o_r, o_q = tl.arange(0, GATE_ROWS), tl.arange(0, CHUNK)
    felt = 0
    tail = 0.0  # decay from the end of a chunk to the segment's end, log2
    for block in range(0, tl.cdiv(count, GATE_ROWS)):
        row = count - (block + 1) * GATE_ROWS + o_r
        t = (first + row)[:, None] * CHUNK + o_q[None, :]
        m = (row >= 0)[:, None] & (t < length)
        dt = tl.load(dt_ptr + t.to(tl.int64) * dt_stride, mask=m, other=0.0).to(tl.float32) + dt_bias
        if DT_SOFTPLUS:
            dt = softplus(dt)
        dt = tl.where(m, tl.clamp(dt, dt_low, dt_high, propagate_nan=tl.PropagateNan.ALL), 0.0)
        # a step past FORGOTTEN decays to zero like FORGOTTEN, and would cost later differences their digits
        dA = tl.maximum(dt * (A * LOG2_E), FORGOTTEN, propagate_nan=tl.PropagateNan.ALL)
        a = tl.cumsum(dA, axis=1)
        tl.store(gates_ptr + t, dt, mask=m)
        tl.store(gates_ptr + gates_plane + t, a, mask=m)
        end = tl.sum(tl.where(o_q[None, :] == CHUNK - 1, a, 0.0), axis=1)
        later = tail + (tl.cumsum(end, axis=0, reverse=True) - end)
        felt += tl.sum(tl.where((row < 0) | (later <= FORGOTTEN), 0, 1), axis=0)
        tail += tl.sum(end, axis=0)
    tl.debug_barrier()  # the stages below read what other threads wrote here
    return felt


@triton.jit
def chunk_state(
    state, x, B, gates_ptr, gates_plane, t, length, tail, CHUNK: tl.constexpr, P_ROWS: tl.constexpr, DTYPE: tl.constexpr
):
    """Stage 2: state + sum_t 2^(a_end - a_t + tail) dt_t x_t B_t^T."""
    o_q = tl.arange(0, CHUNK)
    m_q = o_q < length - t
    dt = tl.load(gates_ptr + t + o_q, mask=m_q, other=0.0)
    a = tl.load(gates_ptr + gates_plane + t + o_q, mask=m_q, other=0.0)
    end = tl.load(gates_ptr + gates_plane + tl.minimum(t + CHUNK, length) - 1)
    weight = tl.exp2(tl.minimum(end - a + tail, 0.0, propagate_nan=tl.PropagateNan.ALL)) * dt
    x = (x.to(DTYPE) * weight.to(DTYPE)[:, None]).to(B.dtype)
    if P_ROWS:
        return tl.dot(tl.trans(x), B, state, input_precision=DOT_PRECISION)
    else:
        return tl.dot(tl.trans(B), x, state, input_precision=DOT_PRECISION)


@triton.jit
def segment_state(
    x_ptr, x_tile, m_x, B_ptr, B_tile, gates_ptr, gates_plane, first, count, felt, length, state,
    CHUNK: tl.constexpr, P_ROWS: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Stage 2 over a segment, from its end backwards: (what it adds to a zero state, log2 of its decay).

    Only the last `felt` chunks are read.  If those are not all, the decay comes out below FORGOTTEN, that is, as zero.
    """
    tail = 0.0
    for i in tl.range(0, felt, num_stages=STAGES):
        t = (first + count - 1 - i) * CHUNK
        x = load_rows(x_ptr, x_tile, m_x, t, length, CHUNK, ALIGNED)
        B = load_rows(B_ptr, B_tile, None, t, length, CHUNK, ALIGNED)
        state = chunk_state(state, x, B, gates_ptr, gates_plane, t, length, tail, CHUNK, P_ROWS, DTYPE)
        tail += tl.load(gates_ptr + gates_plane + tl.minimum(t + CHUNK, length) - 1)
    return state, tail
