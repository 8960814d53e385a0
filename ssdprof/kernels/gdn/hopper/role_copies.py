"""Roles `loads` and `stores`: they copy the tiles of each chunk through TMA.

Shared memory: `rings.py`.
"""

from triton.experimental import gluon
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
def load_chunk(env, segment, j, n, m):
    """Load k, the inverse, v and, in the second pass, q of the segment's j-th chunk.

    j counts the chunks of both passes; n is the index of the chunk in the program, m that among the
    chunks of the second pass.
    """
    q_desc, k_desc, v_desc, A_desc, _ = env.descs
    rings = env.rings
    chunk = segment.first - segment.back + j
    load_keys(env, segment, chunk, n, k_desc, A_desc)
    load_tile(rings.values, n, v_desc, segment.head, segment, chunk)
    if j >= segment.back:
        load_tile(rings.queries, m, q_desc, segment.head // env.S.GROUP, segment, chunk)


@gluon.jit
def loads(env):
    """Load the tiles of all segments of the program."""
    for k in range(env.work.segments()):
        segment, n = env.work.segment_at(k)
        for j in range(segment.back + segment.nchunks):
            load_chunk(env, segment, j, n + j, n + j - segment.back)


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
