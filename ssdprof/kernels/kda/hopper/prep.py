"""The parts of a chunk that do not depend on the state.

The equations, and the tensors between the kernels, are in `../fused.py`.  q and k are normalised,
K = 128, and a chunk has 64 positions.

Decays.  A thread has 16 positions of two channels in registers.  With a_i = exp(g_i), a pair of a
row i and an earlier column j decays by a_(j+1) ... a_i.  No decay is computed from gates of later
positions than i, so that no output depends on later gates.

A pair inside a block of eight positions has the block's first position b as its anchor.  With
a' = max(a, 2^-24), the operands of its product are multiplied by

    D_i = 2^84 a'_(b+1) ... a'_i      rows by D_i, columns by 1 / D_j

D is between 2^-84 and 2^84 for any gates, which is in the range of bf16.  Only products with j
before i are used; the others may overflow.

All other pairs are in two neighbouring blocks of h = 8, 16 or 32 positions.  Each block has

    P_i = a_b ... a_i          from the block's first position b
    S_i = a_(i+1) ... a_e      to the block's last position e
    T   = a_b ... a_e          of the whole block

A row i in the second block and a column j in the first block decay by P_i S_j.  Both factors are at
most 1.

Scores.  One product computes scores of q with k and of k with k: its rows are eight of q and eight
of k in turn, so that a thread has both scores of a pair.  The products have q and k before the
norm; 1 / |q_i| and 1 / |k_j| are factors of the scores.

Work.  A program has four warps, so that two programs fit on a multiprocessor.  It processes half of
the channels at a time; TMA has loaded both halves before.  Registers limit the kernel: a thread has
255, and spilled registers are in L2, because shared memory leaves no L1.  Each warp computes the
scores inside its 16 positions (h = 8), then two warps together those inside 32 positions (h = 16),
and all four those between the halves of the chunk (h = 32).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ssdprof.kernels._gluon import (
    async_load,
    async_store,
    masked,
    product_layout,
    reinterpret,
    role_barrier,
    wait_until_written,
)
from ssdprof.kernels.gdn.hopper.inverse import (
    BLOCK,
    BLOCKS,
    allocate_scratch,
    invert_blocks,
    narrow,
    side_by_side,
)
from ssdprof.kernels.gdn.hopper.prep_kernel import EPSILON
from ssdprof.kernels.gdn.hopper.role_gates import LOG2_E
from ssdprof.kernels.hopper.ring import CHUNK, barriers
from ssdprof.kernels.kda.hopper.tiles import DIM, HALF, halves_of

WARPS = gl.constexpr(4)  # of the first role of every program of KDA's Hopper kernels
EIGHT = gl.constexpr(8)  # positions of the smallest blocks
ANCHOR = gl.constexpr(2.0**84)  # D at the anchor
# layouts of shared memory without swizzle: of rows, and of a vector
plain = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
vector_layout = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# register layout of (i, HALF): a thread has 16 positions of two channels
thread_layout = gl.constexpr(gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0]))
# register layout of (block, HALF) with four blocks, or one
by_block = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
# register layouts of products of 64 rows: with 64 columns, (i, j) or (i, HALF), and with 32 columns
square_layout = gl.constexpr(product_layout(64, 4))
halves_layout = gl.constexpr(product_layout(32, 4))
# register layouts of products: in blocks of 16 positions, one for each warp, (block, i, j); between
# these blocks, (pair, i, j)
blocks_layout = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
pairs_layout = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, 1, 2], [1, 16, 8]))
# register layout of scores of q alone, or of k alone, in one block of 8 of each 16 positions,
# (block, i, j)
eights_layout = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1]],
        [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0], [2, 0, 0]],
        [],
        [4, 8, 8],
    )
)
# the same between the halves of the chunk, (i, j)
quadrant_layout = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16]],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0]],
        [],
        [32, 32],
    )
)

# stages of functions (`stalls/attribute.py`); others belong to the stage that calls them
STAGES = {
    "prepare_chunk": "setup", "norm_factors": "qk_l2norm", "decayed_scores": "decayed_scores",
    "products": "decayed_scores", "store_P": "decayed_scores", "decays_of": "gate_cumsum",
    "gated_decays": "gate_cumsum", "log1p_of": "gate_cumsum",
    "of_doubled_blocks": "gate_cumsum", "between_blocks": "gate_cumsum",
    "store_system": "solve_tril", "inverse_of": "solve_tril", "store_factors": "state_factor",
    "load_betas": "loads", "allocate_inputs": "setup", "load_inputs": "loads",
}  # fmt: skip


@gluon.jit
def allocate_tile(dtype: gl.constexpr, shape: gl.constexpr):
    """Shared memory (..., i, n) in the layout that TMA and matrix products read."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape[-2:], dtype)
    return gl.allocate_shared_memory(dtype, shape, layout)


