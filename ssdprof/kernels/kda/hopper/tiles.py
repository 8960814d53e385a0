"""Shared memory of a program that scans: a ring of six tiles of 16 KB, a chunk and a half, so that
two programs fit on a multiprocessor.

A chunk has four tiles, in the order in which they are used: its keys, queries, X, and v beside W.
Its output takes the place of v.

    scan      4 warps   holds the state; computes outputs       scan.py
    loads     1 warp    loads the tiles through TMA             role_copies.py
    stores    1 warp    stores the outputs through TMA          role_copies.py

TMA is the Tensor Memory Accelerator.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ssdprof.kernels._gluon import aggregate, arrive, phase, place_in, reinterpret, role_barrier
from ssdprof.kernels.hopper.ring import CHUNK, barriers

DIM = gl.constexpr(128)  # K
HALF = gl.constexpr(64)  # channels at a time, and columns of V of a scan
TILES = gl.constexpr(6)
# tiles of a chunk that is scanned
KEYS = gl.constexpr(0)
QUERIES = gl.constexpr(1)
UPDATE = gl.constexpr(2)
VALUES = gl.constexpr(3)
THREADS = gl.constexpr(128)  # that prepare or scan

STAGES = {
    "allocate_tiles": "setup", "tile": "loads", "halves": "loads", "full_at": "loads",
    "empty_at": "loads", "wait_full": "waiting.chunk", "wait_empty": "ahead", "release": "loads",
    "halves_of": "loads",
}  # fmt: skip


@gluon.jit
def halves_of(tile, dtype: gl.constexpr):
    """A tile as its columns before and after the 64th, (2, i, 64)."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, HALF], dtype)
    return reinterpret(tile, dtype, [2, CHUNK, HALF], layout)


@aggregate
class Tiles:
    memory: gl.shared_memory_descriptor  # (TILES, CHUNK, DIM)
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    written: gl.shared_memory_descriptor  # (2), in turn: an output is in the place of v

    @gluon.jit
    def tile(self, n, WHICH: gl.constexpr):
        """Tile WHICH of the n-th chunk that a program scans."""
        return self.memory.index(place_in(4 * n + WHICH, TILES))

    @gluon.jit
    def halves(self, n, WHICH: gl.constexpr):
        return halves_of(self.tile(n, WHICH), self.memory.dtype)

    @gluon.jit
    def full_at(self, n, WHICH: gl.constexpr):
        return self.full.index(place_in(4 * n + WHICH, TILES))

    @gluon.jit
    def wait_full(self, n, WHICH: gl.constexpr):
        mbarrier.wait(self.full_at(n, WHICH), phase(4 * n + WHICH, TILES))

    @gluon.jit
    def empty_at(self, n, WHICH: gl.constexpr):
        return self.empty.index(place_in(4 * n + WHICH, TILES))

    @gluon.jit
    def wait_empty(self, n, WHICH: gl.constexpr):
        mbarrier.wait(self.empty_at(n, WHICH), phase(4 * n + WHICH, TILES) ^ 1)

    @gluon.jit
    def release(self, n, WHICH: gl.constexpr):
        """By every thread that reads the tile."""
        arrive(self.empty_at(n, WHICH))


@gluon.jit
def allocate_tiles(dtype: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, DIM], dtype)
    tiles = Tiles(
        memory=gl.allocate_shared_memory(dtype, [TILES, CHUNK, DIM], layout),
        full=barriers(TILES),
        empty=barriers(TILES),
        written=barriers(2),
    )
    for i in gl.static_range(TILES):
        mbarrier.init(tiles.full.index(i), count=1)
        mbarrier.init(tiles.empty.index(i), count=THREADS)
    for i in gl.static_range(2):
        mbarrier.init(tiles.written.index(i), count=THREADS)
    role_barrier()
    return tiles
