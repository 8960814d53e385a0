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
    map_fp32,
    plain,
    spread,
    times,
)
from ssdprof.kernels.kda.hopper.rings import K_NORM, SCALED, SIZE, half_of, vector_layout

BLOCKS = gl.constexpr(4)  # of 8 positions
# Layout (i, K)
of_thread = gl.constexpr(gl.BlockedLayout([8, 2], [1, 32], [4, 1], [1, 0]))

# other functions belong to the stage that calls them
STAGES = {
    "store_anchors": "decayed_scores", "store_between": "decayed_scores", "decays": "gate_cumsum",
}  # fmt: skip


@gluon.jit
def rows_of(t):
    """The eight rows of each block of a tile (i, K), (block, K) each."""
    even, odd = gl.split(t.reshape([BLOCKS, 4, 2, HALF]).permute((0, 1, 3, 2)))
    r04, r26 = gl.split(even.reshape([BLOCKS, 2, 2, HALF]).permute((0, 1, 3, 2)))
    r15, r37 = gl.split(odd.reshape([BLOCKS, 2, 2, HALF]).permute((0, 1, 3, 2)))
    r0, r4 = gl.split(r04.permute((0, 2, 1)))
    r2, r6 = gl.split(r26.permute((0, 2, 1)))
    r1, r5 = gl.split(r15.permute((0, 2, 1)))
    r3, r7 = gl.split(r37.permute((0, 2, 1)))
    return r0, r1, r2, r3, r4, r5, r6, r7


@gluon.jit
def tile_of(r0, r1, r2, r3, r4, r5, r6, r7):
    """A tile (i, K) from the eight rows of each block."""
    even = gl.join(gl.join(r0, r4), gl.join(r2, r6))  # (block, K, bit 2, bit 1)
    odd = gl.join(gl.join(r1, r5), gl.join(r3, r7))
    t = gl.join(even, odd).permute((0, 2, 3, 4, 1)).reshape([SIZE, HALF])
    return gl.convert_layout(t, of_thread)


@gluon.jit
def since_first(r0, r1, r2, r3, r4, r5, r6, r7):
    """Products from the first row of each block on (i, K), and whole ones (block, K)."""
    p1 = r0 * r1
    p2 = p1 * r2
    p3 = p2 * r3
    p4 = p3 * r4
    p5 = p4 * r5
    p6 = p5 * r6
    p7 = p6 * r7
    return tile_of(r0, p1, p2, p3, p4, p5, p6, p7), p7


@gluon.jit
def to_last(last, r1, r2, r3, r4, r5, r6, r7):
    """Products of `last` and the rows after each one of its block (i, K).  Without `last`, the last
    rows are not used.
    """
    s6 = r7 if last is None else last * r7
    s5 = s6 * r6
    s4 = s5 * r5
    s3 = s4 * r4
    s2 = s3 * r3
    s1 = s2 * r2
    return tile_of(s1 * r1, s1, s2, s3, s4, s5, s6, r7 if last is None else last)


@gluon.jit
def in_turn(q, k):
    """Rows of q and k in turn, eight of each (2 * SIZE, K)."""
    both = gl.join(q, k).reshape([BLOCKS, EIGHT, HALF, 2]).permute((0, 3, 1, 2))
    return both.reshape([2 * SIZE, HALF])


