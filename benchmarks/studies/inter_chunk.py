# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Kernels of the study scan-002: the state that passes from chunk to chunk, and the same in fp64.

    out[c] = decay[c] * (out[c-1] - w[c] (y[c]^T out[c-1])) + states[c],
    out[-1] = 0;  without w and y for rank 0

In:   states (b, c, h, k, v) | decay (b, c, h, k) fp32 | w, y (b, c, h, k, r)
Out:  out (b, c, h, k, v), of the dtype of states
Oracle: `reference`.  Every kernel gives the same bits in every call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from study import Judge

from ssdprof.kernels.functions import DOT_PRECISION, ptr_offset
from ssdprof.kernels.launch import launch

FLAG_STRIDE = 8  # int32 numbers: flags of different programs are in different sectors
LEAST_INNER = 16  # the least inner size of tl.dot
ROWS = 8  # of a state per program, unless stated


@dataclass(frozen=True, kw_only=True)
class InterChunkInputs:
    """The tensors of the formula above; w and y: None for a diagonal transition.

    Raises ValueError for shapes that do not fit together.
    """

    states: torch.Tensor
    decay: torch.Tensor
    w: torch.Tensor | None = None
    y: torch.Tensor | None = None

    def __post_init__(self) -> None:
        rows = self.states.shape[:4]
        if self.states.ndim != 5 or self.decay.shape != rows:
            raise ValueError(f"decay must be {tuple(rows)}, not {tuple(self.decay.shape)}")
        if (self.w is None) != (self.y is None):
            raise ValueError("w and y belong together")
        for name, factor in (("w", self.w), ("y", self.y)):
            if factor is not None and (factor.ndim != 5 or factor.shape[:4] != rows):
                raise ValueError(
                    f"{name} must be {tuple(rows)} and a rank, not {tuple(factor.shape)}"
                )

    @property
    def rank(self) -> int:
        return 0 if self.w is None else int(self.w.shape[4])

    def least_bytes(self) -> int:
        """Bytes to read every input once, and to write every state after a chunk once."""
        read = (self.states, self.decay, self.w, self.y)
        return sum(t.numel() * t.element_size() for t in (*read, self.states) if t is not None)


Kernel = Callable[[InterChunkInputs], torch.Tensor]


def draw(
    *,
    batch: int,
    chunks: int,
    heads: int,
    dim: int,
    rank: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> InterChunkInputs:
    """Random inputs with k = v = dim.

    states ~ N(0, 1); decay uniform in 0.5 .. 1; y ~ N(0, 1) with unit columns, and w = y / rank.
    The transition then reduces a state by at most the state's length.
    """
    generator = torch.Generator(device).manual_seed(seed)
    rows = (batch, chunks, heads, dim)
    states = torch.randn(*rows, dim, generator=generator, device=device, dtype=torch.float32)
    decay = 0.5 + 0.5 * torch.rand(*rows, generator=generator, device=device, dtype=torch.float32)
    y = w = None
    if rank:
        y = torch.randn(*rows, rank, generator=generator, device=device, dtype=torch.float32)
        y = torch.nn.functional.normalize(y, dim=3)
        y, w = y.to(dtype), (y / rank).to(dtype)
    return InterChunkInputs(states=states.to(dtype), decay=decay, w=w, y=y)


def reference(inputs: InterChunkInputs, *, rounded: bool = False) -> torch.Tensor:
    """The state after each chunk (b, c, h, k, v), fp64.

    rounded: computed in fp32, and every state rounded to the dtype of the inputs before the next
    chunk uses it.
    """
    working = torch.float32 if rounded else torch.float64
    states, decay = inputs.states.to(working), inputs.decay.to(working)
    state = torch.zeros_like(states[:, 0])
    out = []
    for c in range(states.shape[1]):
        if inputs.w is not None and inputs.y is not None:
            w, y = inputs.w[:, c].to(working), inputs.y[:, c].to(working)
            state = state - w @ (y.mT @ state)
        state = decay[:, c, ..., None] * state + states[:, c]
        if rounded:
            state = state.to(inputs.states.dtype).to(working)
        out.append(state.double())
    return torch.stack(out, dim=1)


def judge(inputs: InterChunkInputs) -> Judge:
    """Judges {"out": states after the chunks}."""
    eps = torch.finfo(inputs.states.dtype).eps
    return Judge({"out": reference(inputs)}, {"out": reference(inputs, rounded=True)}, eps)


@triton.jit
def _block_of(
    i_block, nheads, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr
):
    """The batch and head of a block, its rows (ROWS,) and columns (BLOCK_V,), and masks of existing
    rows and elements.

    Blocks of a head vary fastest, then heads, then batches.
    """
    BLOCKS: tl.constexpr = (K + ROWS - 1) // ROWS
    i_bh = i_block // BLOCKS
    i_b, i_h = i_bh // nheads, i_bh % nheads
    o_k, o_v = (i_block % BLOCKS) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_V)
    m_k = o_k < K
    m = m_k[:, None] & (o_v < V)[None, :]
    return i_b, i_h, o_k, o_v, m_k, m