@gluon.jit
def map_fp32(code: gl.constexpr, v):
    """The result $0 of PTX code for every fp32 number $1 of v."""
    return gl.inline_asm_elementwise(code, "=f,f", [v], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def times(rows, decays, dtype: gl.constexpr):
    """rows times decays (fp32), rounded as operands of products: to bf16, to fp16, or for fp32 to
    numbers that tf32 can represent.  For bf16 the decays are rounded too, before one instruction
    multiplies two numbers.
    """
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "mul.bf16x2 $0, $1, $2;",
            "=r,r,r",
            [rows, decays.to(dtype)],
            dtype=gl.bfloat16,
            is_pure=True,
            pack=2,
        )
    elif dtype == gl.float16:
        return (rows.to(gl.float32) * decays).to(dtype)
    else:
        return map_fp32("cvt.rna.tf32.f32 $0, $1;", rows.to(gl.float32) * decays)


@gluon.jit
def decays_of(g):
    """The decays e^g, at most 1; below 2^-126 they are 0, and NaN stays NaN."""
    code: gl.constexpr = (
        "{.reg .b32 t; mov.b32 t, 0; min.NaN.f32 t, $1, t; ex2.approx.ftz.f32 $0, t;}"
    )
    return map_fp32(code, g.to(gl.float32) * LOG2_E)


@gluon.jit
def log1p_of(t):
    """ln(1 + t) for t from 0 to 1, with a relative error of at most 2e-6: t times the polynomial of
    degree 6 that has the values of ln(1 + t) / t at seven Chebyshev nodes.
    """
    p = 0.013874485 * t - 0.065590306
    p = p * t + 0.14829413
    p = p * t - 0.2345452
    p = p * t + 0.33097526
    p = p * t - 0.49985899
    p = p * t + 0.99999857
    return p * t


@gluon.jit
def gated_decays(g, gate, half, layout: gl.constexpr):
    """The decays of half of the channels of a chunk, in the layout of g (i, HALF).

    g: log gates, if `gate` has no A_log; otherwise the output of the projection.
    gate: A_log and dt_bias, or None each; the head; the number of positions from the chunk's start
        to the end of the sequence; lower_bound.  Equations: `RawKDAInputs`.  Positions beyond the
        end, where g is 0, do not decay.
    """
    A_log_ptr, dt_bias_ptr, head, remaining, lower_bound = gate
    if A_log_ptr is None:
        return decays_of(g)
    else:
        o_d = head * DIM + half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))
        bias = gl.load(dt_bias_ptr + o_d).to(gl.float32)[None, :]
        rate = gl.exp2(gl.load(A_log_ptr + head).to(gl.float32) * LOG2_E)
        raw = g.to(gl.float32) + bias
        if lower_bound is None:
            # softplus(x) = max(x, 0) + ln(1 + e^-|x|)
            t = map_fp32("ex2.approx.ftz.f32 $0, $1;", gl.abs(raw) * -LOG2_E)
            log_gate = -rate * (gl.maximum(raw, 0.0) + log1p_of(t))
        else:
            t = map_fp32("ex2.approx.ftz.f32 $0, $1;", rate * raw * -LOG2_E)
            log_gate = lower_bound * map_fp32("rcp.approx.ftz.f32 $0, $1;", 1.0 + t)
        o_i = gl.arange(0, g.shape[0], gl.SliceLayout(1, layout))[:, None]
        return decays_of(gl.where(o_i < remaining, log_gate, 0.0))


@gluon.jit
def clamped_decays(a):
    """a' = max(a, 2^-24); NaN stays NaN.  0x33800000 is 2^-24."""
    return map_fp32("{.reg .b32 t; mov.b32 t, 0x33800000; max.NaN.f32 $0, $1, t;}", a)


@gluon.jit
def spread(T, LOG2_COPIES: gl.constexpr, layout: gl.constexpr):
    """T (n, K) with each row 2^LOG2_COPIES times, (n * 2^LOG2_COPIES, K), in `layout`."""
    for _ in gl.static_range(LOG2_COPIES):
        T = gl.join(T, T).permute((0, 2, 1)).reshape([2 * T.shape[0], T.shape[1]])
    return gl.convert_layout(T, layout)


