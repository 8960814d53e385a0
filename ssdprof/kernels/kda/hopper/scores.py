"""Role `scores` of `whole_kernel.py`: the vectors of a chunk, scores, A = (I + L)^-1, and the
factors that the role `states` multiplies,

    X = diag(beta) A^T (keys at the chunk's end)      (j, K)
    W = scale P A diag(beta)                          (i, j)

All products are small, `mma.sync` of 16 rows, and wait for each other.  Two roles of two warps
therefore take every second chunk each.  A product of the operands that `decays` makes has rows of q
and k in turn, so that a thread has both scores of a pair, and each block of 16 positions is in one
warp.

Loops go over one half of the channels after the other, as `decays` stores them; their code is half
as long (`whole_kernel.py`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2

from ssdprof.kernels._gluon import aggregate, masked, phase, place_in, reinterpret, role_barrier
from ssdprof.kernels.gdn.hopper.inverse import BLOCK
from ssdprof.kernels.gdn.hopper.prep_kernel import EPSILON
from ssdprof.kernels.kda.hopper.prep import (
    EIGHT,
    HALF,
    allocate_tile,
    block_indices,
    of_blocks,
    plain,
    product_of,
    scaled,
    scaled_halves,
)
from ssdprof.kernels.kda.hopper.rings import BETA, K_FACTOR, Q_DOT_K, Q_FACTOR, Q_SCALED, SIZE
from ssdprof.kernels.kda.hopper.tiles import halves_of

# Register layouts for two warps.  (block, i, j): a warp has a block of 16.
blocks_layout = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, 1, 1], [1, 16, 8]))
# (i, j): a warp has half of the rows; or half of the columns
rows_layout = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, 1], [16, 8]))
columns_layout = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 2], [16, 8]))
# scores of q alone, or of k alone, between the halves of the chunk, (i, j) of 16
quarter_layout = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 8]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0]], [], [16, 16]
    )
)
# the swizzle of `allocate_tile` for 64 columns of 16-bit numbers, in a layout whose rows can be
# sliced
swizzled = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
by_position = gl.constexpr(gl.BlockedLayout([1], [32], [2], [0]))

# stages of functions (`stalls/attribute.py`); others belong to the stage that calls them
STAGES = {
    "store_vectors": "qk_l2norm", "load_beta": "loads", "products": "decayed_scores",
    "store_scores": "decayed_scores", "inverse_of": "solve_tril", "store_inverse": "solve_tril",
    "store_factors": "state_factor", "score_chunk": "setup", "scores": "setup",
}  # fmt: skip


@aggregate
class ScoreTiles:
    """Shared memory of one of the two roles, which no other role reads."""

    diagonal: gl.shared_memory_descriptor  # -L of blocks of 16 (block, i, j), fp16
    below: gl.shared_memory_descriptor  # L between the blocks (i, j), fp16
    P_tile: gl.shared_memory_descriptor  # P (i, j), fp16
    # transposed inverses of the diagonal blocks (block * 16 + j, i), fp16
    inverted: gl.shared_memory_descriptor
    inverse: gl.shared_memory_descriptor  # beta_j A_ij (j, i), fp16


@gluon.jit
def load_beta(env, n):
    """beta of the program's n-th chunk (i) in fp32, 0 beyond the sequence's end."""
    o_t = n * SIZE + gl.arange(0, SIZE, by_position)
    where = env.beta_ptr + (env.sequence.begin + o_t).to(gl.int64) * env.beta_stride
    return gl.load(where, mask=o_t < env.sequence.length, other=0.0).to(gl.float32)


@gluon.jit
def diagonal_of(product):
    """The diagonals (block, i) of (block, i, j)."""
    i, j = block_indices(blocks_layout)
    return gl.sum(gl.where(i == j, product, 0.0), 2)


@gluon.jit
def store_vector(rings, v, n, WHICH: gl.constexpr):
    """Store v (block, i) as vector WHICH of the program's n-th chunk."""
    rings.vector(n, WHICH).store(v.reshape([SIZE]))


