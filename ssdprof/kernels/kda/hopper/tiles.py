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

from ssdprof.kernels._gluon import reinterpret, role_barrier
from ssdprof.kernels.hopper.ring import CHUNK, allocate_ring, barriers, begin_ring

DIM = gl.constexpr(128)  # K
HALF = gl.constexpr(64)  # channels at a time, and columns of V of a scan
TILES = gl.constexpr(6)
# tiles of a chunk; WHICH of the program's n-th one is use 4 n + WHICH of the ring
KEYS = gl.constexpr(0)
QUERIES = gl.constexpr(1)
UPDATE = gl.constexpr(2)
VALUES = gl.constexpr(3)
THREADS = gl.constexpr(128)  # of `scan`

STAGES = {"halves_of": "loads", "allocate_tiles": "setup"}


@gluon.jit
def halves_of(tile):
    """A tile as its columns before and after the 64th, (2, i, 64)."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, HALF], tile.dtype)
    return reinterpret(tile, tile.dtype, [2, CHUNK, HALF], layout)


@gluon.jit
def allocate_tiles(dtype: gl.constexpr):
    """The ring, and two mbarriers, in turn: an output is in the place of v."""
    tiles, written = allocate_ring(dtype, TILES, DIM), barriers(2)
    begin_ring(tiles, 1, THREADS)
    for i in gl.static_range(2):
        mbarrier.init(written.index(i), count=THREADS)
    role_barrier()
    return tiles, written
