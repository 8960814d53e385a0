# mypy: ignore-errors
"""Computes the states that enter segments of heads that forget slowly, from the parts of `parts.py`.

From the sequence's start on, each part updates S <- M S + N, transposed as the parts are: S^T <- S^T M^T + N^T.  Each
fp32 product is computed as three tf32 products, because the state of such a head is multiplied by one matrix per part.

In:   parts (rows, PARTS, 2, V, K) fp32: N^T and M^T | backs (rows)
Out:  entering (rows, V, K) fp32, for rows with backs < 0
Grid: pairs * V / BLOCK_V, a pair being a sequence and a head; rows are ordered by boundary, then by pair
"""

import triton
import triton.language as tl

from ssdprof.kernels.functions import DOT_PRECISION

STAGES = {"_combine_kernel": "warm_up"}


@triton.jit(do_not_specialize=["pairs", "boundaries"])
def _combine_kernel(
    parts_ptr, backs_ptr, entering_ptr, pairs, boundaries,
    PARTS: tl.constexpr, BOUNDARIES: tl.constexpr, DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    pair, block = tl.program_id(0) // (DIM // BLOCK_V), tl.program_id(0) % (DIM // BLOCK_V)
    o_b = tl.arange(0, BOUNDARIES)
    backs = tl.load(backs_ptr + o_b * pairs + pair, mask=o_b < boundaries, other=0)
    o_v, o_k = block * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, DIM)
    tile = o_v[:, None] * DIM + o_k[None, :]
    matrix = o_k[:, None] * DIM + o_k[None, :]
    if tl.min(backs, 0) < 0:
        state = tl.zeros([BLOCK_V, DIM], tl.float32)
        for i in range(boundaries * PARTS):
            row, part = i // PARTS * pairs + pair, i % PARTS
            slow = tl.load(backs_ptr + row) < 0
            before = tl.load(backs_ptr + row - pairs, mask=row >= pairs, other=0)
            known = (part == 0) & (before >= 0)  # N includes the state before
            of_part = parts_ptr + (row * PARTS + part).to(tl.int64) * (2 * DIM * DIM)
            N = tl.load(of_part + tile, mask=slow, other=0.0)
            M = tl.load(of_part + DIM * DIM + matrix, mask=slow & (known == 0), other=0.0)
            moved = tl.dot(state, M, input_precision=DOT_PRECISION)
            state = N + tl.where(known, 0.0, moved)
            entering = entering_ptr + row.to(tl.int64) * (DIM * DIM) + tile
            tl.store(entering, state, mask=slow & (part == PARTS - 1))
