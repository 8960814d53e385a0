# mypy: ignore-errors
"""Computes the states that enter segments of heads that forget slowly, from the parts of `parts.py`.

From the sequence's start on, each part updates S <- M S + N, transposed as the parts are: S^T <- S^T M^T + N^T.  S and
M are sums of two bf16 numbers in the product, without the product of the two smaller ones: what is missing is at most
2^-16 of the product, which inputs of 16 bits hide.

In:   parts (rows, PARTS, V, K) fp32: N^T | moves (rows, PARTS, 2, K, K) bf16: M^T | backs (rows)
      initial_state (sequences, hv, K, V)
Out:  entering (rows, V, K) fp32, for rows with backs < 0
Grid: pairs * V / BLOCK_V, a pair being a sequence and a head; rows are ordered by boundary, then by pair
"""

import triton
import triton.language as tl

import ssdprof.kernels.device  # noqa: F401  chooses the interpreter or a GPU before the kernel is defined

STAGES = {"_combine_kernel": "warm_up"}


@triton.jit(do_not_specialize=["pairs", "boundaries", "K"])
def _combine_kernel(
    parts_ptr, moves_ptr, backs_ptr, initial_ptr, entering_ptr, initial_strides, pairs, boundaries, K,
    HEADS: tl.constexpr, PARTS: tl.constexpr, BOUNDARIES: tl.constexpr, DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    pair, block = tl.program_id(0) // (DIM // BLOCK_V), tl.program_id(0) % (DIM // BLOCK_V)
    o_b = tl.arange(0, BOUNDARIES)
    slow_rows = tl.load(backs_ptr + o_b * pairs + pair, mask=o_b < boundaries, other=0) < 0
    o_v, o_k = block * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, DIM)
    tile = o_v[:, None] * DIM + o_k[None, :]
    matrix = o_k[:, None] * DIM + o_k[None, :]
    begin = tl.min(tl.where(slow_rows, o_b, boundaries), 0)
    end = tl.max(tl.where(slow_rows, o_b + 1, 0), 0)
    state = tl.zeros([BLOCK_V, DIM], tl.float32)
    # Rows between that are not slow have no parts.  What is read there is not used: the next row has a known state.
    for i in tl.range(begin * PARTS, end * PARTS, num_stages=AHEAD):
        row, part = i // PARTS * pairs + pair, i % PARTS
        at = (row * PARTS + part).to(tl.int64) * (DIM * DIM)
        high = tl.load(moves_ptr + 2 * at + matrix)
        low = tl.load(moves_ptr + 2 * at + DIM * DIM + matrix)
        N = tl.load(parts_ptr + at + tile)
        slow = tl.load(backs_ptr + row) < 0
        before = tl.load(backs_ptr + row - pairs, mask=row >= pairs, other=0)
        if (part == 0) & (
            before >= 0
        ):  # its first pass begins at the sequence's start, or where the state is negligible
            state = tl.zeros([BLOCK_V, DIM], tl.float32)
            if initial_ptr is not None:
                own = (pair // HEADS).to(tl.int64) * initial_strides[0] + (pair % HEADS).to(tl.int64) * initial_strides[
                    1
                ]
                at_v, at_k = o_v.to(tl.int64) * initial_strides[3], o_k.to(tl.int64) * initial_strides[2]
                begins = before == i // PARTS * K
                tile_of_initial = initial_ptr + own + at_v[:, None] + at_k[None, :]
                state = tl.load(tile_of_initial, mask=begins, other=0.0).to(tl.float32)
        state_high = state.to(tl.bfloat16)
        state_low = (state - state_high.to(tl.float32)).to(tl.bfloat16)
        # three sums, so that products do not wait for one another
        moved = tl.dot(state_low, high) + tl.dot(state_high, low) + tl.dot(state_high, high)
        state = N + moved
        entering = entering_ptr + row.to(tl.int64) * (DIM * DIM) + tile
        tl.store(entering, state, mask=slow & (part == PARTS - 1))
