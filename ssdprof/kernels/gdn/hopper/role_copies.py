# mypy: ignore-errors
"""Role `copies`: loads q, k and v of each chunk and stores outputs, in calls where the role `inverses` inverts.

One warp does both.  A chunk's output is ready when the ring slot of its keys becomes empty, and the next load waits for
that slot.  Shared memory: `rings.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssdprof.kernels.gdn.hopper.role_loads import load_tile
from ssdprof.kernels.gdn.hopper.role_stores import store_chunk

STAGES = {"copies": "loads"}
WAITS = {"keys": "ahead", "values": "ahead", "queries": "ahead", "outputs": "chunk_output"}


@gluon.jit
def copies(rings, work, descs, out_desc, GROUP: gl.constexpr):
    """Copy the tiles of all chunks.  Requires that no segment has a first pass."""
    q_desc, k_desc, v_desc = descs
    AHEAD: gl.constexpr = rings.keys.SIZE - rings.queries.SIZE
    chunks = work.chunks()
    for n in range(chunks + rings.keys.SIZE):
        if n < chunks:
            segment, chunk = work.chunk_at(n)
            load_tile(rings.keys, n, k_desc, segment.head // GROUP, segment, chunk)
        behind = n - AHEAD
        if (behind >= 0) & (behind < chunks):
            segment, chunk = work.chunk_at(behind)
            load_tile(rings.queries, behind, q_desc, segment.head // GROUP, segment, chunk)
            load_tile(rings.values, behind, v_desc, segment.head, segment, chunk)
        done = n - rings.keys.SIZE
        if done >= 0:
            segment, chunk = work.chunk_at(done)
            store_chunk(rings, done, out_desc, segment, chunk)
