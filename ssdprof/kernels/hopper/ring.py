"""Ring buffers in shared memory, with a `full` and an `empty` mbarrier per slot.

Consumers wait at `full`, the producer at `empty`.  Use n of a ring of DEPTH slots has slot n %
DEPTH and phase n / DEPTH % 2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ssdprof.kernels._gluon import aggregate, phase, place_in

CHUNK = gl.constexpr(64)  # positions per chunk: rows of one matrix instruction

STAGES = {
    "barriers": "setup",
    "allocate_ring": "setup",
    "begin_pairs": "setup",
    "begin_ring": "setup",
}


@aggregate
class Ring:
    """Slots for tiles in shared memory, and the mbarriers of each slot: it is full, it is empty.

    n counts the uses of the ring: use n is of slot n % DEPTH.
    """

    tiles: gl.shared_memory_descriptor  # (DEPTH, rows, columns)
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    DEPTH: gl.constexpr

    @gluon.jit
    def tile(self, n):
        return self.tiles.index(place_in(n, self.DEPTH))

    @gluon.jit
    def wait_full(self, n):
        mbarrier.wait(self.full.index(place_in(n, self.DEPTH)), phase(n, self.DEPTH))

    @gluon.jit
    def wait_empty(self, n):
        mbarrier.wait(self.empty.index(place_in(n, self.DEPTH)), phase(n, self.DEPTH) ^ 1)

    @gluon.jit
    def full_at(self, n):
        return self.full.index(place_in(n, self.DEPTH))

    @gluon.jit
    def empty_at(self, n):
        return self.empty.index(place_in(n, self.DEPTH))


@gluon.jit
def barriers(DEPTH: gl.constexpr):
    """Mbarriers that are not initialised yet."""
    return gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())


@gluon.jit
def allocate_ring(dtype: gl.constexpr, DEPTH: gl.constexpr, COLUMNS: gl.constexpr):
    """A ring of tiles (CHUNK, COLUMNS).  Its barriers are not initialised yet."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, COLUMNS], dtype)
    tiles = gl.allocate_shared_memory(dtype, [DEPTH, CHUNK, COLUMNS], layout)
    return Ring(tiles, barriers(DEPTH), barriers(DEPTH), DEPTH)


@gluon.jit
def begin_pairs(full, empty, DEPTH: gl.constexpr, FULL: gl.constexpr, EMPTY: gl.constexpr):
    """Initialise pairs of barriers with their arrival counts."""
    for i in gl.static_range(DEPTH):
        mbarrier.init(full.index(i), count=FULL)
        mbarrier.init(empty.index(i), count=EMPTY)


@gluon.jit
def begin_ring(ring, FULL: gl.constexpr, EMPTY: gl.constexpr):
    begin_pairs(ring.full, ring.empty, ring.DEPTH, FULL, EMPTY)