@gluon.jit
def first_eights_first(tile):
    """The first eight of each 16 positions of a tile (rows, K) before the second ones."""
    ROWS: gl.constexpr = tile.shape[0]
    tile = tile.reshape([BLOCKS // 2, 2, ROWS // BLOCKS, HALF])
    return tile.permute((1, 0, 2, 3)).reshape([ROWS, HALF])


@gluon.jit
def store_anchors(q, k, a, rings, half, n):
    """Operands of pairs inside blocks of 8.  Waits until `scores` has read those of the chunk
    before.
    """
    operands = rings.operands
    dtype: gl.constexpr = q.dtype
    o_i = gl.arange(0, SIZE, gl.SliceLayout(1, of_thread))[:, None]
    r0, r1, r2, r3, r4, r5, r6, r7 = rows_of(gl.where((o_i & 7) == 0, ANCHOR, at_least(a)))
    D, last = since_first(r0, r1, r2, r3, r4, r5, r6, r7)
    rows = in_turn(times(q, D, dtype), times(k, D, dtype))
    # 1 / D_j = (a'_(j+1) ... a'_e) / D_e: one reciprocal for a block
    last = map_fp32("rcp.approx.ftz.f32 $0, $1;", last)
    columns = times(k, to_last(last, r1, r2, r3, r4, r5, r6, r7), dtype)
    mbarrier.wait(rings.read.index(half), phase(n, 1) ^ 1)
    operands.anchor_rows.index(half).store(first_eights_first(rows))
    operands.anchor_columns.index(half).store(first_eights_first(columns))


@gluon.jit
def store_between(q, k, P, S, totals, operands, half):
    """Operands of pairs between blocks of 8, and between the halves of the chunk.  Returns decays
    (block, K) from the chunk's start to each block, and from there to its end, and of all of it.

    totals: T of each block (block, K), in shared memory
    """
    dtype: gl.constexpr = q.dtype
    o_i = gl.arange(0, SIZE, gl.SliceLayout(1, of_thread))[:, None]
    to_anchor = gl.where((o_i & 8) != 0, P, S)
    rows = in_turn(times(q, to_anchor, dtype), times(k, to_anchor, dtype))
    operands.eight_rows.index(half).store(first_eights_first(rows))
    between, since_start, to_end, whole = between_blocks(totals)
    to_anchor = gl.where(o_i >= 16, P, S) * spread(between, 3, of_thread)
    rows = in_turn(times(q, to_anchor, dtype), times(k, to_anchor, dtype))
    operands.half_rows.index(half).store(rows)
    return since_start, to_end, whole


@gluon.jit
def store_decayed(q, k, P, S, whole, rings, half, n):
    """Keys at the chunk's end, keys and queries in place of k and q, and decays of the chunk."""
    mbarrier.wait(rings.normed.index(place_in(n, 2)), phase(n, 2))
    rings.at_end.wait_empty(n)
    of_row: gl.constexpr = gl.SliceLayout(1, of_thread)
    k_row = k.to(gl.float32) * rings.vector(n, K_NORM).load(of_row)[:, None]
    q_row = q.to(gl.float32) * rings.vector(n, SCALED).load(of_row)[:, None]
    half_of(rings.at_end.tile(n), half).store((k_row * S).to(gl.float16))
    arrive(rings.at_end.full_at(n))  # after which `scores` may replace the vectors
    half_of(rings.keys.tile(n), half).store((k_row * P).to(k.dtype))
    half_of(rings.queries.index(rings.slot(n)), half).store((q_row * P).to(q.dtype))
    ends = reinterpret(rings.ends.index(rings.slot(n)), gl.float32, [2, HALF], vector_layout)
    ends.index(half).store(whole.reshape([HALF]))
    fence_async_shared()
    arrive(rings.decayed.index(rings.slot(n)))


@gluon.jit
def decay_half(env, totals, half, n):
    """Everything of half of the channels of the program's n-th chunk.

    totals: memory for T of each block (half, block, K); the barrier of the next half lets it be
    written again
    """
    rings = env.rings
    rings.keys.wait_full(n)
    rings.gates.wait_full(n)
    q = half_of(rings.queries.index(rings.slot(n)), half).load(of_thread)
    k = half_of(rings.keys.tile(n), half).load(of_thread)
    a = decays_of(half_of(rings.gates.tile(n), half).load(of_thread))
    arrive(rings.gates.empty_at(n))
    # P, S and T of blocks of 8
    o_i = gl.arange(0, SIZE, gl.SliceLayout(1, of_thread))[:, None]
    r0, r1, r2, r3, r4, r5, r6, r7 = rows_of(a)
    P, T = since_first(r0, r1, r2, r3, r4, r5, r6, r7)
    S = gl.where((o_i & 7) == 7, 1.0, to_last(None, r1, r2, r3, r4, r5, r6, r7))
    totals = totals.index(half)
    totals.store(T)
    store_anchors(q, k, a, rings, half, n)
    role_barrier()
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