@gluon.jit
def store_vectors(env, beta, n):
    """Store the vectors of the program's n-th chunk (`rings.py`), from q and k before the norm, and
    from its beta (i).
    """
    rings = env.rings
    left: gl.constexpr = gl.DotOperandLayout(0, blocks_layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, blocks_layout, 2)
    rings.keys.wait_full(n)
    qq = gl.full([2, BLOCK, BLOCK], 0.0, gl.float32, blocks_layout)
    qk, kk = qq, qq
    for half in range(2):
        q = halves_of(rings.query_tile(n)).index(half).reshape([2, BLOCK, HALF]).load(left)
        k = halves_of(rings.keys.tile(n)).index(half).reshape([2, BLOCK, HALF]).load(left)
        # a thread has the same numbers of an operand of rows and of its transpose
        q_columns = gl.convert_layout(q.permute((0, 2, 1)), right)
        k_columns = gl.convert_layout(k.permute((0, 2, 1)), right)
        qq, qk, kk = mma_v2(q, q_columns, qq), mma_v2(q, k_columns, qk), mma_v2(k, k_columns, kk)
    q_factor = gl.rsqrt(diagonal_of(qq) + EPSILON)
    store_vector(rings, q_factor, n, Q_FACTOR)
    store_vector(rings, q_factor * env.scale, n, Q_SCALED)
    store_vector(rings, gl.rsqrt(diagonal_of(kk) + EPSILON), n, K_FACTOR)
    store_vector(rings, diagonal_of(qk), n, Q_DOT_K)
    rings.vector(n, BETA).store(beta)
    mbarrier.arrive(rings.vectors_stored.index(place_in(n, 2)), count=1)


@gluon.jit
def q_and_k_blocks(first, second, between):
    """Scores of q with k, and of k with k, in blocks of 16 (block, i, j), from their blocks of 8:
    the first and the second one on the diagonal, and the one below it, with rows of q and k in
    turn.  The block of 8 above the diagonal has any numbers, which are not used.
    """
    # (block, i, j, left or right, upper or lower)
    block = gl.join(gl.join(first, first), gl.join(between, second))
    block = block.reshape([2, 2, EIGHT, EIGHT, 2, 2]).permute((0, 5, 2, 4, 3, 1))
    q_block, k_block = gl.split(block.reshape([2, BLOCK, BLOCK, 2]))
    return gl.convert_layout(q_block, blocks_layout), gl.convert_layout(k_block, blocks_layout)


@gluon.jit
def add_blocks(acc, rows, columns):
    """acc (block, i, j) + the products of eight rows of q and eight of k with eight columns, for
    each of the two blocks of 16 positions.
    """
    rows, columns = rows.reshape([2, BLOCK, HALF]), columns.reshape([2, EIGHT, HALF])
    return product_of(rows, columns, acc, blocks_layout)


@gluon.jit
def add_half_products(sums, operands, half):
    """The sums with the products of half of the channels added.

    sums: five tensors, whose rows i are those of q and k in turn, eight of each:

    first, second (block, i, j): inside the first and the second eight of each 16 positions
    between (block, i, j): from the first to the second eight of each 16 positions
    first_below, second_below (i, j): between the halves of the chunk, for the first and the second
        eight columns
    """
    first, second, between, first_below, second_below = sums
    # inside blocks of 8
    rows = halves_of(operands.anchor_rows.index(half))
    columns = halves_of(operands.anchor_columns.index(half))
    first = add_blocks(first, rows.index(0), columns.index(0))
    second = add_blocks(second, rows.index(1), columns.index(1))
    # between blocks of 8: rows of q and k of the second ones, columns from rows of k of the first
    rows = halves_of(operands.eight_rows.index(half))
    columns = reinterpret(rows.index(0), rows.dtype, [2, BLOCK, HALF], swizzled)
    columns = columns.slice(EIGHT, EIGHT, dim=1)
    between = product_of(rows.index(1).reshape([2, BLOCK, HALF]), columns, between, blocks_layout)
    # between the halves: rows of q and k of the second one, columns from rows of k of the first
    right: gl.constexpr = gl.DotOperandLayout(1, rows_layout, 2)
    tile = operands.half_rows.index(half)
    rows = tile.slice(SIZE, SIZE).load(gl.DotOperandLayout(0, rows_layout, 2))
    columns = tile.slice(EIGHT, EIGHT).permute((1, 0)).load(right)
    first_below = mma_v2(rows, columns, first_below)
    columns = tile.slice(3 * EIGHT, EIGHT).permute((1, 0)).load(right)
    return first, second, between, first_below, mma_v2(rows, columns, second_below)


@gluon.jit
def products(rings, n):
    """The scores of the program's n-th chunk: those of q with k in blocks of 16 (block, i, j) and
    between the halves (i, j), and then those of k with k in the same form.  Lets `decays` replace
    the operands.
    """
    zero = gl.full([2, BLOCK, EIGHT], 0.0, gl.float32, blocks_layout)
    below = gl.full([SIZE, EIGHT], 0.0, gl.float32, rows_layout)
    sums = (zero, zero, zero, below, below)
    for half in range(2):
        mbarrier.wait(rings.ready_at(n, half), phase(n, 2))
        sums = add_half_products(sums, rings.operands, half)
        mbarrier.arrive(rings.read.index(half), count=1)
    first, second, between, first_below, second_below = sums
    q_block, k_block = q_and_k_blocks(first, second, between)
    below = gl.join(first_below, second_below).permute((0, 2, 1))
    q_below, k_below = gl.split(below.reshape([2, 2, EIGHT, BLOCK]).permute((0, 2, 3, 1)))
    q_below = gl.convert_layout(q_below.reshape([BLOCK, BLOCK]), quarter_layout)
    k_below = gl.convert_layout(k_below.reshape([BLOCK, BLOCK]), quarter_layout)
    return q_block, q_below, k_block, k_below


