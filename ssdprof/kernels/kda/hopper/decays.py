"""Role `decays` of `whole_kernel.py`: operands of the scores, and keys and queries as the state
needs them.

It reads q, k and g of a chunk of 32 positions, and leaves operands of the scores (blocks of 8,
h = 8, h = 16), in place of k and q those decayed since the chunk's start, and keys decayed to its
end.  Decays are those of `prep.py`.

Channels do not depend on each other, so that a loop has half of them after the other: half of the
code, which matters more than its latency (`whole_kernel.py`), and 96 registers instead of 160.  A
thread has 8 positions of two channels, and a warp a block of 8 positions: what leaves a block are
its products alone.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ssdprof.kernels._gluon import arrive, phase, place_in, reinterpret, role_barrier
from ssdprof.kernels.kda.hopper.prep import (
    ANCHOR,
    EIGHT,
    HALF,
    at_least,
    between_blocks,
    decays_of,
    in_turn,
    map_fp32,
    plain,
    sorted_pairs,
    spread,
    times,
    vector_layout,
)
from ssdprof.kernels.kda.hopper.rings import K_NORM, SCALED, SIZE
from ssdprof.kernels.kda.hopper.tiles import halves_of

BLOCKS = gl.constexpr(4)  # of 8 positions
# Layout (i, K)
of_thread = gl.constexpr(gl.BlockedLayout([8, 2], [1, 32], [4, 1], [1, 0]))

# other functions belong to the stage that calls them
STAGES = {
    "store_anchors": "decayed_scores", "store_between": "decayed_scores", "decays": "gate_cumsum",
}  # fmt: skip


@gluon.jit
def positions():
    return gl.arange(0, SIZE, gl.SliceLayout(1, of_thread))[:, None]


@gluon.jit
def rows_of(t):
    """The eight rows of each block of a tile (i, K), (block, 1, K) each."""
    rows = (t.reshape([BLOCKS, EIGHT, HALF]),)
    for level in gl.static_range(3):
        halves = ()
        for part in gl.static_range(2**level):
            pair = rows[part].reshape([BLOCKS, 2, 4 >> level, HALF])
            first, second = gl.split(pair.permute((0, 2, 3, 1)))
            halves += (first, second)
        rows = halves
    return rows


@gluon.jit
def tile_of(rows):
    """A tile (i, K) from the eight rows of each block."""
    for level in gl.static_range(3):
        pairs = ()
        for part in gl.static_range(4 >> level):
            pair = gl.join(rows[2 * part], rows[2 * part + 1]).permute((0, 3, 1, 2))
            pairs += (pair.reshape([BLOCKS, 2 << level, HALF]),)
        rows = pairs
    return gl.convert_layout(rows[0].reshape([SIZE, HALF]), of_thread)


@gluon.jit
def since_first(rows):
    """Products from the first row of each block on (i, K), and whole ones (block, 1, K)."""
    products = (rows[0],)
    for i in gl.static_range(1, EIGHT):
        products += (products[i - 1] * rows[i],)
    return tile_of(products), products[EIGHT - 1]


@gluon.jit
def to_last(rows, last):
    """Products of `last` and the rows after each one of its block (i, K)."""
    products = (last,)
    for i in gl.static_range(1, EIGHT):
        products = (products[0] * rows[EIGHT - i],) + products
    return tile_of(products)


@gluon.jit
def store_anchors(q, k, a, rings, half, n):
    """Operands of pairs inside blocks of 8.  Waits until `scores` has read those of the chunk
    before.
    """
    operands = rings.operands
    factors = rows_of(gl.where((positions() & 7) == 0, ANCHOR, at_least(a)))
    D, last = since_first(factors)
    rows = in_turn(times(q, D, q.dtype), times(k, D, q.dtype))
    # 1 / D_j = (a'_(j+1) ... a'_e) / D_e: one reciprocal for a block
    last = map_fp32("rcp.approx.ftz.f32 $0, $1;", last)
    columns = times(k, to_last(factors, last), k.dtype)
    mbarrier.wait(rings.read.index(half), phase(n, 1) ^ 1)
    operands.anchor_rows.index(half).store(sorted_pairs(rows, 2))
    operands.anchor_columns.index(half).store(sorted_pairs(columns, 2))


@gluon.jit
def store_between(q, k, P, S, totals, operands, half):
    """Store the operands of pairs between blocks of 8, and between the halves of the chunk.
    Returns decays (block, K) from the chunk's start to each block, and from there to its end, and
    of all of it.

    q, k: half of the channels as they are (i, K).  P, S: decays since the start of each position's
        block of 8, and to its end (i, K).
    totals: T of each block (block, K) in shared memory, which the caller's barrier has ordered.
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
    """Keys at the chunk's end, keys and queries in place of k and q, and decays of the chunk."""
    # for the numbers of each position, from `scores`
    mbarrier.wait(rings.normed.index(place_in(n, 2)), phase(n, 2))
    rings.at_end.wait_empty(n)
    of_row: gl.constexpr = gl.SliceLayout(1, of_thread)
    k_row = k.to(gl.float32) * rings.vector(n, K_NORM).load(of_row)[:, None]
    q_row = q.to(gl.float32) * rings.vector(n, SCALED).load(of_row)[:, None]
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
    """Everything of half of the channels of the program's n-th chunk.

    totals: memory for T of each block (half, block, K); the barrier of the next half lets it be
    written again
    """
    rings = env.rings
    rings.keys.wait_full(n)  # of q and k
    rings.gates.wait_full(n)
    q = halves_of(rings.query_tile(n)).index(half).load(of_thread)
    k = halves_of(rings.keys.tile(n)).index(half).load(of_thread)
    a = decays_of(halves_of(rings.gates.tile(n)).index(half).load(of_thread))
    arrive(rings.gates.empty_at(n))
    # P, S and T of blocks of 8
    rows = rows_of(a)
    P, T = since_first(rows)
    S = to_last(rows, gl.full_like(T, 1.0))
    totals = totals.index(half)
    totals.store(T.reshape([BLOCKS, HALF]))
    store_anchors(q, k, a, rings, half, n)
    role_barrier()  # all warps have stored T, which each of them reads
    since_start, to_end, whole = store_between(q, k, P, S, totals, rings.operands, half)
    arrive(rings.ready_at(n, half))
    P *= spread(since_start, 3, of_thread)
    S *= spread(to_end, 3, of_thread)
    store_decayed(q, k, P, S, whole, rings, half, n)


@gluon.jit
def decays(env):
    """The role."""
    totals = gl.allocate_shared_memory(gl.float32, [2, BLOCKS, HALF], plain)
    for i in range(2 * env.nchunks):
        decay_half(env, totals, i & 1, i >> 1)