@gluon.jit
def of_doubled_blocks(P, S, T, level: gl.constexpr, layout: gl.constexpr):
    """P and S (i, K) and T (blocks, K) of blocks of 2^(level + 1) positions, from those of blocks
    of 2^level positions.  layout: that of P and S.
    """
    second = (gl.arange(0, P.shape[0], gl.SliceLayout(1, layout))[:, None] >> level & 1) == 1
    pairs = T.reshape([T.shape[0] // 2, 2, T.shape[1]])
    first_T, second_T = gl.split(pairs.permute((0, 2, 1)))
    P = gl.where(second, P * spread(first_T, level + 1, layout), P)
    S = gl.where(second, S, S * spread(second_T, level + 1, layout))
    return P, S, first_T * second_T


@gluon.jit
def block_indices(layout: gl.constexpr):
    """The row i (1, BLOCK, 1) and the column j (1, 1, BLOCK) of the entries of (block, i, j)."""
    o_i = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    o_j = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    return o_i[None, :, None], o_j[None, None, :]


@gluon.jit
def product_of(rows, columns, acc, layout: gl.constexpr):
    """acc (block, i, j) + products of tiles (block, i, K) and (block, j, K) of shared memory."""
    # numbers in a 32-bit register of an operand
    width: gl.constexpr = 1 if rows.dtype == gl.float32 else 2
    row_operand = rows.load(gl.DotOperandLayout(0, layout, width))
    return mma_v2(
        row_operand, columns.permute((0, 2, 1)).load(gl.DotOperandLayout(1, layout, width)), acc
    )


@gluon.jit
def norm_factors(q, k):
    """1 / |q_i|, 1 / |k_i| and q_i . k_i, (block, i) each, from the diagonals of products.

    q, k: before the norm, in shared memory, (half of K, i, K / 2).
    """
    i, j = block_indices(blocks_layout)
    zero = gl.full([BLOCKS, BLOCK, BLOCK], 0.0, gl.float32, blocks_layout)
    shape: gl.constexpr = [BLOCKS, BLOCK, HALF]
    # products (block, i, j) of q with q, k with k and q with k, over both halves of the channels
    qq, kk, qk = zero, zero, zero
    for half in gl.static_range(2):
        q_blocks, k_blocks = q.index(half).reshape(shape), k.index(half).reshape(shape)
        qq = product_of(q_blocks, q_blocks, qq, blocks_layout)
        kk = product_of(k_blocks, k_blocks, kk, blocks_layout)
        qk = product_of(q_blocks, k_blocks, qk, blocks_layout)
    q_factor = gl.rsqrt(gl.sum(gl.where(i == j, qq, zero), 2) + EPSILON)
    k_factor = gl.rsqrt(gl.sum(gl.where(i == j, kk, zero), 2) + EPSILON)
    return q_factor, k_factor, gl.sum(gl.where(i == j, qk, zero), 2)


@gluon.jit
def between_blocks(quarters):
    """Decays (4, HALF) of the four blocks of a chunk, a row each, which have 16 positions here and
    8 in `decays.py`.  quarters: the T (4, HALF) of these blocks in shared memory.

    Returns the decays between the block and the middle of the chunk: to it in the first half, since
    it in the second; the decays from the chunk's start to the block; the decays from the block to
    the chunk's end; and the decays over the whole chunk (1, HALF).
    """
    # the T of each block, (1, HALF)
    o_b = gl.arange(0, BLOCKS, gl.SliceLayout(1, by_block))[:, None]
    t0, t1 = quarters.slice(0, 1).load(by_block), quarters.slice(1, 1).load(by_block)
    t2, t3 = quarters.slice(2, 1).load(by_block), quarters.slice(3, 1).load(by_block)
    # from the start of the block's half of the chunk to the block, and from it to the half's end
    since_half_start = gl.where(o_b == 1, t0, gl.where(o_b == 3, t2, 1.0))
    to_half_end = gl.where(o_b == 0, t1, gl.where(o_b == 2, t3, 1.0))
    since_start = since_half_start * gl.where(o_b < 2, 1.0, t0 * t1)
    to_end = to_half_end * gl.where(o_b < 2, t2 * t3, 1.0)
    between = gl.where(o_b < 2, to_half_end, since_half_start)
    return between, since_start, to_end, t0 * t1 * (t2 * t3)


@gluon.jit
def eights_of(tile):
    """The first and the second eight positions of each block of 16 of a tile (i, K), as (block, i,
    K) each.
    """
    blocks = tile.reshape([tile.shape[0] // BLOCK, 2, EIGHT, tile.shape[1]])
    return gl.split(blocks.permute((0, 2, 3, 1)))


@gluon.jit
def in_turn(q, k):
    """The rows of q and k (i, HALF) in turn, eight of each: (2 i, HALF)."""
    both = gl.join(q, k).reshape([q.shape[0] // EIGHT, EIGHT, HALF, 2]).permute((0, 3, 1, 2))
    return both.reshape([2 * q.shape[0], HALF])


@gluon.jit
def sorted_pairs(tile, PAIRS: gl.constexpr):
    """The rows of a tile (rows, HALF), which is PAIRS pairs of blocks, in another order: the first
    blocks of all pairs, then their second blocks.
    """
    ROWS: gl.constexpr = tile.shape[0]
    tile = tile.reshape([PAIRS, 2, ROWS // (2 * PAIRS), HALF])
    return tile.permute((1, 0, 2, 3)).reshape([ROWS, HALF])


@gluon.jit
def store_anchored(q, k, a, rows, columns):
    """Store the operands of pairs inside blocks of 8, which are multiplied by D and 1 / D: those of
    the first block of 8 of each 16 positions, then those of the second blocks.

    rows (128, HALF), columns (64, HALF): shared memory for the operands: in `rows` eight rows of q
        and eight of k in turn, in `columns` k.
    """
    # D (i, HALF): products of a' inside each block of 8; the anchor's factor is ANCHOR
    o_i = gl.arange(0, CHUNK, gl.SliceLayout(1, thread_layout))[:, None]
    D = clamped_decays(a)
    D = gl.where((o_i & 7) == 0, ANCHOR, D)
    T = D  # of blocks of one position
    for level in gl.static_range(3):
        D, _, T = of_doubled_blocks(D, D, T, level, thread_layout)
    # rows: (first or second block of 8, block of 16, q or k, i, HALF); columns: the same without q
    # or k
    rows.store(sorted_pairs(in_turn(times(q, D, rows.dtype), times(k, D, rows.dtype)), BLOCKS))
    tile = times(k, map_fp32("rcp.approx.ftz.f32 $0, $1;", D), rows.dtype)
    columns.store(sorted_pairs(tile, BLOCKS))


@gluon.jit
def store_between_eights(q, k, P, S, rows, columns):
    """Store the operands of pairs between the two blocks of 8 of each 16 positions (h = 8): those
    of the second blocks, times P, in the first half of `rows`, and those of the first blocks, times
    S, in the first half of `columns`.
    """
    dtype: gl.constexpr = rows.dtype
    _, second_q = eights_of(q)
    first_k, second_k = eights_of(k)
    _, second_P = eights_of(P)
    first_S, _ = eights_of(S)
    both = gl.join(times(second_q, second_P, dtype), times(second_k, second_P, dtype))
    both = both.permute((0, 3, 1, 2))  # (block of 16, q or k, i, HALF)
    tile = times(first_k, first_S, dtype).reshape([CHUNK // 2, HALF])
    role_barrier()  # all warps have read the operands before
    halves_of(rows).index(0).store(both.reshape([CHUNK, HALF]))
    halves_of(columns).index(0).store(tile)


@gluon.jit
def store_between(q, k, decays, rows, columns, PAIRS: gl.constexpr):
    """Store the operands of pairs between blocks of 16 or 32: those of the first block of each pair
    of blocks, then those of the second block.

    decays (i, HALF): S in first blocks, P in second blocks.
    """
    tile = times(k, decays, rows.dtype)
    both = in_turn(times(q, decays, rows.dtype), tile)
    role_barrier()  # all warps have read the operands before
    # rows: (first or second block, pair, eight, q or k, i, HALF); columns: (first or second block,
    # pair, i, HALF)
    rows.store(sorted_pairs(both, PAIRS))
    columns.store(sorted_pairs(tile, PAIRS))


@gluon.jit
def products(q, k, a, scores, rows, columns, wide_rows, wide_columns, quarters):
    """Add the part of HALF channels to the scores.  Returns the scores, P and S of the whole chunk
    (i, HALF), and its T (1, HALF), the decays over the chunk.  The product of the last of the four
    scores is asynchronous: the caller waits for it.

    q, k (i, HALF): before the norm.  a (i, HALF): decays.
    scores: four tensors: inside blocks of 8, (block, q and k, j), the first block of each 16
        positions before all second ones; between the two blocks of 8 of each 16 positions, (block,
        q and k, j); between blocks of 16, (pair, q and k, j); between the halves of the chunk, (q
        and k, j).
    rows (128, HALF), columns (64, HALF): shared memory for operands.  wide_rows, wide_columns: the
        same in a dtype with the range of bf16.
    quarters (4, HALF): shared memory for T of each block of 16.
    """
    eights, sixteens, pairs, halves = scores
    o_i = gl.arange(0, CHUNK, gl.SliceLayout(1, thread_layout))[:, None]
    # inside blocks of 8; meanwhile P, S and T of these blocks
    store_anchored(q, k, a, wide_rows, wide_columns)
    P, S, T = a, gl.full([CHUNK, HALF], 1.0, gl.float32, thread_layout), a
    for level in gl.static_range(3):
        P, S, T = of_doubled_blocks(P, S, T, level, thread_layout)
    role_barrier()
    eights = product_of(
        wide_rows.reshape([2 * BLOCKS, 2 * EIGHT, HALF]),
        wide_columns.reshape([2 * BLOCKS, EIGHT, HALF]),
        eights,
        blocks_layout,
    )
    # h = 8
    store_between_eights(q, k, P, S, rows, columns)
    P, S, T = of_doubled_blocks(P, S, T, 3, thread_layout)
    quarters.store(gl.convert_layout(T, by_block))
    role_barrier()
    sixteens = product_of(
        halves_of(rows).index(0).reshape([BLOCKS, 2 * EIGHT, HALF]),
        halves_of(columns).index(0).reshape([BLOCKS, EIGHT, HALF]),
        sixteens,
        blocks_layout,
    )
    between, since_start, to_end, over_chunk = between_blocks(quarters)
    # h = 16
    store_between(q, k, gl.where((o_i >> 4 & 1) == 1, P, S), rows, columns, 2)
    role_barrier()
    pairs = product_of(
        halves_of(rows).index(1).reshape([2, 2 * BLOCK, HALF]),
        halves_of(columns).index(0).reshape([2, BLOCK, HALF]),
        pairs,
        pairs_layout,
    )
    # h = 32
    decays = gl.where(o_i >= 32, P, S) * spread(between, 4, thread_layout)
    store_between(q, k, decays, rows, columns, 1)
    fence_async_shared()
    role_barrier()
    halves = warpgroup_mma(
        halves_of(rows).index(1), halves_of(columns).index(0).permute((1, 0)), halves, is_async=True
    )
    scores = (eights, sixteens, pairs, halves)
    return (
        scores,
        P * spread(since_start, 4, thread_layout),
        S * spread(to_end, 4, thread_layout),
        over_chunk,
    )


@gluon.jit
def of_blocks(vector, COUNT: gl.constexpr):
    """A vector of fp32 numbers in shared memory as (COUNT blocks, i)."""
    return reinterpret(vector, gl.float32, [COUNT, vector.shape[0] // COUNT], plain)


@gluon.jit
def block_of(first, second, between):
    """Scores in blocks of 16, (block, i, j), from their blocks of 8: the first and the second one
    on the diagonal, and the one below it.  The block of 8 above the diagonal is 0.
    """
    first, second = (
        gl.convert_layout(first, eights_layout),
        gl.convert_layout(second, eights_layout),
    )
    between = gl.convert_layout(between, eights_layout)
    upper = gl.join(first, gl.full([BLOCKS, EIGHT, EIGHT], 0.0, gl.float32, eights_layout))
    # from (block, i, j, left or right, upper or lower)
    block = gl.join(upper, gl.join(between, second)).permute((0, 4, 1, 3, 2))
    return gl.convert_layout(block.reshape([BLOCKS, BLOCK, BLOCK]), blocks_layout)


@gluon.jit
def separated(scores):
    """The scores of q with k, and those of k with k, of scores in the form of `products`.  Each of
    the two is (block, i, j) in blocks of 16, (pair, i, j) between these blocks, and (i, j) between
    the halves of the chunk.
    """
    eights, sixteens, pairs, halves = scores
    # (block, i, j, first or second block of 8, q or k)
    eights = eights.reshape([2, BLOCKS, 2, EIGHT, EIGHT]).permute((1, 3, 4, 0, 2))
    q_eights, k_eights = gl.split(eights)
    q_sixteens, k_sixteens = gl.split(
        sixteens.reshape([BLOCKS, 2, EIGHT, EIGHT]).permute((0, 2, 3, 1))
    )
    q_pairs, k_pairs = gl.split(pairs.reshape([2, 2, 2, EIGHT, BLOCK]).permute((0, 1, 3, 4, 2)))
    q_halves, k_halves = gl.split(halves.reshape([4, 2, EIGHT, CHUNK // 2]).permute((0, 2, 3, 1)))
    return (
        arranged(q_eights, q_sixteens, q_pairs, q_halves),
        arranged(k_eights, k_sixteens, k_pairs, k_halves),
    )


@gluon.jit
def arranged(eights, sixteens, pairs, halves):
    """The scores of q alone, or of k alone, in the form of `separated`, and in the register layouts
    in which they are scaled.
    """
    first, second = gl.split(eights)
    return (
        block_of(first, second, sixteens),
        gl.convert_layout(pairs.reshape([2, BLOCK, BLOCK]), pairs_layout),
        gl.convert_layout(halves.reshape([CHUNK // 2, CHUNK // 2]), quadrant_layout),
    )


@gluon.jit
def scaled(scores, i_factors, j_factors, layout: gl.constexpr):
    """Scores (block, i, j) times factors of their rows and columns, which are vectors of the chunk
    in shared memory.
    """
    i = of_blocks(i_factors, scores.shape[0]).load(gl.SliceLayout(2, layout))
    j = of_blocks(j_factors, scores.shape[0]).load(gl.SliceLayout(1, layout))
    return scores * i[:, :, None] * j[:, None, :]


@gluon.jit
def scaled_pairs(pairs, i_factors, j_factors):
    """Scores (pair, i, j) times factors of their rows and columns: see `scaled`."""
    i = of_blocks(i_factors, 2).slice(BLOCK, BLOCK, dim=1).load(gl.SliceLayout(2, pairs_layout))
    j = of_blocks(j_factors, 2).slice(0, BLOCK, dim=1).load(gl.SliceLayout(1, pairs_layout))
    return pairs * i[:, :, None] * j[:, None, :]


@gluon.jit
def scaled_halves(halves, i_factors, j_factors, layout: gl.constexpr):
    """Scores (i, j) between the halves times factors of their rows and columns: see `scaled`."""
    LENGTH: gl.constexpr = halves.shape[0]
    i = i_factors.slice(LENGTH, LENGTH).load(gl.SliceLayout(1, layout))
    j = j_factors.slice(0, LENGTH).load(gl.SliceLayout(0, layout))
    return halves * i[:, None] * j[None, :]


@gluon.jit
def inverse_of(scratch, lower_pairs, lower_halves, beta, dtype: gl.constexpr):
    """beta_j A_ij (j, i) with A = (I + L)^-1.

    L is in shared memory: its diagonal blocks in `scratch` (`Scratch.diagonal`), (pair, i, j)
    between blocks, and (i, j) between the halves.  The last barrier of `store_P` orders its stores.

    Block row i of A follows from the rows before it: it is D_i (E_i - sum_{j < i} L_ij A_j), where
    D_i is the inverse of the diagonal block, and E_i block row i of the identity.
    """
    layout: gl.constexpr = narrow(WARPS)
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    # the inverses D_i of the diagonal blocks
    invert_blocks(scratch.diagonal, scratch.inverted, 1)
    # block column i of the transposed A, (j, i of the block), from those before it
    beta = beta.load(gl.SliceLayout(1, layout))
    o_j = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    o_i = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    zero = gl.full([CHUNK, BLOCK], 0.0, gl.float32, layout)
    rows, scaled_rows = (), ()  # block rows of A, transposed, as operands; the same times beta_j
    for i in gl.static_range(BLOCKS):
        earlier = zero  # the sum over j of L_ij A_j, transposed
        for j in gl.static_range(i):
            if i // 2 == j // 2:  # both in one half of the chunk
                L_ij = lower_pairs.slice(BLOCK * (i // 2), BLOCK)
            else:  # i in the second half, j in the first
                L_ij = lower_halves.slice(BLOCK * (i - 2), BLOCK).slice(BLOCK * j, BLOCK, dim=1)
            earlier = mma_v2(rows[j], L_ij.permute((1, 0)).load(right), earlier)
        identity = gl.where(o_j[:, None] - BLOCK * i == o_i[None, :], 1.0, 0.0)
        D_i = scratch.inverted.slice(BLOCK * i, BLOCK).load(right)
        row = mma_v2(gl.convert_layout((identity - earlier).to(gl.float16), left), D_i, zero)
        rows += (gl.convert_layout(row.to(gl.float16), left),)
        scaled_rows += ((row * beta[:, None]).to(dtype),)
    return side_by_side(0, 1, scaled_rows)


@gluon.jit
def square_of(blocks, pairs):
    """A matrix (i, j) with the diagonal blocks `blocks` (block, i, j), and `pairs` (pair, i, j)
    between them; zeros elsewhere.
    """
    # the block row and the block column of each entry
    i_b = gl.arange(0, CHUNK, gl.SliceLayout(1, square_layout))[:, None] >> 4
    j_b = gl.arange(0, CHUNK, gl.SliceLayout(0, square_layout))[None, :] >> 4
    zeros = gl.full([CHUNK, CHUNK], 0, gl.int16, square_layout)
    # copies: each block in all four columns of its block row, and each pair in all columns of its
    # two block rows
    blocks = gl.join(gl.join(blocks, blocks), gl.join(blocks, blocks)).permute((0, 1, 3, 4, 2))
    pairs = gl.join(pairs, pairs)
    pairs = gl.join(gl.join(pairs, pairs), gl.join(pairs, pairs))  # (pair, i, j, 2, 2, 2)
    pairs = pairs.permute((0, 3, 1, 4, 5, 2)).reshape([CHUNK, CHUNK])
    blocks = gl.convert_layout(blocks.reshape([CHUNK, CHUNK]), square_layout)
    # pairs stay in block (1, 0) and (3, 2), and on the diagonal, where blocks replace them
    pairs = masked(gl.convert_layout(pairs, square_layout), zeros - (i_b == (j_b | 1)).to(gl.int16))
    return gl.where(i_b == j_b, blocks, pairs)


@gluon.jit
def allocate_inputs(dtype: gl.constexpr, gate_dtype: gl.constexpr):
    """Shared memory for q, k and g of a chunk, (half of K, i, K / 2) each, and two mbarriers: the
    first one completes when q and k are loaded, the second one when g is.
    """
    full = barriers(2)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
    role_barrier()
    q_tiles, k_tiles = (
        allocate_tile(dtype, [2, CHUNK, HALF]),
        allocate_tile(dtype, [2, CHUNK, HALF]),
    )
    return (q_tiles, k_tiles, allocate_tile(gate_dtype, [2, CHUNK, HALF])), full


@gluon.jit
def load_betas(beta_ptr, strides, sequence, t, head, is_packed: gl.constexpr):
    """beta of a chunk (block, i) in fp32; 0 beyond the end of the sequence."""
    of_row: gl.constexpr = gl.SliceLayout(2, blocks_layout)
    batch = gl.where(is_packed, 0, sequence.index).to(gl.int64)
    o_b = gl.arange(0, BLOCKS, gl.SliceLayout(1, of_row))[:, None]
    o_t = t + o_b * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, of_row))[None, :]
    rows = beta_ptr + batch * strides[0] + head.to(gl.int64) * strides[2]
    where = rows + (sequence.begin + o_t).to(gl.int64) * strides[1]
    return gl.load(where, mask=o_t < sequence.length, other=0.0).to(gl.float32)


@gluon.jit
def stored(v):
    """New shared memory (CHUNK) with the number of each position, v (block, i)."""
    memory = gl.allocate_shared_memory(gl.float32, [CHUNK], vector_layout)
    memory.store(v.reshape([CHUNK]))
    return memory


@gluon.jit
def decayed_scores(tiles, q_factors, k_factors, gate, descs, ends_ptr, row, scale):
    """The scores of a chunk in the form of `products`, all of them complete, and shared memory with
    its keys decayed to the chunk's end, (half of K, j, K / 2) in fp16.

    Stores the keys and queries of `../fused.py`, which are k and q decayed since the chunk's start,
    the queries with the scale, in place of k and q in `tiles`.  Starts to store them through their
    descriptors `descs` from `row` on in global memory.  Stores the decays over the whole chunk (K)
    at ends_ptr.

    q_factors, k_factors: 1 / |q_i| and 1 / |k_i| (CHUNK) in shared memory.
    gate: that of `gated_decays`.
    """
    keys_desc, queries_desc = descs
    q_tiles, k_tiles, g_tiles = tiles
    dtype: gl.constexpr = q_tiles.dtype
    # shared memory for operands; fp16 does not have the range that blocks of 8 need
    rows, columns = allocate_tile(dtype, [2 * CHUNK, HALF]), allocate_tile(dtype, [CHUNK, HALF])
    wide_rows, wide_columns = rows, columns
    if dtype == gl.float16:
        wide_rows = allocate_tile(gl.float32, [2 * CHUNK, HALF])
        wide_columns = allocate_tile(gl.float32, [CHUNK, HALF])
    quarters = gl.allocate_shared_memory(gl.float32, [BLOCKS, HALF], plain)
    at_end = allocate_tile(gl.float16, [2, CHUNK, HALF])
    scores = (
        gl.full([2 * BLOCKS, 2 * EIGHT, EIGHT], 0.0, gl.float32, blocks_layout),
        gl.full([BLOCKS, 2 * EIGHT, EIGHT], 0.0, gl.float32, blocks_layout),
        gl.full([2, 2 * BLOCK, BLOCK], 0.0, gl.float32, pairs_layout),
        gl.full([CHUNK, CHUNK // 2], 0.0, gl.float32, halves_layout),
    )
    for half in range(2):
        q, k = q_tiles.index(half).load(thread_layout), k_tiles.index(half).load(thread_layout)
        a = gated_decays(g_tiles.index(half).load(thread_layout), gate, half, thread_layout)
        scores, since_start, to_end, over_chunk = products(
            q, k, a, scores, rows, columns, wide_rows, wide_columns, quarters
        )
        # stage gate_cumsum: keys, queries, and keys decayed to the chunk's end (i, HALF)
        k_row = k.to(gl.float32) * k_factors.load(gl.SliceLayout(1, thread_layout))[:, None]
        q_row = (
            q.to(gl.float32) * (q_factors.load(gl.SliceLayout(1, thread_layout)) * scale)[:, None]
        )
        q_tiles.index(half).store((q_row * since_start).to(dtype))
        k_tiles.index(half).store((k_row * since_start).to(dtype))
        at_end.index(half).store((k_row * to_end).to(gl.float16))
        o_e = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, by_block))
        gl.store(ends_ptr + o_e[None, :], over_chunk)
        eights, sixteens, pairs, halves = scores
        halves = warpgroup_mma_wait(0, deps=[halves])
        scores = (eights, sixteens, pairs, halves)
        # TMA reads what all warps have stored
        fence_async_shared()
        role_barrier()
        async_store(keys_desc, [row, half * HALF], k_tiles.index(half))
        async_store(queries_desc, [row, half * HALF], q_tiles.index(half))
    return scores, at_end


@gluon.jit
def store_system(of_k, beta_factors, k_factors, scratch):
    """Store L in shared memory: its diagonal blocks in `scratch`, and its other parts in new
    memory.  Returns that memory: between blocks, (pair, i, j), and between the halves of the chunk,
    (i, j).

    of_k: scores of k with k (`separated`).  beta_factors, k_factors: beta_i / |k_i| and 1 / |k_i|
        (CHUNK).
    """
    lower_pairs = gl.allocate_shared_memory(gl.float16, [2 * BLOCK, BLOCK], plain)
    lower_halves = gl.allocate_shared_memory(gl.float16, [CHUNK // 2, CHUNK // 2], plain)
    blocks, pairs, halves = of_k
    L = scaled(blocks, beta_factors, k_factors, blocks_layout)
    scratch.diagonal.store(L.permute((2, 0, 1)).reshape([1, CHUNK, BLOCK]))
    L = scaled_pairs(pairs, beta_factors, k_factors).to(gl.float16)
    lower_pairs.store(L.reshape([2 * BLOCK, BLOCK]))
    L = scaled_halves(halves, beta_factors, k_factors, quadrant_layout).to(gl.float16)
    lower_halves.store(L)
    return lower_pairs, lower_halves


@gluon.jit
def store_P(of_q, diagonal, q_factors, k_factors, P_tile):
    """Store P (i, j), without the scale, in the shared memory `P_tile`.

    of_q: scores of q with k (`separated`).  (CHUNK) each: q_i . k_i in `diagonal`, 1 / |q_i| in
        `q_factors`, 1 / |k_i| in `k_factors`.
    """
    blocks, pairs, halves = of_q
    i, j = block_indices(blocks_layout)
    q_k = of_blocks(diagonal, BLOCKS).load(gl.SliceLayout(2, blocks_layout))[:, :, None]
    P = scaled(gl.where(i == j, q_k, blocks), q_factors, k_factors, blocks_layout)
    P = gl.where(i >= j, P, 0.0).to(gl.float16)
    P_pairs = scaled_pairs(pairs, q_factors, k_factors).to(gl.float16)
    P_tile.store(square_of(P, P_pairs))
    role_barrier()  # all warps have stored the whole matrix, of which the next store replaces zeros
    P_tile.slice(CHUNK // 2, CHUNK // 2).slice(0, CHUNK // 2, dim=1).store(
        scaled_halves(halves, q_factors, k_factors, quadrant_layout).to(gl.float16)
    )
    role_barrier()  # all warps have stored L and P, which later functions read


@gluon.jit
def store_factors(inverse, at_end, P_tile, tiles, descs, row, scale):
    """Store X = diag(beta) A^T at_end in place of the queries in `tiles`, and W = scale P A
    diag(beta) in place of the keys; both through their descriptors `descs` from `row` on in global
    memory.  At the end, all stores of the thread to global memory are complete.

    inverse: beta_j A_ij (j, i).  at_end: keys decayed to the chunk's end, (half of K, j, K / 2).
    P_tile: P (i, j).
    """
    X_desc, W_desc = descs
    q_tiles, k_tiles, _ = tiles
    dtype: gl.constexpr = q_tiles.dtype
    # stage state_factor
    zero = gl.full([CHUNK, CHUNK], 0.0, gl.float32, square_layout)
    first_X = warpgroup_mma(inverse, at_end.index(0), zero, use_acc=False, is_async=True)
    second_X = warpgroup_mma(inverse, at_end.index(1), zero, use_acc=False, is_async=True)
    # stage out_factor
    W = warpgroup_mma(P_tile, inverse.permute((1, 0)), zero, use_acc=False, is_async=True)
    first_X, second_X, W = warpgroup_mma_wait(0, deps=[first_X, second_X, W])
    # until TMA has read keys and queries, whose memory gets X and W
    tma.store_wait(0)
    role_barrier()
    o_i = gl.arange(0, CHUNK, gl.SliceLayout(1, square_layout))
    o_j = gl.arange(0, CHUNK, gl.SliceLayout(0, square_layout))
    q_tiles.index(0).store(first_X.to(dtype))
    q_tiles.index(1).store(second_X.to(dtype))
    k_tiles.index(0).store(gl.where(o_i[:, None] >= o_j[None, :], W * scale, 0.0).to(dtype))
    # TMA reads what all warps have stored
    fence_async_shared()
    role_barrier()
    async_store(X_desc, [row, 0], q_tiles.index(0))
    async_store(X_desc, [row, HALF], q_tiles.index(1))
    async_store(W_desc, [row, 0], k_tiles.index(0))
    wait_until_written()


@gluon.jit
def load_inputs(env, inputs, full, sequence, t, head):
    """Start to load q, k and g of the chunk at position t through TMA, in halves of K."""
    q_desc, k_desc, g_desc, _, _ = env.tensor_descs
    q_tiles, k_tiles, g_tiles = inputs
    mbarrier.expect(full.index(0), 4 * CHUNK * DIM)  # bytes of q and k
    for half in gl.static_range(2):
        where = [sequence.tile, head // env.S.VALUES_PER_KEY, sequence.tile_row + t, half * HALF]
        async_load(q_desc, where, full.index(0), q_tiles.index(half).reshape([1, 1, CHUNK, HALF]))
        async_load(k_desc, where, full.index(0), k_tiles.index(half).reshape([1, 1, CHUNK, HALF]))
    mbarrier.expect(full.index(1), CHUNK * DIM * env.S.GATE_BYTES)  # bytes of g
    for half in gl.static_range(2):
        where = [sequence.tile, head, sequence.tile_row + t, half * HALF]
        g_tile = g_tiles.index(half).reshape([1, 1, CHUNK, HALF])
        async_load(g_desc, where, full.index(1), g_tile)


@gluon.jit
def prepare_chunk(env, tiles, full, sequence, t, head_slot, head):
    """Compute everything that a scan needs of the chunk at position t of a sequence, and store it
    in global memory.

    tiles, full: of `allocate_inputs`, which `load_inputs` has begun to fill.
    head_slot: index of the chunk and its head among the heads of all slots: slot * HV + head.
    """
    row, ends_ptr = head_slot * CHUNK, env.ends_ptr + head_slot.to(gl.int64) * DIM
    keys_desc, queries_desc, X_desc, W_desc = env.factor_descs
    beta = load_betas(env.beta_ptr, env.beta_strides, sequence, t, head, env.S.PACKED)
    # stage qk_l2norm: when q and k are loaded
    mbarrier.wait(full.index(0), 0)
    q_tiles, k_tiles, _ = tiles
    q_factor, k_factor, q_k = norm_factors(q_tiles, k_tiles)
    q_factors, k_factors, diagonal = stored(q_factor), stored(k_factor), stored(q_k)
    beta_factors, betas = stored(k_factor * beta), stored(beta)
    # stage decayed_scores: when g is loaded, and all warps have stored the vectors
    mbarrier.wait(full.index(1), 0)
    role_barrier()
    gate = (env.A_log_ptr, env.dt_bias_ptr, head, sequence.length - t, env.S.LOWER_BOUND)
    scores, at_end = decayed_scores(
        tiles, q_factors, k_factors, gate, (keys_desc, queries_desc), ends_ptr, row, env.scale
    )
    of_q, of_k = separated(scores)
    # stage solve_tril: L, P and the inverse
    scratch = allocate_scratch(1)
    lower_pairs, lower_halves = store_system(of_k, beta_factors, k_factors, scratch)
    P_tile = allocate_tile(gl.float16, [CHUNK, CHUNK])
    store_P(of_q, diagonal, q_factors, k_factors, P_tile)
    inverse = allocate_tile(gl.float16, [CHUNK, CHUNK])
    inverse.store(inverse_of(scratch, lower_pairs, lower_halves, betas, gl.float16))
    # the asynchronous products of `store_factors` read what all warps have stored
    fence_async_shared()
    role_barrier()
    # stages state_factor and out_factor
    store_factors(inverse, at_end, P_tile, tiles, (X_desc, W_desc), row, env.scale)
