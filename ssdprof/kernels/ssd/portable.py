"""SSD, all five stages in one launch, in plain Triton: for sm_80 and newer, and for the
interpreter.

    a_q   = sum_{s <= q} dt_s A log2(e)                                      chunk_cumsum
    h     = 2^(a_end) h + sum_q 2^(a_end - a_q) dt_q x_q B_q^T               chunk_state,
                                                                             state_passing
    out_q = 2^(a_q) h C_q + sum_{s <= q} (C_q B_s) 2^(a_q - a_s) dt_s x_s    bmm_chunk, chunk_scan

for the positions q and s of a chunk, from the state h that enters it; then the skip D x_q, and the
gate silu(z_q).

A sequence is cut into segments, and a segment into chunks.  One program owns one segment of one
slice of one head's P, and keeps the state in registers.  It reads its segment twice.  The first
pass runs backwards and computes the state that the segment adds to a zero state.  Then the program
waits for the state of the preceding segment.  The second pass runs forwards and computes the
output.  The last segment of a sequence needs no first pass.  The chunk size affects only speed and
rounding, and is independent of `SSDInputs.chunk_size`.

The first pass stops where the decay to the segment's end underflows.  (A NaN or Inf before that
reaches later segments in the recurrence, but not here.)

In:   x, z (b, l, h, p) | dt (b, l, h) | A, dt_bias (h) | B, C (b, l, g, n) | D (h) or (h, p)
      initial_states (sequences, h, p, n) | cu_seqlens (sequences + 1)
Out:  out (b, l, h, p), x's dtype | final_states (sequences, h, p, n) fp32
Work: gates (h * p-slices, 2, b * l) fp32 plus one chunk: dt and a, written and read by the same
          program
      CB (b, chunks, g, q, s) fp32, if inputs are fp32 and not packed: C B^T of each chunk, by a
          launch before this one.  In this launch, every slice of every head would compute it again,
          and it would be a third of the products
      states (sequences, h, p, n) state_dtype: the state that segments hand over; if that is fp32,
          final_states itself
      sync int32, zeroed: the ticket counter, and per sequence, head and slice the number of
          segments that have handed over their state
Grid: (segments * h * p-slices), slices fastest, then heads, sequences, segments; for packed
      sequences, segments before sequences, and an upper bound.  Where segments hand over states,
      the ticket and not the program id selects the segment.  A program waits only for lower
      tickets, whose programs have started, so that progress does not require two programs to run at
      the same time.

Shapes in functions: x, z, out (q, p) | B, C (q, n) | CB (q, s) | state (p, n) if P_ROWS, else (n,
p) | dt, a (q).  In names, o_ is a vector of indices and m_ a mask; `t` is the first position of a
chunk, counted from the beginning of the sequence.

N is cut into blocks, `step` elements apart in memory, and the state is a tuple of blocks.  The last
block is zero past N, because B and C are read with a mask.  A sum over N is the sum of the blocks'
sums: tensor cores round towards zero when they add products, but sums of blocks are rounded to
nearest.  With several blocks, each stage loads its blocks again, because registers cannot hold all
of them until the next stage.

The pointers of a tile are a scalar 64-bit base, which advances by chunks, and a tile of offsets,
which costs no registers if its strides are compile-time constants.

Rows at or past `length` belong to another sequence, or lie outside of the tensor, and are never
read or written.  ALIGNED means that no chunk has such rows.  Only gates are read past `length`,
because a mask per vector would be one instruction in eight.  Their values there affect neither the
state nor a stored row.

Oracle: `reference.py`.  Source: Dao and Gu 2024 (arXiv:2405.21060), section 6;
docs/ssd-mathematics.md for segments.
"""

from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ssdprof.kernels.functions import (
    DOT_PRECISION,
    LOG2_E,
    TL_DTYPE,
    decay_exp2,
    load_at,
    ptr_offset,
    softplus,
)
from ssdprof.kernels.inputs import PreparedLaunch
from ssdprof.kernels.launch import Launcher
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.config import SSDPortableConfig, whole_block
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.ssd.launch import Buffers, prepared
from ssdprof.kernels.ssd.unfused import _bmm_chunk_kernel
from ssdprof.kernels.tensors import offset_dtype, strides_of, strides_of_each, tile_strides

FLAGS = tl.constexpr(32)  # index of the first flag in `sync`, whose first number is the ticket
FLAG_STRIDE = tl.constexpr(8)  # int32 per flag: a 32-byte sector
# a log2 below which a decay is zero in fp32, whose smallest number is 2^-149; the margin is for
# rounding
FORGOTTEN = tl.constexpr(-160.0)
SEQUENCE_BLOCK = tl.constexpr(128)  # packed sequences per iteration of `find_segment`
GATE_ROWS = tl.constexpr(8)  # chunks per iteration of `chunk_cumsum`