@triton.jit(do_not_specialize=["nheads", "nchunks"])
def _loop_kernel(
    states_ptr, decay_ptr, out_ptr,
    states_strides, decay_strides, out_strides,
    nheads, nchunks,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
    RESIDENT: tl.constexpr, ROUND: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: (b * h * k-blocks).  A program owns some rows of one head's state and walks over the
    chunks.

    RESIDENT: the state stays in registers, in fp32, or with ROUND rounded in every iteration to the
    dtype of `out`.  Otherwise every iteration reads the state that the one before stored back from
    global memory, past the L1 cache.
    """
    i_b, i_h, o_k, o_v, m_k, m = _block_of(tl.program_id(0), nheads, K, V, ROWS, BLOCK_V)
    state = tl.zeros((ROWS, BLOCK_V), dtype=tl.float32)
    for i_c in tl.range(0, nchunks, num_stages=NUM_STAGES):
        here = (i_b, i_c, i_h, o_k[:, None], o_v[None, :])
        b_states = tl.load(states_ptr + ptr_offset(here, states_strides), mask=m, other=0.0)
        b_decay = tl.load(
            decay_ptr + ptr_offset((i_b, i_c, i_h, o_k), decay_strides), mask=m_k, other=0.0
        )
        if not RESIDENT:
            before = out_ptr + ptr_offset(
                (i_b, i_c - 1, i_h, o_k[:, None], o_v[None, :]), out_strides
            )
            state = tl.load(before, mask=m & (i_c > 0), other=0.0, cache_modifier=".cg").to(
                tl.float32
            )
        state = state * b_decay[:, None] + b_states.to(tl.float32)
        stored = state.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + ptr_offset(here, out_strides), stored, mask=m)
        if ROUND:
            state = stored.to(tl.float32)
        if not RESIDENT:
            tl.debug_barrier()  # another thread may load the data that this one has stored


def loop(
    inputs: InterChunkInputs,
    *,
    resident: bool,
    rounded: bool = False,
    rows: int = ROWS,
    num_warps: int = 4,
    num_stages: int = 6,
) -> torch.Tensor:
    """num_stages: iterations that loads run ahead; 1, for none, if the state is read back: it waits
    for a store.
    """
    if not resident and num_stages != 1:
        raise ValueError("loop: num_stages must be 1 for a state that is read back")
    out, sizes, blocks = _begun("loop", inputs, rows)
    numbers = (inputs.states.shape[2], inputs.states.shape[1])
    return _launched(
        _loop_kernel,
        blocks,
        inputs,
        out,
        numbers,
        num_warps,
        **sizes,
        RESIDENT=resident,
        ROUND=rounded,
        NUM_STAGES=num_stages,
    )


@triton.jit(do_not_specialize=["nheads", "i_c"])
def _one_chunk_kernel(
    states_ptr, decay_ptr, out_ptr,
    states_strides, decay_strides, out_strides,
    nheads, i_c,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Grid: (b * h * k-blocks), once for each chunk; the end of a launch orders the chunks."""
    i_b, i_h, o_k, o_v, m_k, m = _block_of(tl.program_id(0), nheads, K, V, ROWS, BLOCK_V)
    here = (i_b, i_c, i_h, o_k[:, None], o_v[None, :])
    b_states = tl.load(states_ptr + ptr_offset(here, states_strides), mask=m, other=0.0)
    b_decay = tl.load(
        decay_ptr + ptr_offset((i_b, i_c, i_h, o_k), decay_strides), mask=m_k, other=0.0
    )
    before = out_ptr + ptr_offset((i_b, i_c - 1, i_h, o_k[:, None], o_v[None, :]), out_strides)
    # a scalar condition in a mask is an error in the interpreter of Triton 3.9
    state = tl.load(before, mask=m & (o_k < tl.where(i_c > 0, K, 0))[:, None], other=0.0).to(
        tl.float32
    )
    state = state * b_decay[:, None] + b_states.to(tl.float32)
    tl.store(out_ptr + ptr_offset(here, out_strides), state.to(out_ptr.dtype.element_ty), mask=m)


def one_launch_a_chunk(inputs: InterChunkInputs, *, rows: int = ROWS) -> torch.Tensor:
    out, sizes, blocks = _begun("one_launch_a_chunk", inputs, rows)
    for i_c in range(inputs.states.shape[1]):
        _launched(_one_chunk_kernel, blocks, inputs, out, (inputs.states.shape[2], i_c), 4, **sizes)
    return out


@triton.jit(do_not_specialize=["nheads", "blocks"])
def _chained_kernel(
    states_ptr, decay_ptr, out_ptr, sync_ptr, states_strides, decay_strides, out_strides, nheads,
    blocks, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """Grid: (c * b * h * k-blocks).  A program has one chunk, and waits for the flag of the chunk
    before.

    Forward progress: a ticket determines the chunk, so that a program waits only for one that has
    started before it.  Chunks are always added in their order, so the bits are those of the loop
    that reads its state back.
    """
    ticket = tl.atomic_add(sync_ptr, 1, sem="relaxed")
    i_c, i_block = ticket // blocks, ticket % blocks
    i_b, i_h, o_k, o_v, m_k, m = _block_of(i_block, nheads, K, V, ROWS, BLOCK_V)
    flag_ptr = sync_ptr + (1 + i_block.to(tl.int64)) * STRIDE

    # --- work that needs no other program
    here = (i_b, i_c, i_h, o_k[:, None], o_v[None, :])
    b_states = tl.load(states_ptr + ptr_offset(here, states_strides), mask=m, other=0.0)
    b_decay = tl.load(
        decay_ptr + ptr_offset((i_b, i_c, i_h, o_k), decay_strides), mask=m_k, other=0.0
    )

    # --- the state of the chunk before
    while tl.atomic_add(flag_ptr, 0, sem="acquire") < i_c:
        pass
    before = out_ptr + ptr_offset((i_b, i_c - 1, i_h, o_k[:, None], o_v[None, :]), out_strides)
    m_before = m & (o_k < tl.where(i_c > 0, K, 0))[:, None]
    state = tl.load(before, mask=m_before, other=0.0, cache_modifier=".cg").to(tl.float32)
    state = state * b_decay[:, None] + b_states.to(tl.float32)
    tl.store(out_ptr + ptr_offset(here, out_strides), state.to(out_ptr.dtype.element_ty), mask=m)
    tl.debug_barrier()  # every thread has stored its part of the state before the flag is raised
    tl.atomic_add(flag_ptr, 1, sem="release")


def chained(inputs: InterChunkInputs, *, rows: int = 16) -> torch.Tensor:
    """With more rows there are fewer flags to wait for."""
    out, sizes, blocks = _begun("chained", inputs, rows)
    numbers, programs = (inputs.states.shape[2], blocks), inputs.states.shape[1] * blocks
    return _launched(
        _chained_kernel,
        programs,
        inputs,
        out,
        numbers,
        4,
        (_flags(blocks, out),),
        **sizes,
        STRIDE=FLAG_STRIDE,
    )


@triton.jit
def _then(first_decay, first_added, second_decay, second_added):
    return first_decay * second_decay, first_added * second_decay + second_added


@triton.jit(do_not_specialize=["nheads", "nchunks"])
def _associative_kernel(
    states_ptr, decay_ptr, out_ptr,
    states_strides, decay_strides, out_strides,
    nheads, nchunks,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid: (b * h * kv-blocks).  A program scans tiles of BLOCK_C chunks: (a, s) then (b, t) -> (a
    b, b s + t).

    The state that enters a tile is decayed and added.  The order of sums, and so the bits, differ
    from a loop's.
    """
    BLOCKS: tl.constexpr = (K * V + BLOCK - 1) // BLOCK
    i_bh = tl.program_id(0) // BLOCKS
    i_b, i_h = i_bh // nheads, i_bh % nheads
    o_kv = ((tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK))[None, :]
    o_k, o_v = o_kv // V, o_kv % V
    o_tile = tl.arange(0, BLOCK_C)[:, None]
    entering = tl.zeros((1, BLOCK), dtype=tl.float32)
    for first in range(0, nchunks, BLOCK_C):  # chunks past the end add nothing and decay nothing
        o_c = first + o_tile
        m = (o_c < nchunks) & (o_kv < K * V)
        b_states = tl.load(
            states_ptr + ptr_offset((i_b, o_c, i_h, o_k, o_v), states_strides), mask=m, other=0.0
        )
        b_decay = tl.load(
            decay_ptr + ptr_offset((i_b, o_c, i_h, o_k), decay_strides), mask=m, other=1.0
        )
        decays, added = tl.associative_scan((b_decay, b_states.to(tl.float32)), 0, _then)
        state = entering * decays + added  # [BLOCK_C, BLOCK]
        stored = state.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + ptr_offset((i_b, o_c, i_h, o_k, o_v), out_strides), stored, mask=m)
        entering = tl.sum(tl.where(o_tile == BLOCK_C - 1, state, 0.0), 0)[None, :]


def associative(inputs: InterChunkInputs, *, block: int = 64, block_c: int = 32) -> torch.Tensor:
    """block: elements of a state per program; block_c: chunks per scan."""
    out, sizes, _ = _begun("associative", inputs, 1)
    batch, nchunks, nheads, k, v = inputs.states.shape
    return _launched(
        _associative_kernel,
        batch * nheads * triton.cdiv(k * v, block),
        inputs,
        out,
        (nheads, nchunks),
        4,
        K=sizes["K"],
        V=sizes["V"],
        BLOCK=block,
        BLOCK_C=min(block_c, triton.next_power_of_2(nchunks)),
    )


@triton.jit(do_not_specialize=["nheads", "nchunks", "blocks"])
def _look_back_kernel(
    states_ptr, decay_ptr, out_ptr, parts_ptr, sync_ptr, states_strides, decay_strides, out_strides,
    nheads, nchunks, blocks, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr, SEGMENT: tl.constexpr, STRIDE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: (segments * b * h * k-blocks).  A program has some rows of one head's state in one
    segment of chunks.

    It publishes what its segment adds to a zero state, and its decay; then it starts from the sum
    over the segments before it.  It publishes before it waits, and waits only for earlier tickets,
    so every wait ends.  The sum always goes from the nearest segment to the first: one that stops
    at a finished state would depend on timing.
    """
    ticket = tl.atomic_add(sync_ptr, 1, sem="relaxed")
    i_segment, i_block = ticket // blocks, ticket % blocks
    i_b, i_h, o_k, o_v, m_k, m = _block_of(i_block, nheads, K, V, ROWS, BLOCK_V)
    o_row = tl.arange(0, ROWS)
    o_part = o_row[:, None] * BLOCK_V + o_v[None, :]
    PART: tl.constexpr = ROWS * BLOCK_V + ROWS  # the state that a segment adds, and its decays
    first = i_segment * SEGMENT
    after = tl.minimum(first + SEGMENT, nchunks)

    # --- what the segment adds: published unless it is the last one
    if after < nchunks:
        added = tl.zeros((ROWS, BLOCK_V), dtype=tl.float32)
        decays = tl.full((ROWS,), 1.0, dtype=tl.float32)
        for i_c in tl.range(first, after, num_stages=NUM_STAGES):
            here = (i_b, i_c, i_h, o_k[:, None], o_v[None, :])
            b_states = tl.load(states_ptr + ptr_offset(here, states_strides), mask=m, other=0.0)
            b_decay = tl.load(
                decay_ptr + ptr_offset((i_b, i_c, i_h, o_k), decay_strides), mask=m_k, other=0.0
            )
            added = added * b_decay[:, None] + b_states.to(tl.float32)
            decays *= b_decay
        mine = parts_ptr + ticket.to(tl.int64) * PART
        tl.store(mine + o_part, added)
        tl.store(mine + ROWS * BLOCK_V + o_row, decays)
        tl.debug_barrier()  # every thread has stored its part before the flag is raised
        tl.atomic_add(sync_ptr + (1 + ticket.to(tl.int64)) * STRIDE, 1, sem="release")

    # --- the state that enters the segment
    state = tl.zeros((ROWS, BLOCK_V), dtype=tl.float32)
    passed = tl.full((ROWS,), 1.0, dtype=tl.float32)
    for back in range(0, i_segment):
        theirs = ((i_segment - 1 - back) * blocks + i_block).to(tl.int64)
        while tl.atomic_add(sync_ptr + (1 + theirs) * STRIDE, 0, sem="acquire") == 0:
            pass
        part = parts_ptr + theirs * PART
        state += passed[:, None] * tl.load(part + o_part, cache_modifier=".cg")
        passed *= tl.load(part + ROWS * BLOCK_V + o_row, cache_modifier=".cg")

    # --- the states
    for i_c in tl.range(first, after, num_stages=NUM_STAGES):
        here = (i_b, i_c, i_h, o_k[:, None], o_v[None, :])
        b_states = tl.load(states_ptr + ptr_offset(here, states_strides), mask=m, other=0.0)
        b_decay = tl.load(
            decay_ptr + ptr_offset((i_b, i_c, i_h, o_k), decay_strides), mask=m_k, other=0.0
        )
        state = state * b_decay[:, None] + b_states.to(tl.float32)
        stored = state.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + ptr_offset(here, out_strides), stored, mask=m)


def look_back(inputs: InterChunkInputs, *, rows: int = ROWS, segment: int = 16) -> torch.Tensor:
    """segment: chunks per program."""
    out, sizes, blocks = _begun("look_back", inputs, rows)
    _, nchunks, nheads, _, _ = inputs.states.shape
    programs = triton.cdiv(nchunks, segment) * blocks
    parts = torch.empty(
        programs, rows * (sizes["BLOCK_V"] + 1), dtype=torch.float32, device=out.device
    )
    return _launched(
        _look_back_kernel,
        programs,
        inputs,
        out,
        (nheads, nchunks, blocks),
        4,
        (parts, _flags(programs, out)),
        **sizes,
        SEGMENT=segment,
        STRIDE=FLAG_STRIDE,
        NUM_STAGES=3,
    )


@triton.jit(do_not_specialize=["nheads", "nchunks"])
def _low_rank_kernel(
    states_ptr, decay_ptr, w_ptr, y_ptr, out_ptr, states_strides, decay_strides, w_strides,
    y_strides, out_strides, nheads, nchunks, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, RESIDENT: tl.constexpr,
    ROUND: tl.constexpr, TENSOR_CORES: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: (b * h * v-blocks).  A program owns all rows of some columns of one head's state; see
    `_loop_kernel`.

    TENSOR_CORES: y^T h and w (y^T h) are matrix products with the rank padded to 16, in tf32x3;
    otherwise a sum and an update for each column of the rank, in fp32.
    """
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    i_bh = tl.program_id(0) // BLOCKS
    i_b, i_h = i_bh // nheads, i_bh % nheads
    o_k, o_r = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_R)
    o_v = (tl.program_id(0) % BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    m = (o_k < K)[:, None] & (o_v < V)[None, :]
    m_r = (o_k < K)[:, None] & (o_r < R)[None, :]
    state = tl.zeros((BLOCK_K, BLOCK_V), dtype=tl.float32)
    for i_c in tl.range(0, nchunks, num_stages=NUM_STAGES):
        here = (i_b, i_c, i_h, o_k[:, None], o_v[None, :])
        b_states = tl.load(states_ptr + ptr_offset(here, states_strides), mask=m, other=0.0)
        b_decay = tl.load(
            decay_ptr + ptr_offset((i_b, i_c, i_h, o_k), decay_strides), mask=o_k < K, other=0.0
        )
        if not RESIDENT:
            before = out_ptr + ptr_offset(
                (i_b, i_c - 1, i_h, o_k[:, None], o_v[None, :]), out_strides
            )
            state = tl.load(before, mask=m & (i_c > 0), other=0.0, cache_modifier=".cg").to(
                tl.float32
            )
        if TENSOR_CORES:
            w_offset = ptr_offset((i_b, i_c, i_h, o_k[:, None], o_r[None, :]), w_strides)
            y_offset = ptr_offset((i_b, i_c, i_h, o_k[:, None], o_r[None, :]), y_strides)
            b_w = tl.load(w_ptr + w_offset, mask=m_r, other=0.0).to(tl.float32)
            b_y = tl.load(y_ptr + y_offset, mask=m_r, other=0.0).to(tl.float32)
            # [BLOCK_R, BLOCK_V]
            projected = tl.dot(tl.trans(b_y), state, input_precision=DOT_PRECISION)
            state -= tl.dot(b_w, projected, input_precision=DOT_PRECISION)
        else:
            corrected = state
            for r in tl.static_range(R):
                w_column = tl.load(
                    w_ptr + ptr_offset((i_b, i_c, i_h, o_k, r), w_strides), mask=o_k < K, other=0.0
                )
                y_column = tl.load(
                    y_ptr + ptr_offset((i_b, i_c, i_h, o_k, r), y_strides), mask=o_k < K, other=0.0
                )
                projection = tl.sum(y_column.to(tl.float32)[:, None] * state, 0)  # [BLOCK_V]
                corrected -= w_column.to(tl.float32)[:, None] * projection[None, :]
            state = corrected
        state = state * b_decay[:, None] + b_states.to(tl.float32)
        stored = state.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + ptr_offset(here, out_strides), stored, mask=m)
        if ROUND:
            state = stored.to(tl.float32)
        if not RESIDENT:
            tl.debug_barrier()  # another thread may load the data that this one has stored


def low_rank(
    inputs: InterChunkInputs,
    *,
    resident: bool,
    tensor_cores: bool,
    rounded: bool = False,
    num_warps: int = 4,
    num_stages: int = 2,
) -> torch.Tensor:
    if inputs.w is None or inputs.y is None:
        raise ValueError("low_rank: w and y are missing")
    if not resident and num_stages != 1:
        raise ValueError("low_rank: num_stages must be 1 for a state that is read back")
    batch, nchunks, nheads, k, v = inputs.states.shape
    out = torch.empty_like(inputs.states)
    tensors = (inputs.states, inputs.decay, inputs.w, inputs.y, out)
    block_v = 16  # columns of a state per program
    launch(
        _low_rank_kernel,
        batch * nheads * triton.cdiv(v, block_v),
        tensors,
        (*(tensor.stride() for tensor in tensors), nheads, nchunks),
        K=k,
        V=v,
        R=inputs.rank,
        BLOCK_K=max(LEAST_INNER, triton.next_power_of_2(k)),
        BLOCK_V=block_v,
        BLOCK_R=max(LEAST_INNER, triton.next_power_of_2(inputs.rank)),
        RESIDENT=resident,
        ROUND=rounded,
        TENSOR_CORES=tensor_cores,
        NUM_STAGES=num_stages,
        num_warps=num_warps,
    )
    return out


def _begun(
    name: str, inputs: InterChunkInputs, rows: int
) -> tuple[torch.Tensor, dict[str, int], int]:
    """The output, the sizes of a kernel that owns `rows` rows of a state, and its programs for one
    chunk.
    """
    if inputs.rank:
        raise ValueError(f"{name}: diagonal transitions only")
    batch, _, nheads, k, v = inputs.states.shape
    sizes = {"K": k, "V": v, "ROWS": rows, "BLOCK_V": triton.next_power_of_2(v)}
    return torch.empty_like(inputs.states), sizes, batch * nheads * triton.cdiv(k, rows)


def _flags(programs: int, like: torch.Tensor) -> torch.Tensor:
    """A count of tickets, then a flag for each program."""
    return torch.zeros((1 + programs) * FLAG_STRIDE, dtype=torch.int32, device=like.device)


def _launched(
    kernel: Any,
    programs: int,
    inputs: InterChunkInputs,
    out: torch.Tensor,
    numbers: tuple[int, ...],
    num_warps: int,
    aside: tuple[torch.Tensor, ...] = (),
    **constants: Any,
) -> torch.Tensor:
    """Returns out."""
    tensors = (inputs.states, inputs.decay, out)
    strides = tuple(tensor.stride() for tensor in tensors)
    launch(
        kernel, programs, (*tensors, *aside), (*strides, *numbers), **constants, num_warps=num_warps
    )
    return out