@gluon.jit
def on_diagonal(blocks):
    """Blocks (block, i, j) as a matrix (i, j) of 32 in fp16, with zeros elsewhere."""
    of_block: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, blocks_layout))
    o_b = gl.arange(0, 2, of_block)[:, None, None].to(gl.int16)
    blocks = blocks.to(gl.float16)
    # masks with all bits or none: block 0 is in the left columns, and block 1 in the right ones
    block = o_b + gl.full([2, BLOCK, BLOCK], 0, gl.int16, blocks_layout)
    wide = gl.join(masked(blocks, block - 1), masked(blocks, -block))
    return wide.permute((0, 1, 3, 2)).reshape([SIZE, SIZE])


@gluon.jit
def store_scores(rings, tiles, scores, n):
    """Store L and P of the program's n-th chunk.  Returns -L of blocks of 16 (block, i, j).

    scores: of `products`.  The same warps have stored the chunk's vectors (`store_vectors`).
    """
    q_block, q_below, k_block, k_below = scores
    k_factor, q_factor = rings.vector(n, K_FACTOR), rings.vector(n, Q_FACTOR)
    i, j = block_indices(blocks_layout)
    # stage solve_tril
    of_row: gl.constexpr = gl.SliceLayout(2, blocks_layout)
    beta = rings.vector(n, BETA)
    L = scaled(gl.where(i > j, k_block, 0.0), k_factor, k_factor, blocks_layout)
    minus_L = (L * -of_blocks(beta, 2).load(of_row)[:, :, None]).to(gl.float16)
    tiles.diagonal.store(minus_L)
    beta_below = beta.slice(BLOCK, BLOCK).load(gl.SliceLayout(1, quarter_layout))[:, None]
    below = scaled_halves(k_below, k_factor, k_factor, quarter_layout) * beta_below
    tiles.below.store(below.to(gl.float16))
    # stage decayed_scores
    q_dot_k = of_blocks(rings.vector(n, Q_DOT_K), 2).load(of_row)[:, :, None]
    P = gl.where(i == j, q_dot_k, gl.where(i > j, q_block, 0.0))
    tiles.P_tile.store(on_diagonal(scaled(P, q_factor, k_factor, blocks_layout)))
    # both warps have stored the whole matrix, of which the next store replaces zeros
    role_barrier()
    quarter = tiles.P_tile.slice(BLOCK, BLOCK).slice(0, BLOCK, dim=1)
    quarter.store(scaled_halves(q_below, q_factor, k_factor, quarter_layout).to(gl.float16))
    return minus_L


@gluon.jit
def inverse_of(minus_L, diagonal):
    """The transposed inverses D of the diagonal blocks of I + L, (block, j, i).

    minus_L, diagonal: the diagonal blocks of -L (block, i, j), in registers and in shared memory.

    With the inverses of blocks of h on the diagonal of D, those of blocks of 2 h follow: their part
    below the diagonal is -D L D.  Everything stays in a warp's registers, because the transpose of
    an operand of rows is an operand of columns.
    """
    left: gl.constexpr = gl.DotOperandLayout(0, blocks_layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, blocks_layout, 2)
    i, j = block_indices(blocks_layout)
    zero = gl.full([2, BLOCK, BLOCK], 0.0, gl.float32, blocks_layout)
    columns = diagonal.load(right)
    transposed = gl.convert_layout(columns.permute((0, 2, 1)), blocks_layout)
    identity = gl.where(i == j, 1.0, zero)
    # blocks of 2, whose part below the diagonal is -L; D_t is D transposed
    D = gl.where(((i ^ j) == 1) & (i > j), minus_L.to(gl.float32), identity)
    D_t = gl.where(((i ^ j) == 1) & (i < j), transposed.to(gl.float32), identity)
    for level in gl.static_range(1, 4):  # h = 2, 4, 8
        D_rows, D_t_rows = D.to(gl.float16), D_t.to(gl.float16)
        # T = -D L, then -D L D, and its transpose
        T = mma_v2(gl.convert_layout(D_rows, left), columns, zero).to(gl.float16)
        D_columns = gl.convert_layout(D_t_rows.permute((0, 2, 1)), right)
        below = mma_v2(gl.convert_layout(T, left), D_columns, zero)
        T_columns = gl.convert_layout(T.permute((0, 2, 1)), right)
        above = mma_v2(gl.convert_layout(D_t_rows, left), T_columns, zero)
        apart = ((i ^ j) >> level) == 1  # in different halves of a block of 2 h
        D = gl.where(apart & (i > j), below, D)
        D_t = gl.where(apart & (i < j), above, D_t)
    return D_t