# stages of functions: `stalls/attribute.py`
STAGES = {
    "take_ticket": "ticket", "segment_chunks": "ticket", "find_segment": "ticket",
    "wait_for_state": "state_passing.wait", "take_state": "state_passing.load",
    "take_initial_state": "state_passing.load",
    "hand_over_state": "state_passing.store", "chunk_cumsum": "chunk_cumsum",
    "chunk_state": "chunk_state", "add_outer_products": "chunk_state",
    "segment_state": "chunk_state", "chunk_products": "bmm_chunk",
    "scan_current": "chunk_scan.current", "scan_residual": "chunk_scan.residual",
    "_fused_kernel": "setup",
}  # fmt: skip


class TokenRows(NamedTuple):
    """The rows of a sequence in a tensor, one per position, for one head or group."""

    ptr: Any  # to the row of position 0
    tile: Any  # offsets of a chunk's rows and columns, (q, p) or (q, n), from its first row
    stride: Any  # between positions, in elements
    step: Any = 0  # between blocks of N, in elements


# --- the segment of a program


@triton.jit
def take_ticket(sync_ptr, HANDOVER: tl.constexpr):
    """The program's ticket.  Lower tickets belong to programs that run or have ended.

    Without a hand-over between segments the program id is sufficient.
    """
    if HANDOVER:
        return tl.atomic_add(sync_ptr, 1, sem="relaxed")
    else:
        return tl.program_id(0)


@triton.jit
def segment_chunks(nchunks, RULE: tl.constexpr):
    """Chunks per segment of a sequence of `nchunks`, as in `SSDPortableConfig.segment_chunks`.

    RULE: max_segments, min_chunks and max_chunks
    """
    return tl.minimum(tl.maximum(tl.cdiv(nchunks, RULE[0]), RULE[1]), RULE[2])


@triton.jit
def find_segment(
    rank, cu_seqlens_ptr, cu_seqlens_stride, sequences, CHUNK: tl.constexpr, RULE: tl.constexpr
):
    """(sequence, segment, first position, length) of the `rank`-th segment of packed sequences.

    The sequence is -1 if the segment does not exist.
    """
    # before: segments of all sequences in earlier blocks.  `has_rank` holds only for the sequence
    # that has the segment, so that each sum over `has_rank` has at most one term
    sequence, segment, before = -1, 0, 0
    begin, length = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for block in range(0, sequences, SEQUENCE_BLOCK):
        o_s = block + tl.arange(0, SEQUENCE_BLOCK)
        m_s = o_s < sequences
        begin_ptr = cu_seqlens_ptr + o_s.to(tl.int64) * cu_seqlens_stride
        start = tl.load(begin_ptr, mask=m_s, other=0).to(tl.int64)
        stop = tl.load(begin_ptr + cu_seqlens_stride, mask=m_s, other=0).to(tl.int64)
        nchunks = tl.cdiv(stop - start, CHUNK).to(tl.int32)
        # an empty sequence has one segment without chunks, which copies the initial state to the
        # final state
        segments = tl.maximum(tl.cdiv(nchunks, segment_chunks(nchunks, RULE)), 1)
        segments = tl.where(m_s, segments, 0)
        after = before + tl.cumsum(segments, axis=0)
        has_rank = (after - segments <= rank) & (rank < after)
        sequence += tl.sum(tl.where(has_rank, o_s + 1, 0), axis=0)
        segment += tl.sum(tl.where(has_rank, rank - (after - segments), 0), axis=0)
        begin += tl.sum(tl.where(has_rank, start, 0), axis=0)
        length += tl.sum(tl.where(has_rank, stop - start, 0), axis=0)
        before += tl.sum(segments, axis=0)
    return sequence, segment, begin, length.to(tl.int32)


# --- states


