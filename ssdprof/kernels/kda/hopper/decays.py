"""Role `decays` of `whole_kernel.py`: operands of the scores, and keys and queries as the state
needs them.

The role reads q, k and g of a chunk of 32 positions.  It stores operands of the scores (of pairs
inside blocks of 8, and of h = 8 and 16), keys and queries, decayed since the chunk's start, in the
place of k and q, and keys decayed to the chunk's end.

Decays are those of `prep.py`.  Each 1 / D_j is a reciprocal of its own: products of one reciprocal
a block would depend on gates of later positions, whose bits must not reach earlier outputs.

Channels do not depend on each other, so that the role goes over a chunk in a loop, one half of the
channels after the other.  The loop has half of the code, which matters more than its latency
(`whole_kernel.py`), and needs 96 registers instead of 160.  A thread has 8 positions of two
channels, and a warp a block of 8 positions, so that only the products over whole blocks pass from
warp to warp.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ssdprof.kernels._gluon import arrive, phase, place_in, reinterpret, role_barrier
from ssdprof.kernels.kda.hopper.prep import (
    ANCHOR,
    EIGHT,
    HALF,
    between_blocks,
    clamped_decays,
    gated_decays,
    in_turn,
    map_fp32,
    plain,
    sorted_pairs,
    spread,
    times,
    vector_layout,
)
from ssdprof.kernels.kda.hopper.rings import K_FACTOR, Q_SCALED, SIZE
from ssdprof.kernels.kda.hopper.tiles import halves_of

BLOCKS_OF_8 = gl.constexpr(4)  # blocks of 8 positions in a chunk
# register layout of (i, HALF): a thread has 8 positions of two channels
of_thread = gl.constexpr(gl.BlockedLayout([8, 2], [1, 32], [4, 1], [1, 0]))

# stages of functions (`stalls/attribute.py`); others belong to the stage that calls them
STAGES = {
    "store_anchors": "decayed_scores", "store_between": "decayed_scores", "decays": "gate_cumsum",
}  # fmt: skip


@gluon.jit
def positions():
    """The position in the chunk of each row of a tile, (i, 1)."""
    return gl.arange(0, SIZE, gl.SliceLayout(1, of_thread))[:, None]


@gluon.jit
def rows_of(tile):
    """A tuple of eight tensors (block, 1, HALF): the first rows of all blocks of a tile (i, HALF),
    the second rows, and so on.
    """
    rows = (tile.reshape([BLOCKS_OF_8, EIGHT, HALF]),)
    for level in gl.static_range(3):
        halves = ()
        for part in gl.static_range(2**level):
            pair = rows[part].reshape([BLOCKS_OF_8, 2, 4 >> level, HALF])
            first, second = gl.split(pair.permute((0, 2, 3, 1)))
            halves += (first, second)
        rows = halves
    return rows


@gluon.jit
def tile_of(rows):
    """The tile (i, HALF) with these rows of its blocks: the reverse of `rows_of`."""
    for level in gl.static_range(3):
        pairs = ()
        for part in gl.static_range(4 >> level):
            pair = gl.join(rows[2 * part], rows[2 * part + 1]).permute((0, 3, 1, 2))
            pairs += (pair.reshape([BLOCKS_OF_8, 2 << level, HALF]),)
        rows = pairs
    return gl.convert_layout(rows[0].reshape([SIZE, HALF]), of_thread)


@gluon.jit
def since_first(rows):
    """For each row, the product of all rows of its block up to it, (i, HALF); and the product of
    all rows of each block, (block, 1, HALF).

    rows: of `rows_of`.
    """
    products = (rows[0],)
    for i in gl.static_range(1, EIGHT):
        products += (products[i - 1] * rows[i],)
    return tile_of(products), products[EIGHT - 1]


@gluon.jit
def to_last(rows, last):
    """For each row, the product of `last` and of the rows after it in its block, (i, HALF).

    rows: of `rows_of`.  last (block, 1, HALF).
    """
    products = (last,)
    for i in gl.static_range(1, EIGHT):
        products = (products[0] * rows[EIGHT - i],) + products
    return tile_of(products)


@gluon.jit
def store_anchors(q, k, a, rings, half, n):
    """Store the operands of pairs inside blocks of 8, for half of the channels, as soon as `scores`
    has read those of the chunk before.

    q, k: before the norm.  a: decays.  All three (i, HALF).
    """
    operands = rings.operands
    D, _ = since_first(rows_of(gl.where((positions() & 7) == 0, ANCHOR, clamped_decays(a))))
    rows = in_turn(times(q, D, q.dtype), times(k, D, q.dtype))
    columns = times(k, map_fp32("rcp.approx.ftz.f32 $0, $1;", D), k.dtype)
    mbarrier.wait(rings.read.index(half), phase(n, 1) ^ 1)
    operands.anchor_rows.index(half).store(sorted_pairs(rows, 2))
    operands.anchor_columns.index(half).store(sorted_pairs(columns, 2))


@gluon.jit
def store_between(q, k, P, S, totals, operands, half):
    """Store the operands of pairs between the two blocks of 8 of each 16 positions, and between the
    halves of the chunk.  Returns three decays: from the chunk's start to each block (block, HALF),
    from each block to the chunk's end (block, HALF), and over the whole chunk (1, HALF).

    q, k: half of the channels, before the norm (i, HALF).  P, S: decays since the start of each
        position's block of 8, and to its end (i, HALF).
    totals: T of each block (block, HALF) in shared memory; the caller had a barrier after the
        store.
    operands: shared memory for the results.  half: which half of the channels.
    """
    dtype: gl.constexpr = q.dtype
    to_anchor = gl.where((positions() & 8) != 0, P, S)
    rows = in_turn(times(q, to_anchor, dtype), times(k, to_anchor, dtype))
    operands.eight_rows.index(half).store(sorted_pairs(rows, 2))
    between, since_start, to_end, whole = between_blocks(totals)
    to_anchor = gl.where(positions() >= 16, P, S) * spread(between, 3, of_thread)
    rows = in_turn(times(q, to_anchor, dtype), times(k, to_anchor, dtype))
    operands.half_rows.index(half).store(rows)
    return since_start, to_end, whole


@gluon.jit
def store_decayed(q, k, P, S, whole, rings, half, n):
    """Store keys decayed to the chunk's end, keys and queries in place of k and q, and the decays
    over the chunk, for half of the channels of the program's n-th chunk.

    q, k: before the norm (i, HALF).  P, S: decays since the chunk's start, and to its end (i,
    HALF).  whole: decays over the chunk (1, HALF).
    """
    # for the vectors, from `scores`
    mbarrier.wait(rings.vectors_stored.index(place_in(n, 2)), phase(n, 2))
    rings.at_end.wait_empty(n)
    of_row: gl.constexpr = gl.SliceLayout(1, of_thread)
    k_row = k.to(gl.float32) * rings.vector(n, K_FACTOR).load(of_row)[:, None]
    q_row = q.to(gl.float32) * rings.vector(n, Q_SCALED).load(of_row)[:, None]
    halves_of(rings.at_end.tile(n)).index(half).store((k_row * S).to(gl.float16))
    arrive(rings.at_end.full_at(n))  # after which `scores` may replace the vectors
    halves_of(rings.keys.tile(n)).index(half).store((k_row * P).to(k.dtype))
    halves_of(rings.query_tile(n)).index(half).store((q_row * P).to(q.dtype))
    ends = reinterpret(rings.ends.index(rings.slot(n)), gl.float32, [2, HALF], vector_layout)
    ends.index(half).store(whole.reshape([HALF]))
    fence_async_shared()  # makes keys and queries visible to the asynchronous products of `states`
    arrive(rings.decayed.index(rings.slot(n)))


@gluon.jit
def decay_half(env, totals, half, n):
    """Compute and store everything for half of the channels of the program's n-th chunk.

    totals: shared memory for T of each block (half, block, HALF).  After the barrier of the other
        half, all warps have read the T of this one, which may then be replaced.
    """
    rings = env.rings
    rings.keys.wait_full(n)  # of q and k
    rings.gates.wait_full(n)
    q = halves_of(rings.query_tile(n)).index(half).load(of_thread)
    k = halves_of(rings.keys.tile(n)).index(half).load(of_thread)
    g = halves_of(rings.gates.tile(n)).index(half).load(of_thread)
    remaining = env.sequence.length - n * SIZE
    gate = (env.A_log_ptr, env.dt_bias_ptr, env.head, remaining, env.S.LOWER_BOUND)
    a = gated_decays(g, gate, half, of_thread)
    arrive(rings.gates.empty_at(n))
    # P, S and T of blocks of 8
    rows = rows_of(a)
    P, T = since_first(rows)
    S = to_last(rows, gl.full_like(T, 1.0))
    totals = totals.index(half)
    totals.store(T.reshape([BLOCKS_OF_8, HALF]))
    store_anchors(q, k, a, rings, half, n)
    role_barrier()  # all warps have stored T, which each of them reads
    since_start, to_end, whole = store_between(q, k, P, S, totals, rings.operands, half)
    arrive(rings.ready_at(n, half))
    P *= spread(since_start, 3, of_thread)
    S *= spread(to_end, 3, of_thread)
    store_decayed(q, k, P, S, whole, rings, half, n)


@gluon.jit
def decays(env):
    """Role: goes over the halves of all chunks of the program."""
    totals = gl.allocate_shared_memory(gl.float32, [2, BLOCKS_OF_8, HALF], plain)
    for i in range(2 * env.nchunks):
        decay_half(env, totals, i & 1, i >> 1)  # half i % 2 of chunk i / 2
