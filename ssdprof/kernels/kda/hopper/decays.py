"""Role `decays` of `whole_kernel.py`: operands of the scores, and keys and queries as the state
needs them.

It reads q, k and g of a chunk of 32 positions, and leaves operands of the scores (blocks of 8,
h = 8, h = 16), in place of k and q those decayed since the chunk's start, and keys decayed to its
end.  Decays are those of `prep.py`: a thread owns 16 positions of two channels, and a warp half of
the positions and of the channels.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ssdprof.kernels._gluon import arrive, phase, place_in, role_barrier
from ssdprof.kernels.kda.hopper.prep import (
    ANCHOR,
    EIGHT,
    at_least,
    decays_of,
    eights_of,
    grown,
    map_fp32,
    plain,
    times,
)
from ssdprof.kernels.kda.hopper.rings import DIM, K_NORM, SCALED, SIZE

# Layout (i, K)
of_thread = gl.constexpr(gl.BlockedLayout([16, 2], [1, 32], [2, 2], [1, 0]))

# other functions belong to the stage that calls them
STAGES = {
    "store_operands": "decayed_scores", "store_anchors": "decayed_scores", "decays": "gate_cumsum",
}  # fmt: skip


@gluon.jit
def halved(blocks):
    """The first and the second half of the rows of each block (block, i, K)."""
    rows: gl.constexpr = blocks.shape[1] // 2
    blocks = blocks.reshape([SIZE // EIGHT, 2, rows, DIM])
    return gl.split(blocks.permute((0, 2, 3, 1)))


@gluon.jit
def stacked(first, second):
    """Blocks (block, i, K) from the halves of their rows."""
    rows: gl.constexpr = first.shape[1] * 2
    return gl.join(first, second).permute((0, 3, 1, 2)).reshape([SIZE // EIGHT, rows, DIM])


@gluon.jit
def rows_of(tile):
    """The rows of a tile (i, K), each of all blocks of 8: eight times (block, 1, K)."""
    first, second = halved(tile.reshape([SIZE // EIGHT, EIGHT, DIM]))
    r01, r23 = halved(first)
    r45, r67 = halved(second)
    return halved(r01) + halved(r23) + halved(r45) + halved(r67)


@gluon.jit
def tile_of(rows):
    """The tile of these rows: the inverse of `rows_of`."""
    first = stacked(stacked(rows[0], rows[1]), stacked(rows[2], rows[3]))
    second = stacked(stacked(rows[4], rows[5]), stacked(rows[6], rows[7]))
    return gl.convert_layout(stacked(first, second).reshape([SIZE, DIM]), of_thread)


@gluon.jit
def since_first(rows):
    """Products of the rows of each block from the first one to each, as rows."""
    products = (rows[0],)
    for i in gl.static_range(1, EIGHT):
        products = products + (products[i - 1] * rows[i],)
    return products


@gluon.jit
def to_last(rows, last):
    """Products of `last` and the rows of each block that come after each, as rows."""
    products = (last,)
    for i in gl.static_range(1, EIGHT):
        products = (products[0] * rows[EIGHT - i],) + products
    return products


@gluon.jit
def store_anchors(q, k, a, rings, n):
    """Operands of pairs inside blocks of 8: the first ones of 16, and the second ones.  Waits until
    `scores` has read those of the chunk before.
    """
    operands = rings.operands
    dtype: gl.constexpr = q.dtype
    o_i = gl.arange(0, SIZE, gl.SliceLayout(1, of_thread))[:, None]
    rows = rows_of(gl.where((o_i & 7) == 0, ANCHOR, at_least(a)))
    products = since_first(rows)
    D = tile_of(products)
    both = gl.join(times(q, D, dtype), times(k, D, dtype))
    both = both.reshape([SIZE // 16, 2, EIGHT, DIM, 2]).permute((0, 4, 2, 3, 1))
    # 1 / D, with one reciprocal for each block
    inverse = map_fp32("rcp.approx.ftz.f32 $0, $1;", products[7])
    columns = times(k, tile_of(to_last(rows, inverse)), dtype)
    mbarrier.wait(rings.read.index(0), phase(n, 1) ^ 1)
    first, second = gl.split(both.reshape([SIZE, DIM, 2]))
    operands.first_rows.store(first)
    operands.second_rows.store(second)
    first, second = eights_of(columns)
    operands.first_columns.store(first.reshape([SIZE // 2, DIM]))
    operands.second_columns.store(second.reshape([SIZE // 2, DIM]))


@gluon.jit
def store_operands(q, k, a, rings, n):
    """All operands of the scores.  Returns P, S and T (2, K) of blocks of 16."""
    dtype: gl.constexpr = q.dtype
    operands = rings.operands
    store_anchors(q, k, a, rings, n)
    rows = rows_of(a)
    products = since_first(rows)
    P, T = tile_of(products), products[7].reshape([SIZE // EIGHT, DIM])
    ones = rows_of(gl.full([SIZE, DIM], 1.0, gl.float32, of_thread))
    S = tile_of(to_last(rows, ones[7]))
    # between blocks of 8
    second_q, second_P = eights_of(q)[1], eights_of(P)[1]
    first_k, second_k = eights_of(k)
    both = gl.join(times(second_q, second_P, dtype), times(second_k, second_P, dtype))
    operands.eight_rows.store(both.permute((0, 3, 1, 2)).reshape([SIZE, DIM]))
    columns = times(first_k, eights_of(S)[0], dtype)
    operands.eight_columns.store(columns.reshape([SIZE // 2, DIM]))
    # between the halves
    P, S, T = grown(P, S, T, 3, of_thread)
    o_i = gl.arange(0, SIZE, gl.SliceLayout(1, of_thread))[:, None]
    to_anchor = gl.where(o_i >= 16, P, S)
    both = gl.join(times(q, to_anchor, dtype), times(k, to_anchor, dtype))
    both = both.reshape([SIZE // EIGHT, EIGHT, DIM, 2])
    operands.half_rows.store(both.permute((0, 3, 1, 2)).reshape([2 * SIZE, DIM]))
    return P, S, T


@gluon.jit
def decay_chunk(env, halves, n):
    """Everything of the program's n-th chunk."""
    rings = env.rings
    rings.keys.wait_full(n)
    rings.gates.wait_full(n)
    k_tile, q_tile = rings.keys.tile(n), rings.queries.index(rings.slot(n))
    q, k = q_tile.load(of_thread), k_tile.load(of_thread)
    a = decays_of(rings.gates.tile(n).load(of_thread))
    arrive(rings.gates.empty_at(n))
    P, S, T = store_operands(q, k, a, rings, n)
    arrive(rings.ready.index(place_in(n, 2)))
    halves = halves.index(place_in(n, 2))
    halves.store(T)
    mbarrier.wait(rings.normed.index(place_in(n, 2)), phase(n, 2))
    rings.at_end.wait_empty(n)
    role_barrier()
    # since the chunk's start, and to its end
    o_i = gl.arange(0, SIZE, gl.SliceLayout(1, of_thread))[:, None]
    first, second = halves.slice(0, 1).load(of_thread), halves.slice(1, 1).load(of_thread)
    P *= gl.where(o_i >= 16, first, 1.0)
    S *= gl.where(o_i < 16, second, 1.0)
    of_row: gl.constexpr = gl.SliceLayout(1, of_thread)
    k_row = k.to(gl.float32) * rings.vector(n, K_NORM).load(of_row)[:, None]
    q_row = q.to(gl.float32) * rings.vector(n, SCALED).load(of_row)[:, None]
    rings.at_end.tile(n).store((k_row * S).to(gl.float16))
    arrive(rings.at_end.full_at(n))  # after which `scores` may replace the vectors
    k_tile.store((k_row * P).to(k.dtype))
    q_tile.store((q_row * P).to(q.dtype))
    rings.ends.index(rings.slot(n)).store((first * second).reshape([DIM]))
    fence_async_shared()
    arrive(rings.decayed.index(rings.slot(n)))


@gluon.jit
def decays(env):
    """The role."""
    halves = gl.allocate_shared_memory(gl.float32, [2, 2, DIM], plain)
    for n in range(env.nchunks):
        decay_chunk(env, halves, n)
