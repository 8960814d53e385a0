# mypy: ignore-errors
"""Computes the parts of each chunk that do not depend on the state, on Hopper GPUs: `_kda_prep_kernel` in Gluon.

A thread owns 16 positions of two channels.  So the decays of all pairs of positions are products of its own registers,
of a_i = exp(g_i): no decay is a quotient, none is above 1, and none needs another exponential.  For blocks of h = 1, 2,
4, ... positions it keeps

    P_i = a_b ... a_i     b the first position of i's block
    S_i = a_(i+1) ... a_e e the last position of i's block
    T   = a_b ... a_e     of each block

A pair of a row i in the second block of h and a column j in the first one before it decays by P_i S_j.  One product of
tiles (i, K) and (j, K) serves scores of q with k and of k with k: in the second block, rows are q P and columns k P, in
the first one, rows are k S and columns k S; so the lower triangle has q with k, and the upper one k with k, transposed.
While the tensor cores compute the scores of one h, the decays of the next are made in the other buffer.

In, between, and the stages: `fused.py`.  q and k are normalised, K = 128, a chunk has 64 positions.
Grid: slots * hv, heads fastest.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ssdprof.kernels._gluon import role_barrier
from ssdprof.kernels.gdn.hopper.assignment import packed_slot, sequence_at
from ssdprof.kernels.gdn.hopper.inverse import (
    BLOCK,
    BLOCKS,
    allocate_scratch,
    block_row,
    invert_blocks,
    narrow,
    side_by_side,
)
from ssdprof.kernels.gdn.hopper.prep_kernel import EPSILON
from ssdprof.kernels.gdn.hopper.role_gates import log2_decays
from ssdprof.kernels.hopper.ring import CHUNK

DIM = gl.constexpr(128)
WARPS = gl.constexpr(8)
# Layouts (i, K): a thread has 16 positions of two channels; half a warp has a row
own = gl.constexpr(gl.BlockedLayout([16, 2], [1, 32], [4, 2], [1, 0]))
by_row = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
by_quarter = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 2], [1, 0]))  # (quarter of a chunk, K)
scores_layout = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))  # (i, j)
keys_layout = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16]))  # (i, K)
# (block row, row, block column, column) of a 64 x 64 tile; both halves of the warps hold the same
in_blocks = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 8, 0, 0], [0, 0, 0, 8], [0, 0, 1, 0], [0, 0, 2, 0]],
        [[0, 0, 0, 2], [0, 0, 0, 4], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0], [0, 0, 0, 0]], [], [4, 16, 4, 16],
    )
)  # fmt: skip

STAGES = {
    "spread": "decayed_scores", "quarter": "decayed_scores", "store_rows": "setup", "rows_of": "setup",
    "norms": "qk_l2norm", "products": "decayed_scores", "store_system": "solve_tril", "inverse_of": "solve_tril",
    "_kda_hopper_prep": "setup",
}  # fmt: skip


@gluon.jit
def spread(T, COPIES: gl.constexpr):
    """(n, K) -> (n * 2^COPIES, K): each row 2^COPIES times, in the layout `own`."""
    for _ in gl.static_range(COPIES):
        T = gl.join(T, T)
    if COPIES == 1:
        T = T.permute((0, 2, 1))
    elif COPIES == 2:
        T = T.permute((0, 2, 3, 1))
    elif COPIES == 3:
        T = T.permute((0, 2, 3, 4, 1))
    elif COPIES == 4:
        T = T.permute((0, 2, 3, 4, 5, 1))
    elif COPIES == 5:
        T = T.permute((0, 2, 3, 4, 5, 6, 1))
    return gl.convert_layout(T.reshape([CHUNK, DIM]), own)


@gluon.jit
def store_rows(tile, ptr):
    """Store (64, n), whose rows follow each other in memory, 16 bytes a thread."""
    tile = gl.convert_layout(tile, by_row)
    o_i, o_k = gl.arange(0, CHUNK, gl.SliceLayout(1, by_row)), gl.arange(0, tile.shape[1], gl.SliceLayout(0, by_row))
    gl.store(ptr + o_i[:, None] * tile.shape[1] + o_k[None, :], tile)


@gluon.jit
def rows_of(ptr, position_stride, channel_stride, left, layout: gl.constexpr, OFFSET: gl.constexpr):
    """(i, K) of a chunk with `left` positions; zeros after them."""
    o_i, o_k = gl.arange(0, CHUNK, gl.SliceLayout(1, layout)), gl.arange(0, DIM, gl.SliceLayout(0, layout))
    inside = (o_i < left)[:, None] & (o_k >= 0)[None, :]
    o_i, o_k = o_i.to(OFFSET)[:, None], o_k.to(OFFSET)[None, :]
    return gl.load(ptr + (o_i * position_stride + o_k * channel_stride), mask=inside, other=0.0)


@gluon.jit
def norms(q, k):
    """1 / |q_i|, 1 / |k_i| and q_i . k_i, in the layout of rows of `own` and of the scores.  q, k: `by_row`."""
    q, k = q.to(gl.float32), k.to(gl.float32)
    q_factor = gl.rsqrt(gl.sum(q * q, 1) + EPSILON)
    k_factor = gl.rsqrt(gl.sum(k * k, 1) + EPSILON)
    diagonal = gl.sum(q * k, 1) * q_factor * k_factor
    rows: gl.constexpr = gl.SliceLayout(1, own)
    return (
        gl.convert_layout(q_factor, rows), gl.convert_layout(k_factor, rows),
        gl.convert_layout(diagonal, gl.SliceLayout(1, scores_layout)),
    )  # fmt: skip


@gluon.jit
def quarter(quarters, i: gl.constexpr):
    """T of a quarter of the chunk (1, K)."""
    return quarters.slice(i, 1).load(own)


@gluon.jit
def products(q, k, a, diagonal, rows, columns, quarters):
    """The scores (i, j), and P and S of the whole chunk, (i, K).

    a: decays (i, K).  rows, columns: two buffers (2, i, K) fp16 each; quarters: receives T of 16 positions (4, K)
    """
    o_i = gl.arange(0, CHUNK, gl.SliceLayout(1, own))[:, None]
    r = gl.arange(0, CHUNK, gl.SliceLayout(1, scores_layout))[:, None]
    c = gl.arange(0, CHUNK, gl.SliceLayout(0, scores_layout))[None, :]
    zero = gl.full([CHUNK, CHUNK], 0.0, gl.float32, scores_layout)
    scores = gl.where(r == c, diagonal[:, None], zero)
    P, S, T = a, gl.full([CHUNK, DIM], 1.0, gl.float32, own), a
    pending = zero
    for level in gl.static_range(6):
        second = (o_i >> level & 1) == 1
        decays = gl.where(second, P, S)
        key = k * decays
        rows.index(level % 2).store(gl.where(second, q * decays, key).to(gl.float16))
        columns.index(level % 2).store(key.to(gl.float16))
        if level > 0:
            product = warpgroup_mma_wait(0, deps=[pending])
            scores += gl.where(((r ^ c) >> (level - 1)) == 1, product, 0.0)
        fence_async_shared()
        role_barrier()
        pending = warpgroup_mma(
            rows.index(level % 2), columns.index(level % 2).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        # blocks of twice as many positions
        if level < 4:
            first_T, second_T = gl.split(T.reshape([CHUNK >> (level + 1), 2, DIM]).permute((0, 2, 1)))
            P = gl.where(second, P * spread(first_T, level + 1), P)
            S = gl.where(second, S, S * spread(second_T, level + 1))
            T = first_T * second_T
            if level == 3:
                quarters.store(gl.convert_layout(T, by_quarter))
        elif level == 4:
            P = gl.where(second, P * gl.where(o_i < 32, quarter(quarters, 0), quarter(quarters, 2)), P)
            S = gl.where(second, S, S * gl.where(o_i < 32, quarter(quarters, 1), quarter(quarters, 3)))
        else:
            P = gl.where(second, P * (quarter(quarters, 0) * quarter(quarters, 1)), P)
            S = gl.where(second, S, S * (quarter(quarters, 2) * quarter(quarters, 3)))
    product = warpgroup_mma_wait(0, deps=[pending])
    return scores + gl.where(((r ^ c) >> 5) == 1, product, 0.0), P, S


@gluon.jit
def store_system(scores, beta, scratch):
    """Store L_ij = beta_i scores_ji, j < i, and its diagonal blocks.  Nothing reads the other entries."""
    system = scores * gl.convert_layout(beta, gl.SliceLayout(0, scores_layout))[None, :]  # (j, i)
    scratch.lower.index(0).permute((1, 0)).store(system.to(gl.float16))
    j_b = gl.arange(0, BLOCKS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, in_blocks))))
    i_b = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, in_blocks))))
    blocks = gl.convert_layout(system.reshape([BLOCKS, BLOCK, BLOCKS, BLOCK]), in_blocks)
    blocks = gl.sum(gl.where(j_b[:, None, None, None] == i_b[None, None, :, None], blocks, 0.0), 2)
    scratch.diagonal.store(blocks.permute((1, 0, 2)).reshape([1, CHUNK, BLOCK]))


@gluon.jit
def inverse_of(scratch, beta, dtype: gl.constexpr):
    """beta_j A_ij (j, i)."""
    layout: gl.constexpr = narrow(WARPS)
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    invert_blocks(scratch.diagonal, scratch.inverted, 1)
    beta = gl.convert_layout(beta, gl.SliceLayout(1, layout))
    rows, scaled = (), ()
    for i in gl.static_range(BLOCKS):
        row = block_row(i, 0, 1, rows, scratch.lower.index(0), scratch.inverted, 0, CHUNK)
        rows += (gl.convert_layout(row.to(gl.float16), left),)
        scaled += ((row * beta[:, None]).to(dtype),)
    return side_by_side(0, 1, scaled)


@gluon.jit(do_not_specialize=["seqlen", "sequences"])
def _kda_hopper_prep(tensors, strides, seqlen, sequences, scale, S: gl.constexpr):
    (
        q_ptr, k_ptr, g_ptr, beta_ptr, cu_seqlens_ptr, keys_ptr, queries_ptr, state_factor_ptr, out_factor_ptr,
        ends_ptr,
    ) = tensors  # fmt: skip
    q_strides, k_strides, g_strides, beta_strides, cu_strides = strides
    HEADS: gl.constexpr = S.VALUE_HEADS
    OPERAND: gl.constexpr = S.OPERAND
    head, slot = gl.program_id(0) % HEADS, gl.program_id(0) // HEADS
    if cu_seqlens_ptr is None:
        i = slot // gl.cdiv(seqlen, CHUNK)
    else:
        i = packed_slot(slot, sequences, cu_seqlens_ptr, cu_strides[0])
    sequence = sequence_at(i, seqlen, cu_seqlens_ptr, cu_strides[0])
    t = (slot - sequence.slot) * CHUNK
    left = sequence.length - t
    if left > 0:
        batch = gl.where(cu_seqlens_ptr is None, sequence.index, 0).to(gl.int64)
        position, value_head = (sequence.begin + t).to(gl.int64), head.to(gl.int64)
        key_head = (head // S.VALUES_PER_KEY).to(gl.int64)
        q_ptr += batch * q_strides[0] + position * q_strides[1] + key_head * q_strides[2]
        k_ptr += batch * k_strides[0] + position * k_strides[1] + key_head * k_strides[2]
        g_ptr += batch * g_strides[0] + position * g_strides[1] + value_head * g_strides[2]
        beta_ptr += batch * beta_strides[0] + position * beta_strides[1] + value_head * beta_strides[2]
        place = gl.program_id(0).to(gl.int64)
        wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, DIM], gl.float16)
        square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], gl.float16)

        # stage qk_l2norm
        a = gl.exp2(log2_decays(rows_of(g_ptr, g_strides[1], g_strides[3], left, own, S.OFFSET)))
        q = rows_of(q_ptr, q_strides[1], q_strides[3], left, own, S.OFFSET)
        k = rows_of(k_ptr, k_strides[1], k_strides[3], left, own, S.OFFSET)
        q_factor, k_factor, diagonal = norms(
            rows_of(q_ptr, q_strides[1], q_strides[3], left, by_row, S.OFFSET),
            rows_of(k_ptr, k_strides[1], k_strides[3], left, by_row, S.OFFSET),
        )
        q, k = q.to(gl.float32) * q_factor[:, None], k.to(gl.float32) * k_factor[:, None]
        o_b = gl.arange(0, CHUNK, gl.SliceLayout(1, scores_layout))
        beta = gl.load(beta_ptr + o_b.to(gl.int64) * beta_strides[1], mask=o_b < left, other=0.0).to(gl.float32)

        # stage decayed_scores
        rows = gl.allocate_shared_memory(gl.float16, [2, CHUNK, DIM], wide)
        columns = gl.allocate_shared_memory(gl.float16, [2, CHUNK, DIM], wide)
        quarters = gl.allocate_shared_memory(gl.float32, [4, DIM], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        scores, P, to_end = products(q, k, a, diagonal, rows, columns, quarters)

        # stage gate_cumsum
        o_i, o_k = gl.arange(0, CHUNK, gl.SliceLayout(1, own)), gl.arange(0, DIM, gl.SliceLayout(0, own))
        tile = o_i[:, None] * DIM + o_k[None, :]
        gl.store(keys_ptr + place * (CHUNK * DIM) + tile, (k * P).to(OPERAND))
        gl.store(queries_ptr + place * (CHUNK * DIM) + tile, (q * P * scale).to(OPERAND))
        end = quarter(quarters, 0) * quarter(quarters, 1) * (quarter(quarters, 2) * quarter(quarters, 3))
        gl.store(ends_ptr + place * DIM + o_k[None, :], end)
        at_end = gl.allocate_shared_memory(OPERAND, [CHUNK, DIM], wide)
        at_end.store((k * to_end).to(OPERAND))

        # stage solve_tril
        scratch = allocate_scratch(1)
        store_system(scores, beta, scratch)
        own_scores = gl.allocate_shared_memory(OPERAND, [CHUNK, CHUNK], square)
        o_j = gl.arange(0, CHUNK, gl.SliceLayout(0, scores_layout))
        lower = o_b[:, None] >= o_j[None, :]
        own_scores.store(gl.where(lower, scores, 0.0).to(OPERAND))
        role_barrier()
        inverse = gl.allocate_shared_memory(OPERAND, [CHUNK, CHUNK], square)
        inverse.store(inverse_of(scratch, beta, OPERAND))
        fence_async_shared()
        role_barrier()

        # stage state_factor
        zero = gl.full([CHUNK, DIM], 0.0, gl.float32, keys_layout)
        X = warpgroup_mma(inverse, at_end, zero, use_acc=False, is_async=True)
        # stage out_factor
        zero = gl.full([CHUNK, CHUNK], 0.0, gl.float32, scores_layout)
        W = warpgroup_mma(own_scores, inverse.permute((1, 0)), zero, use_acc=False, is_async=True)
        X, W = warpgroup_mma_wait(0, deps=[X, W])
        store_rows(X.to(OPERAND), state_factor_ptr + place * (CHUNK * DIM))
        W = gl.where(lower, W * scale, 0.0)
        store_rows(W.to(OPERAND), out_factor_ptr + place * (CHUNK * CHUNK))
