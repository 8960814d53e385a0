"""Roles `loads` and `stores`: they copy the tiles of each chunk through TMA.

Shared memory: `rings.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ssdprof.kernels._gluon import async_load, async_store
from ssdprof.kernels.gdn.hopper.rings import DIM
from ssdprof.kernels.hopper.ring import CHUNK

# for `ssdprof stalls` (stalls/attribute.py): function -> its stage.  Stores count as the stage that
# computes the output.
STAGES = {
    "load_tile": "loads",
    "load_keys": "loads",
    "load_chunk": "loads",
    "loads": "loads",
    "store_chunk": "chunk_output",
    "stores": "chunk_output",
}
# ring -> the stage of lines that wait at its barriers; "ahead": the role waits for a free slot
WAITS = {
    "keys": "ahead",
    "values": "ahead",
    "queries": "ahead",
    "inverses": "ahead",
    "outputs": "chunk_output",
}


@gluon.jit
def load_tile(ring, n, desc, head, segment, chunk):
    """Load a tile (CHUNK, DIM) of a chunk of the segment's sequence for use n of a ring.  TMA
    writes zeros beyond the sequence's end.

    head: index in the tensor of `desc`, which has key heads or value heads
    chunk: index in the sequence
    """
    ring.wait_empty(n)
    mbarrier.expect(ring.full_at(n), 2 * CHUNK * DIM)  # bytes
    where = [segment.sequence.tile, head, segment.sequence.tile_row + chunk * CHUNK, 0]
    async_load(desc, where, ring.full_at(n), ring.tile(n).reshape([1, 1, CHUNK, DIM]))


@gluon.jit
def load_keys(env, segment, chunk, n, k_desc, A_desc):
    """Load k and the inverse of a chunk of the segment's sequence, which is the program's n-th.

    chunk: index in the sequence
    """
    rings = env.rings
    load_tile(rings.keys, n, k_desc, segment.head // env.S.GROUP, segment, chunk)
    rings.inverses.wait_empty(n)
    mbarrier.expect(rings.inverses.full_at(n), 2 * CHUNK * CHUNK)
    row = ((segment.sequence.slot + chunk) * env.S.HEADS + segment.head) * CHUNK
    async_load(A_desc, [row, 0], rings.inverses.full_at(n), rings.inverses.tile(n))


@gluon.jit
def load_chunk(env, segment, j, n, m):
    """Load k, the inverse, v and, in the second pass, q of the segment's j-th chunk.

    j: among the segment's chunks of both passes.  n: among the program's chunks of both passes.
    m: among the program's chunks of the second pass
    """
    q_desc, k_desc, v_desc, A_desc, _ = env.descs
    rings = env.rings
    chunk = segment.first - segment.warmup + j
    load_keys(env, segment, chunk, n, k_desc, A_desc)
    load_tile(rings.values, n, v_desc, segment.head, segment, chunk)
    if j >= segment.warmup:
        load_tile(rings.queries, m, q_desc, segment.head // env.S.GROUP, segment, chunk)


@gluon.jit
def loads(env):
    """Role: load the tiles of all segments of the program."""
    for i_segment in range(env.work.segments()):
        segment, n = env.work.segment_at(i_segment)
        for j in range(segment.warmup + segment.nchunks):
            load_chunk(env, segment, j, n + j, n + j - segment.warmup)


@gluon.jit
def store_chunk(env, n, out_desc, segment, chunk):
    """Store the output of a chunk of the segment's sequence, the program's n-th output: start the
    store, wait until TMA has read the ring slot, and release the slot.

    chunk: index in the sequence
    """
    rings = env.rings
    rings.outputs.wait_full(n)
    where = [segment.sequence.tile, segment.head, segment.sequence.tile_row + chunk * CHUNK, 0]
    async_store(out_desc, where, rings.outputs.tile(n).reshape([1, 1, CHUNK, DIM]))
    tma.store_wait(0)
    mbarrier.arrive(rings.outputs.empty_at(n), count=1)


@gluon.jit
def stores(env):
    """Role: store the outputs of all segments of the program.  TMA writes nothing beyond a
    sequence's end.
    """
    _, _, _, _, out_desc = env.descs
    for i_segment in range(env.work.segments()):
        segment, n = env.work.segment_at(i_segment)
        for i in range(segment.nchunks):
            store_chunk(env, n + i, out_desc, segment, segment.first + i)
