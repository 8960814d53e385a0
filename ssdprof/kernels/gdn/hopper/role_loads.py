# mypy: ignore-errors
"""Role `loads`: loads q, k, v and the inverse of each chunk through TMA.  Shared memory: `rings.py`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ssdprof.kernels._gluon import async_load
from ssdprof.kernels.gdn.hopper.rings import CHUNK, DIM

STAGES = {"load_tile": "loads", "load_chunk": "loads", "loads": "loads"}
WAITS = {"keys": "ahead", "values": "ahead", "queries": "ahead", "inverses": "ahead"}


@gluon.jit
def load_tile(ring, n, desc, head, segment, chunk):
    """Load the rows of a chunk into a ring.  TMA writes zeros beyond the sequence's end."""
    ring.wait_empty(n)
    mbarrier.expect(ring.full_at(n), 2 * CHUNK * DIM)
    where = [segment.sequence.tile, head, segment.sequence.row + chunk * CHUNK, 0]
    async_load(desc, where, ring.full_at(n), ring.tile(n).reshape([1, 1, CHUNK, DIM]))


@gluon.jit
def load_chunk(rings, segment, j, n, m, descs, AHEAD: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Load k and the inverse of the segment's j-th chunk, and v and q of chunk j - AHEAD.

    j counts the chunks of both passes, and n is the index of the chunk in the program.  v and q have AHEAD fewer ring
    slots than k.  They are loaded AHEAD chunks later, so that waiting for their slots does not delay k.
    """
    q_desc, k_desc, v_desc, A_desc = descs
    nchunks = segment.back + segment.nchunks
    chunk = segment.first - segment.back + j
    if j < nchunks:
        load_tile(rings.keys, n, k_desc, segment.head // GROUP, segment, chunk)
        rings.inverses.wait_empty(n)
        mbarrier.expect(rings.inverses.full_at(n), 2 * CHUNK * CHUNK)
        row = ((segment.sequence.slot + chunk) * HEADS + segment.head) * CHUNK
        async_load(A_desc, [row, 0], rings.inverses.full_at(n), rings.inverses.tile(n))
    if j >= AHEAD:
        load_tile(rings.values, n - AHEAD, v_desc, segment.head, segment, chunk - AHEAD)
    if j - AHEAD >= segment.back:
        load_tile(rings.queries, m - AHEAD, q_desc, segment.head // GROUP, segment, chunk - AHEAD)


@gluon.jit
def loads(rings, work, descs, AHEAD: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr):
    for k in range(work.segments()):
        segment, n = work.segment_at(k)
        for j in range(segment.back + segment.nchunks + AHEAD):
            load_chunk(rings, segment, j, n + j, n + j - segment.back, descs, AHEAD, HEADS, GROUP)