@gluon.jit
def store_inverse(rings, tiles, minus_L, n):
    """Store beta_j A_ij (j, i), from -L of blocks of 16 (block, i, j)."""
    layout: gl.constexpr = rows_layout  # of 16 rows here, so that both warps compute all of them
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    beta = rings.vector(n, BETA)
    D_t = inverse_of(minus_L, tiles.diagonal)
    beta_of_blocks = of_blocks(beta, 2).load(gl.SliceLayout(2, blocks_layout))[:, :, None]
    tiles.inverted.store(D_t.to(gl.float16).reshape([SIZE, BLOCK]))
    tiles.inverse.store(on_diagonal(D_t * beta_of_blocks))
    role_barrier()  # both warps have stored their blocks, which each of them reads or replaces
    # block (1, 0) of A is -D_1 L_10 D_0; transposed, -D_0^T L_10^T D_1^T is block (0, 1)
    zero = gl.full([BLOCK, BLOCK], 0.0, gl.float32, layout)
    D_0t = tiles.inverted.slice(0, BLOCK).load(left)
    product = mma_v2(D_0t, tiles.below.permute((1, 0)).load(right), zero)
    D_1t = tiles.inverted.slice(BLOCK, BLOCK).load(right)
    product = mma_v2(gl.convert_layout(product.to(gl.float16), left), D_1t, zero)
    beta_j = beta.slice(0, BLOCK).load(gl.SliceLayout(1, layout))[:, None]
    quarter = tiles.inverse.slice(0, BLOCK).slice(BLOCK, BLOCK, dim=1)
    quarter.store((product * -beta_j).to(gl.float16))
    role_barrier()  # `store_factors` reads P and the inverse of both warps


@gluon.jit
def store_factors(env, tiles, n):
    """Compute X and W of the program's n-th chunk, and store them for `states`.  P and the inverse
    are complete: `store_inverse` ends with a barrier.
    """
    rings = env.rings
    dtype: gl.constexpr = rings.updates.tiles.dtype
    left: gl.constexpr = gl.DotOperandLayout(0, columns_layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, columns_layout, 2)
    # stage out_factor
    P, A_beta = tiles.P_tile.load(left), tiles.inverse.permute((1, 0)).load(right)
    W = mma_v2(P, A_beta, gl.full([SIZE, SIZE], 0.0, gl.float32, columns_layout))
    # stage state_factor
    transposed = tiles.inverse.load(left)
    rings.at_end.wait_full(n)  # for the keys of both halves, from `decays`
    rings.updates.wait_empty(n)
    for half in range(2):
        keys = halves_of(rings.at_end.tile(n)).index(half).load(right)
        X = mma_v2(transposed, keys, gl.full([SIZE, HALF], 0.0, gl.float32, columns_layout))
        halves_of(rings.updates.tile(n)).index(half).store(X.to(dtype))
    mbarrier.arrive(rings.at_end.empty_at(n), count=1)
    rings.weights.index(place_in(n, 2)).store((W * env.scale).to(dtype))
    fence_async_shared()  # makes X and W visible to the asynchronous products of `states`
    mbarrier.arrive(rings.updates.full_at(n), count=1)


@gluon.jit
def score_chunk(env, tiles, n):
    """Compute X and W of the program's n-th chunk, whose vectors are stored."""
    rings = env.rings
    chunk_scores = products(rings, n)
    minus_L = store_scores(rings, tiles, chunk_scores, n)
    store_inverse(rings, tiles, minus_L, n)
    store_factors(env, tiles, n)


@gluon.jit
def scores(env, FIRST: gl.constexpr):
    """Role: takes every second chunk from FIRST on."""
    tiles = ScoreTiles(
        gl.allocate_shared_memory(
            gl.float16, [2, BLOCK, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        ),
        gl.allocate_shared_memory(gl.float16, [BLOCK, BLOCK], plain),
        allocate_tile(gl.float16, [SIZE, SIZE]),
        gl.allocate_shared_memory(gl.float16, [SIZE, BLOCK], plain),
        allocate_tile(gl.float16, [SIZE, SIZE]),
    )
    beta = load_beta(env, FIRST)
    for n in range(FIRST, env.nchunks, 2):
        store_vectors(env, beta, n)
        beta = load_beta(env, n + 2)
        score_chunk(env, tiles, n)
