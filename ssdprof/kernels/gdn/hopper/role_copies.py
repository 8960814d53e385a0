"""Roles `loads` and `stores`, of the tiles of each chunk through TMA, and `copies`, which does both
with one warp.

`copies` runs in calls where the role `inverses` inverts.  A chunk's output is ready when the ring
slot of its keys becomes empty, and the next load waits for that slot.  Shared memory: `rings.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ssdprof.kernels._gluon import async_load, async_store
from ssdprof.kernels.gdn.hopper.rings import DIM
from ssdprof.kernels.hopper.ring import CHUNK

STAGES = {
    "load_tile": "loads",
    "load_keys": "loads",
    "load_chunk": "loads",
    "loads": "loads",
    "store_chunk": "chunk_output",
    "stores": "chunk_output",
    "copies": "loads",
}
WAITS = {
    "keys": "ahead",
    "values": "ahead",
    "queries": "ahead",
    "inverses": "ahead",
    "outputs": "chunk_output",
}


@gluon.jit
def load_tile(ring, n, desc, head, segment, chunk):
    """Load the rows of a chunk into a ring.  TMA writes zeros beyond the sequence's end."""
    ring.wait_empty(n)
    mbarrier.expect(ring.full_at(n), 2 * CHUNK * DIM)
    where = [segment.sequence.tile, head, segment.sequence.row + chunk * CHUNK, 0]
    async_load(desc, where, ring.full_at(n), ring.tile(n).reshape([1, 1, CHUNK, DIM]))


@gluon.jit
def load_keys(env, segment, chunk, n, k_desc, A_desc):
    """Load k and the inverse of a chunk of the segment's sequence, the program's n-th."""
    rings = env.rings
    load_tile(rings.keys, n, k_desc, segment.head // env.S.GROUP, segment, chunk)
    rings.inverses.wait_empty(n)
    mbarrier.expect(rings.inverses.full_at(n), 2 * CHUNK * CHUNK)
    row = ((segment.sequence.slot + chunk) * env.S.HEADS + segment.head) * CHUNK
    async_load(A_desc, [row, 0], rings.inverses.full_at(n), rings.inverses.tile(n))


@gluon.jit
def load_chunk(env, segment, j, n, m, AHEAD: gl.constexpr):
    """Load k and the inverse of the segment's j-th chunk, and v and q of chunk j - AHEAD.

    j counts the chunks of both passes, and n is the index of the chunk in the program.  v and q
    have AHEAD fewer ring slots than k.  They are loaded AHEAD chunks later, so that waiting for
    their slots does not delay k.
    """
    q_desc, k_desc, v_desc, A_desc, _ = env.descs
    rings = env.rings
    nchunks = segment.back + segment.nchunks
    chunk = segment.first - segment.back + j
    if j < nchunks:
        load_keys(env, segment, chunk, n, k_desc, A_desc)
    if j >= AHEAD:
        load_tile(rings.values, n - AHEAD, v_desc, segment.head, segment, chunk - AHEAD)
    if j - AHEAD >= segment.back:
        load_tile(
            rings.queries, m - AHEAD, q_desc, segment.head // env.S.GROUP, segment, chunk - AHEAD
        )


@gluon.jit
def loads(env):
    AHEAD: gl.constexpr = env.rings.keys.DEPTH - env.rings.queries.DEPTH
    for k in range(env.work.segments()):
        segment, n = env.work.segment_at(k)
        for j in range(segment.back + segment.nchunks + AHEAD):
            load_chunk(env, segment, j, n + j, n + j - segment.back, AHEAD)


@gluon.jit
def store_chunk(env, n, out_desc, segment, chunk):
    """Store the program's n-th output, wait until TMA has read the ring slot, and release the
    slot.
    """
    rings = env.rings
    rings.outputs.wait_full(n)
    where = [segment.sequence.tile, segment.head, segment.sequence.row + chunk * CHUNK, 0]
    async_store(out_desc, where, rings.outputs.tile(n).reshape([1, 1, CHUNK, DIM]))
    tma.store_wait(0)
    mbarrier.arrive(rings.outputs.empty_at(n), count=1)


@gluon.jit
def stores(env):
    """Store the outputs of all segments.  TMA writes nothing beyond the sequence's end."""
    for k in range(env.work.segments()):
        segment, n = env.work.segment_at(k)
        for i in range(segment.nchunks):
            store_chunk(env, n + i, env.descs[4], segment, segment.first + i)


@gluon.jit
def copies(env):
    """Copy the tiles of all chunks.  Requires that no segment has a first pass."""
    q_desc, k_desc, v_desc, out_desc = env.descs
    rings, work = env.rings, env.work
    AHEAD: gl.constexpr = rings.keys.DEPTH - rings.queries.DEPTH
    chunks = work.chunks()
    for n in range(chunks + rings.keys.DEPTH):
        if n < chunks:
            segment, chunk = work.chunk_at(n)
            load_tile(rings.keys, n, k_desc, segment.head // env.S.GROUP, segment, chunk)
        behind = n - AHEAD
        if (behind >= 0) & (behind < chunks):
            segment, chunk = work.chunk_at(behind)
            load_tile(rings.queries, behind, q_desc, segment.head // env.S.GROUP, segment, chunk)
            load_tile(rings.values, behind, v_desc, segment.head, segment, chunk)
        done = n - rings.keys.DEPTH
        if done >= 0:
            segment, chunk = work.chunk_at(done)
            store_chunk(env, done, out_desc, segment, chunk)