@triton.jit
def zero_state(tile, S: tl.constexpr):
    """A zero state: a tuple of blocks of N, each of the shape of `tile`."""
    blocks = ()
    for _ in tl.static_range((S.DSTATE + S.BLOCK_N - 1) // S.BLOCK_N):
        blocks = blocks + (tl.zeros(tile.shape, tl.float32),)
    return blocks


@triton.jit
def wait_for_state(flag_ptr, segment):
    """Stage 3: wait until the preceding segment has handed over its state: the flag counts the
    segments that have.
    """
    while tl.atomic_add(flag_ptr, 0, sem="acquire") < segment:
        pass


@triton.jit
def state_mask(m_state, k: tl.constexpr, S: tl.constexpr):
    """Mask of block k of a state: inside P (`m_state`) and inside N."""
    if (k + 1) * S.BLOCK_N > S.DSTATE:
        m_n = tl.arange(0, S.BLOCK_N) < S.DSTATE - k * S.BLOCK_N
        return m_state & (m_n[None, :] if S.P_ROWS else m_n[:, None])
    else:
        return m_state


@triton.jit
def take_state(ptr, tile, step, m_state, S: tl.constexpr):
    """Stage 3: load a state and convert it to fp32.  Bypasses L1, whose lines may be outdated.

    tile: offsets of a block of N.  step: between blocks.  m_state: mask of P
    """
    state = ()
    for k in tl.static_range((S.DSTATE + S.BLOCK_N - 1) // S.BLOCK_N):
        m = state_mask(m_state, k, S)
        block = tl.load(ptr + k * step + tile, mask=m, other=0.0, cache_modifier=".cg")
        state = state + (block.to(tl.float32),)
    return state


@triton.jit
def take_initial_state(ptr, strides, index, p, n, m_state, S: tl.constexpr):
    """Stage 3: load the caller's state, which begins at `index` of a strided tensor.

    index: (sequence, head, first p).  p, n: indices of a block of N, from there on
    """
    tile = p * strides[2] + n * strides[3]
    step = ptr_offset((S.BLOCK_N,), strides[3:])
    return take_state(ptr + ptr_offset(index, strides), tile, step, m_state, S)


@triton.jit
def store_state(ptr, tile, m_state, state, S: tl.constexpr):
    """Store a state in contiguous memory, in stage 3 or at a sequence's end."""
    for k in tl.static_range(len(state)):
        m = state_mask(m_state, k, S)
        tl.store(ptr + k * S.BLOCK_N + tile, state[k].to(ptr.dtype.element_ty), mask=m)


@triton.jit
def hand_over_state(
    states_ptr, tile, m_state, flag_ptr, entering, added, decay_log2, S: tl.constexpr
):
    """Stage 3: store the state that leaves the segment in the place of the one that the preceding
    segment stored there, and count the segment in the flag.

    states_ptr, tile, m_state: where states are handed over, and their mask.
    flag_ptr: where the segments of the sequence that have handed over their states are counted.
    entering: the state that entered the segment; if it is the first, zeros or the caller's initial
        state, which was not at states_ptr.
    added: the state that the segment adds.  decay_log2: log2 of
        the segment's decay
    """
    decay = decay_exp2(decay_log2)
    leaving = ()
    for k in tl.static_range(len(entering)):
        leaving = leaving + (entering[k] * decay + added[k],)
    tl.debug_barrier()  # all threads have read the entering state
    store_state(states_ptr, tile, m_state, leaving, S)
    tl.debug_barrier()  # all threads have stored the leaving state
    tl.atomic_add(flag_ptr, 1, sem="release")


# --- the stages inside a segment


@triton.jit
def load_block(rows, t, k: tl.constexpr, m, S: tl.constexpr, AGAIN: tl.constexpr):
    """Load block k of B or C of the chunk at position t: (q, BLOCK_N).

    rows: `TokenRows` of B or C.  m: mask of positions (q, 1), or None.
    AGAIN: load the block even if the compiler could reuse an earlier load, which has another cache
        modifier
    """
    if (k + 1) * S.BLOCK_N > S.DSTATE:
        m_n = (tl.arange(0, S.BLOCK_N) < S.DSTATE - k * S.BLOCK_N)[None, :]
        m = m_n if m is None else m & m_n
    pointers = rows.ptr + tl.cast(t, tl.int64) * rows.stride + k * rows.step + rows.tile
    return tl.load(
        pointers, mask=m, other=None if m is None else 0.0, cache_modifier=".ca" if AGAIN else ""
    )


@triton.jit
def chunk_cumsum(
    dt_ptr, dt_stride, A, dt_bias, dt_low, dt_high, gates, first, count, length, S: tl.constexpr
):  # fmt: skip
    """Stage 1 for the chunks first .. first + count - 1, backwards and several at once: store dt
    and a in memory.

    The other stages need them in several layouts, and a load in the right layout is cheaper than an
    exchange between threads in every chunk.

    dt_ptr, dt_stride: pointer to the head's dt of the sequence's position 0, before bias and
        softplus, and the distance between positions.
    dt_low, dt_high: limits of dt.  length: positions of the sequence.
    gates: pointer to the place of the resulting dt of the sequence's position 0, and the distance
        from there to the place of a of the same position.  So gates[0] + t is dt of position t, and
        gates[0] + gates[1] + t its a, here and in all functions below

    Returns how many chunks, from the last one backwards, have a decay to the segment's end that is
    not zero.
    """
    o_r, o_q = tl.arange(0, GATE_ROWS), tl.arange(0, S.CHUNK)
    relevant = 0
    tail = 0.0  # log2 of the decay from a block of chunks to the segment's end
    for block in range(0, tl.cdiv(count, GATE_ROWS)):
        row = count - (block + 1) * GATE_ROWS + o_r
        t = (first + row)[:, None] * S.CHUNK + o_q[None, :]
        m = (row >= 0)[:, None] & (t < length)
        dt = (
            tl.load(dt_ptr + t.to(tl.int64) * dt_stride, mask=m, other=0.0).to(tl.float32) + dt_bias
        )
        if S.DT_SOFTPLUS:
            dt = softplus(dt)
        dt = tl.where(m, tl.clamp(dt, dt_low, dt_high, propagate_nan=tl.PropagateNan.ALL), 0.0)
        # a step below FORGOTTEN decays to zero anyway, and would cost later differences their
        # precision
        dA = tl.maximum(dt * (A * LOG2_E), FORGOTTEN, propagate_nan=tl.PropagateNan.ALL)
        a = tl.cumsum(dA, axis=1)
        tl.store(gates[0] + t, dt, mask=m)
        tl.store(gates[0] + gates[1] + t, a, mask=m)
        # of each chunk: log2 of its decay, and of the decay from its end to the segment's end
        end = tl.sum(tl.where(o_q[None, :] == S.CHUNK - 1, a, 0.0), axis=1)
        later = tail + (tl.cumsum(end, axis=0, reverse=True) - end)
        relevant += tl.sum(tl.where((row < 0) | (later <= FORGOTTEN), 0, 1), axis=0)
        tail += tl.sum(end, axis=0)
    tl.debug_barrier()  # all gates are stored before other threads read them
    return relevant


@triton.jit
def chunk_state(state, x, B_rows, gates, t, length, tail, S: tl.constexpr, ALIGNED: tl.constexpr):
    """Stage 2: 2^(a_end) state + sum_q 2^(a_end - a_q) dt_q x_q B_q^T, the state after the chunk.

    x: (q, p).  B_rows: `TokenRows` of B.  gates: see `chunk_cumsum`.
    t, length: first position of the chunk, and positions of the sequence.
    ALIGNED: all positions of the chunk are inside the sequence.
    tail: None in the second pass.  In the first pass, log2 of the decay from the chunk's end to the
        segment's end; the result is then state + sum_q 2^(a_end - a_q + tail) dt_q x_q B_q^T.  In
        the first pass, the weighted x is rounded to x's dtype, which affects only later segments
    """
    AGAIN: tl.constexpr = tail is None and len(state) > 1
    o_q = tl.arange(0, S.CHUNK)
    m_q = None if tail is not None else ((o_q < length - t) | ALIGNED)[:, None]
    # the weights of positions (q), from their dt and a (`gates`), and weighted x: rounded, and its
    # rounding error
    dt = tl.load(gates[0] + t + o_q)
    a = tl.load(gates[0] + gates[1] + t + o_q)
    end = tl.load(
        gates[0] + gates[1] + (t + S.CHUNK if ALIGNED else tl.minimum(t + S.CHUNK, length)) - 1
    )
    exponent = end - a if tail is None else end - a + tail
    weight = decay_exp2(exponent) * dt
    weight = tl.where((o_q < length - t) | ALIGNED, weight, 0.0)
    weighted = x.to(S.INTERMEDIATE) * weight.to(S.INTERMEDIATE)[:, None]
    rounded = weighted.to(x.dtype)
    lost = (weighted - rounded.to(S.INTERMEDIATE)).to(x.dtype)
    # the products with B, block by block of N
    decay = decay_exp2(end)
    blocks = ()
    for k in tl.static_range(len(state)):
        block = state[k]
        B = load_block(B_rows, t, k, m_q, S, AGAIN)
        if tail is None:
            # also multiply the rounding error of the weighted x: a term of the state is then
            # rounded once on its way to the output, as a term of the chunk is (docs/kernels.md).
            # This product comes first; nothing in this chunk waits for the second one
            block *= decay
            if S.INTERMEDIATE.primitive_bitwidth > x.dtype.primitive_bitwidth:
                block = add_outer_products(block, lost, B, S)
        blocks = blocks + (add_outer_products(block, rounded, B, S),)
    return blocks


@triton.jit
def add_outer_products(block, x, B, S: tl.constexpr):
    """block + sum_t x_t B_t^T, for one block of N."""
    if S.P_ROWS:
        return tl.dot(tl.trans(x), B, block, input_precision=S.PRODUCT)
    else:
        return tl.dot(tl.trans(B), x, block, input_precision=S.PRODUCT)


@triton.jit
def segment_state(
    state, x_rows, m_p, B_rows, gates, first, count, relevant, length, S: tl.constexpr
):
    """Stage 2 for a segment, the first pass, from its end backwards.  Returns the state that the
    segment adds to a zero state, and log2 of the segment's decay.

    state: zeros.  relevant: result of `chunk_cumsum`.  Others: see `scan_segment`

    Reads only the last `relevant` chunks.  If these are not all, the returned log2 is at most
    FORGOTTEN, which counts as a decay of zero.  Another segment follows, so that all chunks are
    full.
    """
    tail = 0.0
    for i in tl.range(0, relevant, num_stages=S.STATE_STAGES):
        t = (first + count - 1 - i) * S.CHUNK
        x = tl.load(
            x_rows.ptr + tl.cast(t, tl.int64) * x_rows.stride + x_rows.tile, mask=m_p, other=0.0
        )
        state = chunk_state(state, x, B_rows, gates, t, length, tail, S, True)
        tail += tl.load(gates[0] + gates[1] + t + S.CHUNK - 1)
    return state, tail


@triton.jit
def chunk_products(state, C_rows, B_rows, CB_ptr, gates, t, length, S: tl.constexpr):
    """Stage 4, C B^T (q, s), and the first term of stage 5, 2^(a_q) h C_q (q, p).  Both are summed
    in one loop over blocks of N, so that C is read once.

    state: the state h that enters the chunk.  C_rows, B_rows: `TokenRows`.
    CB_ptr: C B^T of the chunk, if an earlier launch has computed it, else None.
    Others: see `chunk_state`
    """
    o_q = tl.arange(0, S.CHUNK)
    m_q = ((o_q < length - t) | S.ALIGNED)[:, None]
    CB = tl.zeros((S.CHUNK, S.CHUNK), tl.float32)
    if CB_ptr is not None:
        CB = tl.load(CB_ptr + o_q[:, None] * S.CHUNK + o_q[None, :])
    out = tl.zeros((S.CHUNK, S.BLOCK_P), tl.float32)
    for k in tl.static_range(len(state)):
        C = load_block(C_rows, t, k, m_q, S, False)
        if CB_ptr is None:
            B = load_block(B_rows, t, k, m_q, S, False)
            CB = tl.dot(C, tl.trans(B), CB, input_precision=S.PRODUCT)
        # stage chunk_scan.previous: the product with the state that entered the chunk
        block = tl.trans(state[k]) if S.P_ROWS else state[k]
        out = tl.dot(C, block.to(C.dtype), out, input_precision=S.PRODUCT)
        # stage bmm_chunk: the next block
    # stage chunk_scan.previous: the decay of each position
    a = tl.load(gates[0] + gates[1] + t + o_q)
    decay = decay_exp2(a)
    return CB, out * decay[:, None]


@triton.jit
def scan_current(out, CB, x_rows, m_p, gates, t, length, S: tl.constexpr):
    """Stage 5: add the terms of the chunk's positions, sum_{s <= q} (C_q B_s) 2^(a_q - a_s) dt_s
    x_s, to `out`.  Returns (out, x).

    out, CB: of `chunk_products`.  x_rows: `TokenRows` of x.  m_p: mask of P (1, p).  Others: see
        `chunk_state`
    """
    o_q = tl.arange(0, S.CHUNK)
    m_q = (o_q < length - t) | S.ALIGNED
    x = tl.load(
        x_rows.ptr + tl.cast(t, tl.int64) * x_rows.stride + x_rows.tile,
        mask=m_q[:, None] & m_p,
        other=0.0,
    )
    dt = tl.load(gates[0] + t + o_q)
    a = tl.load(gates[0] + gates[1] + t + o_q)
    # `decay_exp2` inlined by hand: with a call, the kernel for packed sequences with N = 256 needs
    # 16 bytes more of stack (Triton 3.6, sm_90)
    decay = tl.exp2(tl.minimum(a[:, None] - a[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL))
    scores = CB.to(S.INTERMEDIATE) * (decay * dt[None, :]).to(S.INTERMEDIATE)
    scores = tl.where(o_q[:, None] >= o_q[None, :], scores, 0.0)
    return tl.dot(scores.to(x.dtype), x, out, input_precision=S.PRODUCT), x


@triton.jit
def scan_residual(out, x, D, z_rows, out_rows, m_p, t, length, S: tl.constexpr):
    """Stage 5: add the skip D x, multiply by the gate silu(z), and store the output.

    out, x: (q, p), the output so far in fp32, and x.  m_p: mask of P (1, p).
    D: of `skip_weights`, or None.  z_rows, out_rows: `TokenRows` of z and of the output; z_rows is
        None without a gate.  t, length: see `chunk_state`
    """
    m = ((tl.arange(0, S.CHUNK) < length - t) | S.ALIGNED)[:, None] & m_p
    if D is not None:
        out += D * x.to(tl.float32)
    if z_rows is not None:
        z = tl.load(
            z_rows.ptr + tl.cast(t, tl.int64) * z_rows.stride + z_rows.tile, mask=m, other=0.0
        ).to(tl.float32)
        # z sigmoid(z), where sigmoid(z) = 1 / (1 + 2^(-z log2(e))) is the square of a reciprocal
        # root: a division would take six more instructions
        root = tl.rsqrt(1.0 + tl.exp2(-z * LOG2_E))
        out *= z * (root * root)
    tl.store(
        out_rows.ptr + tl.cast(t, tl.int64) * out_rows.stride + out_rows.tile,
        out.to(out_rows.ptr.dtype.element_ty),
        mask=m,
    )


@triton.jit
def skip_weights(D_ptr, D_strides, i_h, o_p, m_p):
    """D of head i_h in fp32: a number, or a row (1, p)."""
    if len(D_strides) == 2:
        return load_at(D_ptr, D_strides, (i_h, o_p), m_p).to(tl.float32)[None, :]
    else:
        return load_at(D_ptr, D_strides, (i_h,)).to(tl.float32)


@triton.jit
def scan_segment(
    state, x_rows, B_rows, C_rows, z_rows, out_rows, D, CB_ptr, gates, m_p, first, count, length,
    S: tl.constexpr,
):  # fmt: skip
    """Stages 4, 5 and 2 of the chunks first .. first + count - 1, one after another, from the state
    that enters the segment.  Returns the state that leaves it.

    x_rows, B_rows, C_rows, z_rows, out_rows: `TokenRows` of these tensors; z_rows is None without a
        gate.
    D: of `skip_weights`, or None.  gates: see `chunk_cumsum`.  m_p: mask of P (1, p).
    CB_ptr: C B^T of the sequence's first chunk and the head's group, if an earlier launch has
        computed it, else None.
    length: positions of the sequence
    """
    for i_c in tl.range(first, first + count, num_stages=S.SCAN_STAGES):
        t = i_c * S.CHUNK
        CB_chunk = None
        if CB_ptr is not None:
            CB_step = S.HEADS // S.HEADS_PER_GROUP * (S.CHUNK * S.CHUNK)  # between chunks
            CB_chunk = CB_ptr + tl.cast(i_c, tl.int64) * CB_step
        CB, out = chunk_products(state, C_rows, B_rows, CB_chunk, gates, t, length, S)
        out, x = scan_current(out, CB, x_rows, m_p, gates, t, length, S)
        state = chunk_state(state, x, B_rows, gates, t, length, None, S, S.ALIGNED)
        scan_residual(out, x, D, z_rows, out_rows, m_p, t, length, S)
    return state


# --- the kernel


@triton.jit(do_not_specialize=["seqlen", "sequences"])
def _fused_kernel(tensors, strides, seqlen, sequences, dt_low, dt_high, S: tl.constexpr):
    """All five stages of one slice of P of one segment of one head; the state is in registers."""
    (
        x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, initial_states_ptr,
        cu_seqlens_ptr, out_ptr, final_states_ptr, gates_ptr, states_ptr, sync_ptr, CB_ptr,
    ) = tensors  # fmt: skip
    (
        x_strides, dt_strides, A_strides, B_strides, C_strides, D_strides, z_strides,
        dt_bias_strides, initial_states_strides, cu_seqlens_strides, out_strides,
    ) = strides  # fmt: skip
    # stage ticket: the program's slice and segment, and the segment's chunks
    SLICES: tl.constexpr = (S.HEADDIM + S.BLOCK_P - 1) // S.BLOCK_P
    ticket = take_ticket(sync_ptr, S.HANDOVER)
    unit, rank = ticket % (S.HEADS * SLICES), ticket // (S.HEADS * SLICES)
    i_h, first_p = unit // SLICES, (unit % SLICES) * S.BLOCK_P
    if cu_seqlens_ptr is None:
        sequence, segment = rank % sequences, rank // sequences
        begin, length = tl.zeros((), tl.int64), seqlen
        # row of the batch, and index of the sequence's first position among those of all rows
        i_b, position = sequence, tl.cast(sequence, tl.int64) * seqlen
    else:
        sequence, segment, begin, length = find_segment(
            rank, cu_seqlens_ptr, cu_seqlens_strides[0], sequences, S.CHUNK, S.RULE
        )
        if sequence < 0:  # there is no such segment
            return
        i_b, position = 0, begin
    nchunks = tl.cdiv(length, S.CHUNK)
    per_segment = segment_chunks(nchunks, S.RULE)
    first = segment * per_segment
    count = tl.minimum(per_segment, nchunks - first)
    last = first + count >= nchunks

    # stage setup: where the rows of its tensors lie
    i_g = i_h // S.HEADS_PER_GROUP
    rows = tl.arange(0, S.CHUNK).to(S.OFFSET)[:, None]
    o_p, o_n = tl.arange(0, S.BLOCK_P).to(S.OFFSET), tl.arange(0, S.BLOCK_N).to(S.OFFSET)
    m_p = (o_p < S.HEADDIM - first_p) | (S.HEADDIM % S.BLOCK_P == 0)
    x_tile = rows * x_strides[1] + o_p[None, :] * x_strides[3]
    B_tile = rows * B_strides[1] + o_n[None, :] * B_strides[3]
    C_tile = rows * C_strides[1] + o_n[None, :] * C_strides[3]
    B_step = ptr_offset((S.BLOCK_N,), B_strides[3:])
    C_step = ptr_offset((S.BLOCK_N,), C_strides[3:])
    out_tile = rows * out_strides[1] + o_p[None, :] * out_strides[3]
    unit_index, group_index = (i_b, begin, i_h, first_p), (i_b, begin, i_g)
    x_rows = TokenRows(x_ptr + ptr_offset(unit_index, x_strides), x_tile, x_strides[1])
    B_rows = TokenRows(B_ptr + ptr_offset(group_index, B_strides), B_tile, B_strides[1], B_step)
    C_rows = TokenRows(C_ptr + ptr_offset(group_index, C_strides), C_tile, C_strides[1], C_step)
    out_rows = TokenRows(out_ptr + ptr_offset(unit_index, out_strides), out_tile, out_strides[1])
    positions = tl.cast(seqlen, tl.int64)  # of all rows: the distance from dt to a in gates
    if cu_seqlens_ptr is None:
        positions *= sequences
    gates = gates_ptr + (2 * positions * unit + position), positions  # as in `chunk_cumsum`
    state_offset = ((tl.cast(sequence, tl.int64) * S.HEADS + i_h) * S.HEADDIM + first_p) * S.DSTATE
    if S.P_ROWS:
        state_p, state_n, m_state = o_p[:, None], o_n[None, :], m_p[:, None]
    else:
        state_p, state_n, m_state = o_p[None, :], o_n[:, None], m_p[None, :]
    state_tile = state_p * S.DSTATE + state_n

    # stage chunk_cumsum: the gates of all chunks of the segment
    A = tl.load(A_ptr + ptr_offset((i_h,), A_strides)).to(tl.float32)
    dt_bias = 0.0
    if dt_bias_ptr is not None:
        dt_bias = tl.load(dt_bias_ptr + ptr_offset((i_h,), dt_bias_strides)).to(tl.float32)
    dt_ptr += ptr_offset((i_b, begin, i_h), dt_strides)
    relevant = chunk_cumsum(
        dt_ptr, dt_strides[1], A, dt_bias, dt_low, dt_high, gates, first, count, length, S,
    )  # fmt: skip

    # stage state_passing: the state that enters the segment
    state = zero_state(state_tile, S)
    if S.HANDOVER:
        added, decay_log2 = state, 0.0
        if not last:
            added, decay_log2 = segment_state(
                state, x_rows, m_p[None, :], B_rows, gates, first, count, relevant, length, S
            )
        flag_ptr = sync_ptr + FLAGS + (sequence * (S.HEADS * SLICES) + unit) * FLAG_STRIDE
        if segment > 0:
            wait_for_state(flag_ptr, segment)
            state = take_state(states_ptr + state_offset, state_tile, S.BLOCK_N, m_state, S)
    if initial_states_ptr is not None and segment == 0:
        state = take_initial_state(
            initial_states_ptr, initial_states_strides, (sequence, i_h, first_p), state_p, state_n,
            m_state, S,
        )  # fmt: skip
    if S.HANDOVER and not last:
        hand_over_state(
            states_ptr + state_offset, state_tile, m_state, flag_ptr, state, added, decay_log2, S
        )

    # stage chunk_scan: the output, chunk after chunk
    D = None
    if D_ptr is not None:
        D = skip_weights(D_ptr, D_strides, i_h, first_p + o_p, m_p)
    z_rows = None
    if z_ptr is not None:
        z_tile = rows * z_strides[1] + o_p[None, :] * z_strides[3]
        z_rows = TokenRows(z_ptr + ptr_offset(unit_index, z_strides), z_tile, z_strides[1])
    if CB_ptr is not None:
        i_bcg = tl.cast(i_b, tl.int64) * nchunks * (S.HEADS // S.HEADS_PER_GROUP) + i_g
        CB_ptr += i_bcg * (S.CHUNK * S.CHUNK)
    state = scan_segment(
        state, x_rows, B_rows, C_rows, z_rows, out_rows, D, CB_ptr, gates, m_p[None, :], first,
        count, length, S,
    )  # fmt: skip
    # stage state_passing.store: the final state
    if last:
        store_state(final_states_ptr + state_offset, state_tile, m_state, state, S)


def buffer_sizes(inputs: SSDInputs, precision: Precision, config: SSDPortableConfig) -> Buffers:
    """Elements and dtype of each buffer of a call, by name.

    sync: ticket and flags, if sequences may have several segments
    states: the states that segments hand over, unless they are fp32: then final_states has them
    gates: C B^T of all chunks, if an earlier launch computes it; then dt and a (module's docstring)
        of all positions of each unit, and one chunk more, because gates are read past the end
    """
    units = config.programs_per_segment(inputs)
    CB_shape = scores_shape(inputs, config)
    buffers = Buffers()
    if config.handover(inputs):
        buffers["sync"] = FLAGS.value + inputs.sequences * units * FLAG_STRIDE.value, torch.int32
        if precision.state_dtype != torch.float32:
            buffers["states"] = prod(inputs.states_shape), precision.state_dtype
    gate_count = units * 2 * inputs.x.shape[0] * inputs.x.shape[1] + config.chunk
    CB_count = prod(CB_shape) if CB_shape else 0
    return buffers | {"gates": (CB_count + gate_count, torch.float32)}


def scores_shape(inputs: SSDInputs, config: SSDPortableConfig) -> tuple[int, ...] | None:
    """The shape of C B^T of all chunks, (b, chunks, g, q, s), if a launch before the fused one
    computes it; None if the fused one does.
    """
    batch, length, groups, _ = inputs.B.shape
    if inputs.x.dtype != torch.float32 or inputs.cu_seqlens is not None:
        return None
    return (batch, triton.cdiv(length, config.chunk), groups, config.chunk, config.chunk)


def scores_launcher(inputs: SSDInputs, chunk: int, shape: tuple[int, ...]) -> Launcher:
    """The launch that computes C B^T of all chunks: a program for each chunk and group.  Its
    products are exact at every precision.

    chunk: positions per chunk.  shape: of the result (`scores_shape`)

    BLOCK_N, num_warps and num_stages are those of `BMM_CHUNK` for fp32 inputs.
    """
    strides = strides_of_each(inputs.C, inputs.B, torch.empty(shape, device="meta"))
    _, nchunks, ngroups, _, _ = shape
    return Launcher(
        _bmm_chunk_kernel,
        (strides, inputs.length, ngroups, nchunks),
        dict(
            CHUNK_SIZE=chunk,
            BLOCK_Q=chunk,
            BLOCK_S=chunk,
            DSTATE=inputs.B.shape[3],
            BLOCK_N=32,
            num_warps=4,
            num_stages=3,
        ),
    )


def launch_options(
    inputs: SSDInputs, precision: Precision, config: SSDPortableConfig, out: torch.Tensor
) -> dict[str, object]:
    """Compile-time arguments and launch options of the fused kernel.  out: for its strides"""
    seqlen, nheads, headdim = inputs.x.shape[1:]
    dstate = inputs.B.shape[3]
    chunk = config.chunk
    # With fp32 inputs, "relaxed" means one tf32 number for each operand of a product, and fp32
    # intermediates.  The errors are smaller than those of 16-bit intermediates.
    fp32 = inputs.x.dtype == torch.float32
    intermediate = torch.float32 if fp32 else precision.intermediate_dtype(inputs.x.dtype)
    tiles = (inputs.x, inputs.B, inputs.C, inputs.z, out)
    return dict(
        HEADS=nheads,
        HEADS_PER_GROUP=inputs.heads_per_group,
        HEADDIM=headdim,
        DSTATE=dstate,
        CHUNK=chunk,
        BLOCK_P=config.block_p,
        BLOCK_N=min(config.block_n, whole_block(dstate)),
        RULE=(config.max_segments, config.min_chunks, config.max_chunks),
        HANDOVER=config.handover(inputs),
        P_ROWS=config.p_rows,
        DT_SOFTPLUS=inputs.dt_softplus,
        INTERMEDIATE=TL_DTYPE[intermediate],
        PRODUCT="tf32" if fp32 and not precision.exact else DOT_PRECISION.value,
        ALIGNED=inputs.cu_seqlens is None and seqlen % chunk == 0,
        OFFSET=offset_dtype(chunk, tiles, (headdim, dstate), strides_of(inputs.initial_states)),
        STATE_STAGES=config.state_stages,
        SCAN_STAGES=config.scan_stages,
        num_warps=config.num_warps,
    )


def portable_launch(
    inputs: SSDInputs, precision: Precision, config: SSDPortableConfig
) -> PreparedLaunch:
    """The launch of a call, for all inputs of one signature.  For fp32 inputs that are not packed,
    a launch before it computes C B^T.
    """
    new_out = torch.empty(inputs.x.shape, device="meta")
    CB_shape = scores_shape(inputs, config)
    # the launch before, the elements of its result, and its programs, one for each chunk and group
    scores, CB_count, CB_programs = None, 0, 0
    if CB_shape is not None:
        scores = scores_launcher(inputs, config.chunk, CB_shape)
        CB_count, CB_programs = prod(CB_shape), prod(CB_shape[:3])

    def tensors(
        call_inputs: SSDInputs,
        out: torch.Tensor,
        final: torch.Tensor,
        gates: torch.Tensor,
        sync: torch.Tensor | None = None,
        states: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        """The kernel's tensors in its order.  If there is a launch for C B^T, launches it; the
        result is the beginning of `gates`.
        """
        CB = None
        if scores is not None:
            CB, gates = gates[:CB_count], gates[CB_count:]
            scores(CB_programs, call_inputs.C, call_inputs.B, None, CB)
        states = final if states is None else states
        return *call_inputs.kernel_tensors, out, final, gates, states, sync, CB

    strides = (
        tile_strides(inputs.x),
        *strides_of_each(inputs.dt, inputs.A),
        *map(tile_strides, (inputs.B, inputs.C)),
        strides_of(inputs.D),
        tile_strides(inputs.z),
        *strides_of_each(inputs.dt_bias, inputs.initial_states, inputs.cu_seqlens),
        tile_strides(new_out),
    )
    scalars = (strides, inputs.length, inputs.sequences, *map(float, inputs.dt_limit))
    launcher = Launcher(_fused_kernel, scalars, launch_options(inputs, precision, config, new_out))
    programs = config.segment_count(inputs) * config.programs_per_segment(inputs)
    return prepared(launcher, programs, inputs, tensors, buffer_sizes(inputs, precision, config))
