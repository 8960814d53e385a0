# mypy: ignore-errors
"""The role that loads q, k, v and the inverse of a chunk, by the copy engine.  What the roles share: `rings.py`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ssdprof.kernels._gluon import async_load
from ssdprof.kernels.gdn.hopper.rings import CHUNK, DIM

STAGES = {"load_tile": "loads", "load_chunk": "loads", "loads": "loads"}
WAITS = {"keys": "ahead", "values": "ahead", "queries": "ahead", "inverses": "ahead"}


@gluon.jit
def load_tile(ring, n, desc, head, segment, chunk):
    """Rows of a chunk; zeros beyond the sequence's end."""
    ring.wait_empty(n)
    mbarrier.expect(ring.full_at(n), 2 * CHUNK * DIM)
    where = [segment.sequence.tile, head, segment.sequence.row + chunk * CHUNK, 0]
    async_load(desc, where, ring.full_at(n), ring.tile(n).reshape([1, 1, CHUNK, DIM]))


@gluon.jit
def load_chunk(rings, segment, j, n, m, descs, AHEAD: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr):
    """What of the j-th chunk of both passes, the program's n-th, both need; and q of the chunk AHEAD before it.

    q has fewer places than k and v, so that it waits longer for one, and nothing is to wait for it.
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
        load_tile(rings.values, n - AHEAD, v_desc, segment.value_head, segment, chunk - AHEAD)
    if j - AHEAD >= segment.back:
        load_tile(rings.queries, m - AHEAD, q_desc, segment.head // GROUP, segment, chunk - AHEAD)


@gluon.jit
def loads(rings, work, descs, AHEAD: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr):
    for k in range(work.segments()):
        segment, n = work.segment_at(k)
        for j in range(segment.back + segment.nchunks + AHEAD):
            load_chunk(rings, segment, j, n + j, n + j - segment.back, descs, AHEAD, HEADS, GROUP)
