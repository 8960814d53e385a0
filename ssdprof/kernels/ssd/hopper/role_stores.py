# mypy: ignore-errors
"""Role `stores`: stores each chunk's output through TMA.  Shared memory: `rings.py`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ssdprof.kernels.ssd.hopper.rings import CHUNK, SLICE, async_store

STAGES = {"store_chunk": "chunk_scan.residual", "stores": "chunk_scan.residual"}
# Stage of a wait at each barrier, in this role or another.  A role that waits for a free slot is ahead of the others.
WAITS = {"unwritten": "chunk_scan.residual", "written": "ahead"}


@gluon.jit
def store_chunk(shared, segment, i, n, out_desc, SLICES: gl.constexpr):
    """Store the output of chunk i of the segment, the program's n-th, up to the sequence's end."""
    OWN: gl.constexpr = shared.out.shape[1]
    t = (segment.first_chunk + i) * CHUNK
    for k in gl.static_range(2):
        unit, row = segment.unit + k // shared.HALVES, segment.row + t + k % shared.HALVES * OWN
        out = shared.out.index(k).reshape([1, 1, OWN, SLICE])
        mbarrier.wait(shared.written.index(k), n & 1)
        async_store(out_desc, [segment.tile, unit // SLICES, row, unit % SLICES * SLICE], out)
    tma.store_wait(0)
    for k in gl.static_range(2):
        mbarrier.arrive(shared.unwritten.index(k), count=1)


@gluon.jit
def stores(shared, work, out_desc, SLICES: gl.constexpr):
    for k in range(work.segments()):
        segment, n = work.segment_at(k)
        for i in range(segment.nchunks):
            store_chunk(shared, segment, i, n + i, out_desc, SLICES)
