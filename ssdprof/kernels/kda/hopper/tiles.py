"""The shared memory of a program that scans, and its copies through TMA.

The memory is a ring of six tiles of 16 KB, so that two programs fit on a multiprocessor.  A chunk
has four tiles, in the order in which they are loaded and released: its keys, its queries, X, and v
beside W.  The output takes the place of v.  The roles of a program are

    scan      4 warps   holds the state; computes outputs       scan.py
    loads     1 warp    loads the tiles through TMA
    stores    1 warp    stores the outputs through TMA

TMA is the Tensor Memory Accelerator.  Beyond the end of a sequence it reads zeros and writes
nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ssdprof.kernels._gluon import async_load, async_store, reinterpret, role_barrier
from ssdprof.kernels.hopper.ring import CHUNK, allocate_ring, barriers, begin_ring

DIM = gl.constexpr(128)  # K
HALF = gl.constexpr(64)  # half of K, and the columns of V of a scan
TILES = gl.constexpr(6)  # slots of the ring
# numbers of a chunk's tiles: tile WHICH of the program's n-th chunk is use 4 n + WHICH of the ring
KEYS = gl.constexpr(0)
QUERIES = gl.constexpr(1)
UPDATE = gl.constexpr(2)
VALUES = gl.constexpr(3)
THREADS = gl.constexpr(128)  # threads of the role `scan`

# stages of functions (`stalls/attribute.py`); others belong to the stage that calls them
STAGES = {
    "halves_of": "loads", "allocate_tiles": "setup", "load_segment": "loads",
    "store_segment": "chunk_output",
}  # fmt: skip


@gluon.jit
def halves_of(tile):
    """A tile in shared memory as two tiles of 64 columns, (2, i, 64), which follow each other in
    memory: the first and the last columns of a tile (i, 128), or the first and the last rows of a
    tile (2 i, 64).
    """
    shape: gl.constexpr = [tile.shape[0] * tile.shape[1] // (2 * HALF), HALF]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, tile.dtype)
    return reinterpret(tile, tile.dtype, [2, shape[0], HALF], layout)


@gluon.jit
def allocate_tiles(dtype: gl.constexpr):
    """The ring, and `written`: two mbarriers, of which chunks use one after the other, and which
    complete when the chunk's output is in the place of v.
    """
    ring, written = allocate_ring(dtype, TILES, DIM), barriers(2)
    begin_ring(ring, 1, THREADS)
    for i in gl.static_range(2):
        mbarrier.init(written.index(i), count=THREADS)
    role_barrier()  # the mbarriers are initialised before any role uses them
    return ring, written


@gluon.jit
def load_factor(ring, desc, row, n, WHICH: gl.constexpr):
    """Start to load tile WHICH (keys, queries or X) of the program's n-th chunk, which another
    program has prepared, from `row` of the tensor on.
    """
    use = 4 * n + WHICH
    ring.wait_empty(use)
    full, halves = ring.full_at(use), halves_of(ring.tile(use))
    mbarrier.expect(full, 2 * CHUNK * DIM)  # bytes, of 16-bit numbers
    for half in gl.static_range(2):
        async_load(desc, [row, half * HALF], full, halves.index(half))


@gluon.jit
def load_values(env, ring, segment, t, row, n):
    """Start to load the last tile of the program's n-th chunk: v at position t of the sequence, and
    beside it W from `row` of its tensor on.
    """
    _, _, _, v_desc, _ = env.tensor_descs
    _, _, _, W_desc = env.factor_descs
    use = 4 * n + VALUES
    ring.wait_empty(use)
    full, halves = ring.full_at(use), halves_of(ring.tile(use))
    mbarrier.expect(full, 4 * CHUNK * HALF)  # bytes of v and W
    corner = [segment.sequence.tile, segment.head, segment.sequence.tile_row + t, segment.first_v]
    async_load(v_desc, corner, full, halves.index(0).reshape([1, 1, CHUNK, HALF]))
    async_load(W_desc, [row, 0], full, halves.index(1))


@gluon.jit
def load_segment(env, ring, segment, n):
    """Load the tiles of all chunks of a segment, each when its slot of the ring is free.  n: number
    of the program's chunks before the segment.
    """
    keys_desc, queries_desc, X_desc, _ = env.factor_descs
    for j in range(segment.nchunks):
        row = segment.head_slot(j, env.S.HEADS) * CHUNK
        load_factor(ring, keys_desc, row, n + j, KEYS)
        load_factor(ring, queries_desc, row, n + j, QUERIES)
        load_factor(ring, X_desc, row, n + j, UPDATE)
        load_values(env, ring, segment, (segment.first + j) * CHUNK, row, n + j)


@gluon.jit
def store_segment(env, ring, written, segment, n):
    """Store the outputs of all chunks of a segment, and release the memory of each when TMA has
    read it.  n: number of the program's chunks before the segment.
    """
    _, _, _, _, out_desc = env.tensor_descs
    for j in range(segment.nchunks):
        # every second chunk uses the same barrier, in alternating phases
        mbarrier.wait(written.index((n + j) % 2), (n + j) // 2 & 1)
        t = segment.sequence.tile_row + (segment.first + j) * CHUNK
        corner = [segment.sequence.tile, segment.head, t, segment.first_v]
        out = halves_of(ring.tile(4 * (n + j) + VALUES)).index(0)
        async_store(out_desc, corner, out.reshape([1, 1, CHUNK, HALF]))
        tma.store_wait(0)
        # one arrival for the THREADS of `scan`, all of which release the other tiles
        mbarrier.arrive(ring.empty_at(4 * (n + j) + VALUES), count=THREADS)
