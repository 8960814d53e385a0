# mypy: ignore-errors
"""The role that stores a chunk's output, by the copy engine.  What the roles share: `rings.py`."""

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ssdprof.kernels._gluon import async_store
from ssdprof.kernels.gdn.hopper.rings import CHUNK, DIM

STAGES = {"store_chunk": "chunk_output", "stores": "chunk_output"}
WAITS = {"outputs": "chunk_output"}


@gluon.jit
def store_chunk(rings, n, out_desc, segment, chunk):
    """The program's n-th output, and wait until its place has been read."""
    rings.outputs.wait_full(n)
    where = [segment.sequence.tile, segment.head, segment.sequence.row + chunk * CHUNK, 0]
    async_store(out_desc, where, rings.outputs.tile(n).reshape([1, 1, CHUNK, DIM]))
    tma.store_wait(0)
    mbarrier.arrive(rings.outputs.empty_at(n), count=1)


@gluon.jit
def stores(rings, work, out_desc):
    """Up to the sequence's end."""
    for k in range(work.segments()):
        segment, n = work.segment_at(k)
        for i in range(segment.nchunks):
            store_chunk(rings, n + i, out_desc, segment, segment.first + i)
