"""Ring buffers in shared memory, with two mbarriers for each slot, `full` and `empty`.

Consumers wait at `full` before they read a slot, and a producer waits at `empty` before it fills
one.  Use n of a ring of DEPTH slots has the slot n % DEPTH and the phase n // DEPTH % 2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ssdprof.kernels._gluon import aggregate, phase, place_in

CHUNK = gl.constexpr(64)  # positions per chunk: the rows of one matrix instruction

# stages of functions: `stalls/attribute.py`
STAGES = {
    "barriers": "setup",
    "allocate_ring": "setup",
    "begin_pairs": "setup",
    "begin_ring": "setup",
}


@aggregate
class Ring:
    """A ring of tiles in shared memory, and the mbarriers of its slots.

    tiles: (DEPTH, rows, columns).  full, empty: (DEPTH, 1).  DEPTH: number of slots.
    n, in all methods: number of the use of the ring, from 0.
    """

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    DEPTH: gl.constexpr

    @gluon.jit
    def tile(self, n):
        """The tile (rows, columns) of use n."""
        return self.tiles.index(place_in(n, self.DEPTH))

    @gluon.jit
    def wait_full(self, n):
        """Wait until the producers have filled the slot for use n."""
        mbarrier.wait(self.full.index(place_in(n, self.DEPTH)), phase(n, self.DEPTH))

    @gluon.jit
    def wait_empty(self, n):
        """Wait until the consumers have released the slot for use n.  The first DEPTH uses do not
        wait, because their phase is the one before the barrier's first.
        """
        mbarrier.wait(self.empty.index(place_in(n, self.DEPTH)), phase(n, self.DEPTH) ^ 1)

    @gluon.jit
    def full_at(self, n):
        """The barrier at which a producer, or the TMA copy that it starts, arrives when it has
        filled the slot for use n.
        """
        return self.full.index(place_in(n, self.DEPTH))

    @gluon.jit
    def empty_at(self, n):
        """The barrier at which consumers arrive when they have read use n."""
        return self.empty.index(place_in(n, self.DEPTH))


@gluon.jit
def barriers(DEPTH: gl.constexpr):
    """The memory of DEPTH mbarriers, which are not initialised yet."""
    return gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())


@gluon.jit
def allocate_ring(dtype: gl.constexpr, DEPTH: gl.constexpr, COLUMNS: gl.constexpr):
    """A ring of tiles (CHUNK, COLUMNS).  Its barriers are not initialised yet."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, COLUMNS], dtype)
    tiles = gl.allocate_shared_memory(dtype, [DEPTH, CHUNK, COLUMNS], layout)
    return Ring(tiles, barriers(DEPTH), barriers(DEPTH), DEPTH)


@gluon.jit
def begin_pairs(full, empty, DEPTH: gl.constexpr, FULL: gl.constexpr, EMPTY: gl.constexpr):
    """Initialise DEPTH pairs of barriers, `full` and `empty` (DEPTH, 1) each.  FULL, EMPTY: number
    of arrivals that complete a phase of a barrier of `full` and of `empty`.
    """
    for i in gl.static_range(DEPTH):
        mbarrier.init(full.index(i), count=FULL)
        mbarrier.init(empty.index(i), count=EMPTY)


@gluon.jit
def begin_ring(ring, FULL: gl.constexpr, EMPTY: gl.constexpr):
    """Initialise the barriers of a ring: see `begin_pairs`."""
    begin_pairs(ring.full, ring.empty, ring.DEPTH, FULL, EMPTY)
