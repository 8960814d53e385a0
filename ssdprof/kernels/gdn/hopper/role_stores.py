# mypy: ignore-errors
"""Role `stores`: stores each chunk's output through TMA.  Shared memory: `rings.py`."""

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ssdprof.kernels._gluon import async_store
from ssdprof.kernels.gdn.hopper.rings import CHUNK, DIM

STAGES = {"store_chunk": "chunk_output", "stores": "chunk_output"}
WAITS = {"outputs": "chunk_output"}


@gluon.jit
def store_chunk(rings, n, out_desc, segment, chunk):
    """Store the program's n-th output, wait until TMA has read the ring slot, and release the slot."""
    rings.outputs.wait_full(n)
    where = [segment.sequence.tile, segment.head, segment.sequence.row + chunk * CHUNK, 0]
    async_store(out_desc, where, rings.outputs.tile(n).reshape([1, 1, CHUNK, DIM]))
    tma.store_wait(0)
    mbarrier.arrive(rings.outputs.empty_at(n), count=1)


@gluon.jit
def stores(rings, work, out_desc):
    """Store the outputs of all segments.  TMA writes nothing beyond the sequence's end."""
    for k in range(work.segments()):
        segment, n = work.segment_at(k)
        for i in range(segment.nchunks):
            store_chunk(rings, n + i, out_desc, segment, segment.first + i)
