"""Computes the parts of each chunk that do not depend on the state, on Hopper GPUs:
`_kda_hopper_prep` in Gluon.

A thread owns 16 positions of two channels.  So the decays of all pairs of positions are products of
its own registers, of a_i = exp(g_i): no decay is a quotient, none is above 1, and none needs
another exponential.  For blocks of h = 1, 2, 4, ... positions it keeps

    P_i = a_b ... a_i     b the first position of i's block
    S_i = a_(i+1) ... a_e e the last position of i's block
    T   = a_b ... a_e     of each block

A pair of a row i in the second block of h and a column j in the first one before it decays by P_i
S_j.  One product of tiles (i, K) and (j, K) serves scores of q with k and of k with k: in the
second block, rows are q P and columns k P, in the first one, rows are k S and columns k S; so the
lower triangle has q with k, and the upper one k with k, transposed.

Four warps, so that a multiprocessor holds two programs, take half of the channels at a time.  A
warp computes the scores inside its own 16 positions alone (h = 1 to 8), then two warps those of 32
(h = 16), and all those between the
halves of the chunk (h = 32).

In, between, and the stages: `fused.py`.  q and k are normalised, K = 128, a chunk has 64 positions.
Grid: slots * hv, heads fastest.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)

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
from ssdprof.kernels.gdn.hopper.role_gates import LOG2_E
from ssdprof.kernels.hopper.ring import CHUNK

DIM = gl.constexpr(128)
HALF = gl.constexpr(64)  # channels at a time
WARPS = gl.constexpr(4)
# Layouts (i, K): a thread has 16 positions of two channels; 16, or eight, threads have a row
own = gl.constexpr(gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0]))
by_row = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
by_half_row = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# (block of 16 positions, K)
by_block = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
# Layouts of products: (i, j) and (i, K); (block, i, j); (pair of blocks, i, j)
square_layout = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
blocks_layout = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
pairs_layout = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, 2, 1], [1, 16, 8]))

STAGES = {
    "spread": "decayed_scores", "times": "decayed_scores", "chosen": "decayed_scores",
    "again": "setup", "store_rows": "setup", "rows_of": "setup", "norms": "qk_l2norm",
    "decays_of": "gate_cumsum", "between_blocks": "gate_cumsum", "product_of": "decayed_scores",
    "in_block": "decayed_scores", "products": "decayed_scores", "all_scores": "decayed_scores",
    "store_system": "solve_tril", "inverse_of": "solve_tril", "_kda_hopper_prep": "setup",
}  # fmt: skip


@gluon.jit
def times(a, b):
    """a b of two fp16 tensors, two numbers at a time."""
    return gl.inline_asm_elementwise(
        "mul.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def chosen(a, b, bits):
    """a where all of `bits` are set, b where none is set, of fp16 tensors, two numbers at a
    time.
    """
    return gl.inline_asm_elementwise(
        "{.reg .b32 t; xor.b32 t, $1, $2; and.b32 t, t, $3; xor.b32 $0, t, $2;}",
        "=r,r,r,r",
        [a, b, bits],
        dtype=gl.float16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def again(o_i, half):
    """o_i, hidden from the compiler, so that it computes the addresses of a pass inside it, and not
    all before.
    """
    half, _ = gl.broadcast(gl.to_tensor(half), o_i)
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r", [o_i, half], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def decays_of(g):
    """e^g, at most 1; 0 below 2^-126; NaN stays NaN."""
    return gl.inline_asm_elementwise(
        "{.reg .b32 t; mov.b32 t, 0; min.NaN.f32 t, $1, t; ex2.approx.ftz.f32 $0, t;}",
        "=f,f",
        [g.to(gl.float32) * LOG2_E],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


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
    return gl.convert_layout(T.reshape([CHUNK, HALF]), own)


@gluon.jit
def store_rows(tile, ptr, stride: gl.constexpr):
    """Store (64, 64), 16 bytes a thread."""
    o_i, o_j = (
        gl.arange(0, CHUNK, gl.SliceLayout(1, by_half_row)),
        gl.arange(0, HALF, gl.SliceLayout(0, by_half_row)),
    )
    gl.store(ptr + o_i[:, None] * stride + o_j[None, :], gl.convert_layout(tile, by_half_row))


@gluon.jit
def rows_of(ptr, strides, left, half, layout: gl.constexpr, OFFSET: gl.constexpr):
    """(i, K) of a chunk with `left` positions; zeros after them.  half: of the channels; None:
    all.
    """
    WIDTH: gl.constexpr = DIM if half is None else HALF
    o_i, o_k = (
        gl.arange(0, CHUNK, gl.SliceLayout(1, layout)),
        gl.arange(0, WIDTH, gl.SliceLayout(0, layout)),
    )
    inside = (o_i < left)[:, None] & (o_k >= 0)[None, :]
    if half is not None:
        o_i = again(o_i, half)
    tile = ptr + o_k.to(OFFSET)[None, :] * strides[3] + o_i.to(OFFSET)[:, None] * strides[1]
    return gl.load(tile, mask=inside, other=0.0)


@gluon.jit
def in_block():
    """Row and column of an entry of (block, i, j)."""
    r = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(2, blocks_layout)))[None, :, None]
    return r, gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, blocks_layout)))[
        None, None, :
    ]


@gluon.jit
def norms(q, k):
    """1 / |q_i|, 1 / |k_i|, and the scores q_i . k_i on the diagonal of (block, i, j).  q, k:
    `by_row`.
    """
    q, k = q.to(gl.float32), k.to(gl.float32)
    q_factor = gl.rsqrt(gl.sum(q * q, 1) + EPSILON)
    k_factor = gl.rsqrt(gl.sum(k * k, 1) + EPSILON)
    diagonal = gl.sum(q * k, 1) * q_factor * k_factor
    diagonal = gl.convert_layout(
        diagonal.reshape([BLOCKS, BLOCK]), gl.SliceLayout(2, blocks_layout)
    )
    r, c = in_block()
    zero = gl.full([BLOCKS, BLOCK, BLOCK], 0.0, gl.float32, blocks_layout)
    return q_factor, k_factor, gl.where(r == c, diagonal[:, :, None], zero)


@gluon.jit
def between_blocks(quarters):
    """For each block of 16 positions (4, K): decays from the start of its half and of the chunk,
    and to both ends.
    """
    o_b = gl.arange(0, BLOCKS, gl.SliceLayout(1, by_block))[:, None]
    t0, t1 = quarters.slice(0, 1).load(by_block), quarters.slice(1, 1).load(by_block)
    t2, t3 = quarters.slice(2, 1).load(by_block), quarters.slice(3, 1).load(by_block)
    since_half = gl.where(o_b == 1, t0, gl.where(o_b == 3, t2, 1.0))
    to_half = gl.where(o_b == 0, t1, gl.where(o_b == 2, t3, 1.0))
    since_start = since_half * gl.where(o_b < 2, 1.0, t0 * t1)
    to_end = to_half * gl.where(o_b < 2, t2 * t3, 1.0)
    return gl.where(o_b < 2, to_half, since_half), since_start, to_end, t0 * t1 * (t2 * t3)


@gluon.jit
def product_of(rows, columns, acc, SIZE: gl.constexpr, layout: gl.constexpr):
    """Adds the products of blocks of SIZE rows and columns of two tiles to acc (block, i, j)."""
    shape: gl.constexpr = [CHUNK // SIZE, SIZE, HALF]
    a = rows.reshape(shape).load(gl.DotOperandLayout(0, layout, 2))
    b = columns.reshape(shape).permute((0, 2, 1)).load(gl.DotOperandLayout(1, layout, 2))
    return mma_v2(a, b, acc)


@gluon.jit
def products(q, k, a, blocks, pairs, halves, tiles, quarters):
    """Adds the scores of some channels.  Returns them, P and S of the whole chunk (i, K), and its T
    (4, K).

    q, k: fp16.  a: decays.  tiles: two buffers of rows and columns (2, 2, i, K); quarters: receives
    T of each block
    blocks: scores inside blocks of 16 (block, i, j); pairs: between the two blocks of 32 (pair, i,
    j); halves: between the halves of the chunk (i, j).  Their other entries mean nothing
    """
    o_i = gl.arange(0, CHUNK, gl.SliceLayout(1, own))[:, None]
    zeros = gl.full([CHUNK, HALF], 0, gl.int16, own)
    r, c = in_block()
    P, S, T = a, gl.full([CHUNK, HALF], 1.0, gl.float32, own), a
    for level in gl.static_range(4):
        second = (o_i >> level & 1) == 1
        decays = gl.where(second, P, S).to(gl.float16)
        rows, columns = tiles.index(level % 2 * 2), tiles.index(level % 2 * 2 + 1)
        rows.store(times(gl.where(second, q, k), decays))
        columns.store(times(k, decays))
        role_barrier()
        zero = gl.full([BLOCKS, BLOCK, BLOCK], 0.0, gl.float32, blocks_layout)
        product = product_of(rows, columns, zero, BLOCK, blocks_layout)
        blocks = gl.where(((r ^ c) >> level) == 1, blocks + product, blocks)
        # blocks of twice as many positions
        first_T, second_T = gl.split(T.reshape([CHUNK >> (level + 1), 2, HALF]).permute((0, 2, 1)))
        P = gl.where(second, P * spread(first_T, level + 1), P)
        S = gl.where(second, S, S * spread(second_T, level + 1))
        T = first_T * second_T
    quarters.store(gl.convert_layout(T, by_block))
    # h = 16
    decays = gl.where((o_i >> 4 & 1) == 1, P, S).to(gl.float16)
    tiles.index(0).store(times(chosen(q, k, zeros - (o_i >> 4 & 1).to(gl.int16)), decays))
    tiles.index(1).store(times(k, decays))
    role_barrier()
    pairs = product_of(tiles.index(0), tiles.index(1), pairs, 2 * BLOCK, pairs_layout)
    # h = 32
    between, since_start, to_end, whole = between_blocks(quarters)
    decays = (gl.where(o_i >= 32, P, S) * spread(between, 4)).to(gl.float16)
    tiles.index(2).store(times(chosen(q, k, zeros - (o_i >> 5).to(gl.int16)), decays))
    tiles.index(3).store(times(k, decays))
    fence_async_shared()
    role_barrier()
    halves = warpgroup_mma(tiles.index(2), tiles.index(3).permute((1, 0)), halves, is_async=True)
    return blocks, pairs, halves, P * spread(since_start, 4), S * spread(to_end, 4), whole


@gluon.jit
def all_scores(blocks, pairs, halves):
    """(i, j) of the three parts."""
    r = gl.arange(0, CHUNK, gl.SliceLayout(1, square_layout))[:, None]
    c = gl.arange(0, CHUNK, gl.SliceLayout(0, square_layout))[None, :]
    blocks = gl.join(gl.join(blocks, blocks), gl.join(blocks, blocks)).permute((0, 1, 3, 4, 2))
    pairs = gl.join(pairs, pairs).permute((0, 1, 3, 2))
    pairs = gl.convert_layout(pairs.reshape([CHUNK, CHUNK]), square_layout)
    blocks = gl.convert_layout(blocks.reshape([CHUNK, CHUNK]), square_layout)
    return gl.where((r ^ c) < 16, blocks, gl.where((r ^ c) < 32, pairs, halves))


@gluon.jit
def store_system(scores, blocks, beta, scratch):
    """Store L_ij = beta_i scores_ji, j < i, and its diagonal blocks.  Nothing reads the other
    entries.
    """
    system = scores * gl.convert_layout(beta, gl.SliceLayout(0, square_layout))[None, :]  # (j, i)
    scratch.lower.index(0).permute((1, 0)).store(system.to(gl.float16))
    beta = gl.convert_layout(beta.reshape([BLOCKS, BLOCK]), gl.SliceLayout(1, blocks_layout))
    blocks = (blocks * beta[:, None, :]).permute((1, 0, 2)).reshape([1, CHUNK, BLOCK])
    scratch.diagonal.store(blocks)


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
        q_ptr,
        k_ptr,
        g_ptr,
        beta_ptr,
        cu_seqlens_ptr,
        keys_ptr,
        queries_ptr,
        state_factor_ptr,
        out_factor_ptr,
        ends_ptr,
    ) = tensors
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
        beta_ptr += (
            batch * beta_strides[0] + position * beta_strides[1] + value_head * beta_strides[2]
        )
        place = gl.program_id(0).to(gl.int64)
        wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, HALF], gl.float16)
        square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], gl.float16)

        # stage qk_l2norm
        q_factor, k_factor, blocks = norms(
            rows_of(q_ptr, q_strides, left, None, by_row, S.OFFSET),
            rows_of(k_ptr, k_strides, left, None, by_row, S.OFFSET),
        )
        o_b = gl.arange(0, CHUNK, gl.SliceLayout(1, square_layout))
        o_j = gl.arange(0, CHUNK, gl.SliceLayout(0, square_layout))
        beta = gl.load(
            beta_ptr + o_b.to(gl.int64) * beta_strides[1], mask=o_b < left, other=0.0
        ).to(gl.float32)
        zero = gl.full([CHUNK, CHUNK], 0.0, gl.float32, square_layout)

        # stage decayed_scores
        tiles = gl.allocate_shared_memory(gl.float16, [4, CHUNK, HALF], wide)
        quarters = gl.allocate_shared_memory(
            gl.float32, [4, HALF], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
        at_end = gl.allocate_shared_memory(gl.float16, [2, CHUNK, HALF], wide)
        pairs = gl.full([2, 32, 32], 0.0, gl.float32, pairs_layout)
        halves = zero
        q_factors = gl.allocate_shared_memory(
            gl.float32, [CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
        k_factors = gl.allocate_shared_memory(
            gl.float32, [CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
        q_factors.store(q_factor)
        k_factors.store(k_factor)
        role_barrier()
        o_i, o_k = (
            gl.arange(0, CHUNK, gl.SliceLayout(1, own)),
            gl.arange(0, HALF, gl.SliceLayout(0, own)),
        )
        tile = o_i[:, None] * DIM + o_k[None, :]
        for half in range(2):
            a = decays_of(rows_of(g_ptr, g_strides, left, half, own, S.OFFSET))
            q = rows_of(q_ptr, q_strides, left, half, own, S.OFFSET)
            k = rows_of(k_ptr, k_strides, left, half, own, S.OFFSET)
            q = (q.to(gl.float32) * q_factors.load(gl.SliceLayout(1, own))[:, None]).to(gl.float16)
            k = (k.to(gl.float32) * k_factors.load(gl.SliceLayout(1, own))[:, None]).to(gl.float16)
            blocks, pairs, halves, P, to_end, end = products(
                q, k, a, blocks, pairs, halves, tiles, quarters
            )

            # stage gate_cumsum
            q, k = q.to(gl.float32), k.to(gl.float32)
            gl.store(keys_ptr + place * (CHUNK * DIM) + half * HALF + tile, (k * P).to(OPERAND))
            gl.store(
                queries_ptr + place * (CHUNK * DIM) + half * HALF + tile,
                (q * P * scale).to(OPERAND),
            )
            o_e = gl.arange(0, HALF, gl.SliceLayout(0, by_block))
            gl.store(ends_ptr + place * DIM + half * HALF + o_e[None, :], end)
            at_end.index(half).store((k * to_end).to(gl.float16))
            q_ptr += HALF * q_strides[3]
            k_ptr += HALF * k_strides[3]
            g_ptr += HALF * g_strides[3]
            halves = warpgroup_mma_wait(0, deps=[halves])

        # stage solve_tril
        scratch = allocate_scratch(1)
        scores = all_scores(blocks, pairs, halves)
        store_system(scores, blocks, beta, scratch)
        own_scores = gl.allocate_shared_memory(gl.float16, [CHUNK, CHUNK], square)
        lower = o_b[:, None] >= o_j[None, :]
        own_scores.store(gl.where(lower, scores, 0.0).to(gl.float16))
        role_barrier()
        inverse = gl.allocate_shared_memory(gl.float16, [CHUNK, CHUNK], square)
        inverse.store(inverse_of(scratch, beta, gl.float16))
        fence_async_shared()
        role_barrier()

        # stage state_factor
        first = warpgroup_mma(inverse, at_end.index(0), zero, use_acc=False, is_async=True)
        other = warpgroup_mma(inverse, at_end.index(1), zero, use_acc=False, is_async=True)
        # stage out_factor
        W = warpgroup_mma(own_scores, inverse.permute((1, 0)), zero, use_acc=False, is_async=True)
        first, other, W = warpgroup_mma_wait(0, deps=[first, other, W])
        state_factor_ptr += place * (CHUNK * DIM)
        store_rows(first.to(OPERAND), state_factor_ptr, DIM)
        store_rows(other.to(OPERAND), state_factor_ptr + HALF, DIM)
        W = gl.where(lower, W * scale, 0.0)
        store_rows(W.to(OPERAND), out_factor_ptr + place * (CHUNK * CHUNK), CHUNK)
