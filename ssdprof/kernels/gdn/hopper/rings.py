# mypy: ignore-errors
"""Shared memory of `hopper_kernel.py`: ring buffers of tiles and vectors, and their mbarriers.

    states      2 x 4     holds half of the transposed state (a lane); computes outputs   role_states.py
    scores      4 warps   computes X and W of a chunk from its inverse                role_scores.py
    gates       2 warps   computes vectors of decays                                  role_gates.py
    loads       1 warp    loads q, k, v and the inverse of a chunk through TMA        role_loads.py
    stores      1 warp    stores the output of a chunk through TMA                    role_stores.py

Each ring slot has two mbarriers.  Consumers wait at `full`, the producer at `empty`.  Use n of a ring of SIZE slots has
slot n % SIZE and phase n / SIZE % 2.  TMA is the Tensor Memory Accelerator.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from ssdprof.kernels._gluon import phase, place_in

CHUNK = gl.constexpr(64)
DIM = gl.constexpr(128)  # K and V
STATE_THREADS = gl.constexpr(256)
# Vectors of a chunk.  With log2 decays G_i since the chunk's start, key norms n and query norms a:
FROM_STATE = gl.constexpr(0)  # 2^G_i / n_i: factor of the entering state at key i
TO_OUTPUT = gl.constexpr(1)  # scale 2^G_i / a_i: factor of the entering state at query i
ROW = gl.constexpr(2)  # G_i + log2(scale / a_i)
COLUMN = gl.constexpr(3)  # G_i
TO_END = gl.constexpr(4)  # 2^(G_end - G_i)
DECAY = gl.constexpr(5)  # 2^G_end, repeated 64 times
BETA = gl.constexpr(6)  # beta_i, only if this kernel inverts the chunks
VECTORS = gl.constexpr(7)

STAGES = {
    "tile": "caller",
    "wait_full": "caller",
    "wait_empty": "caller",
    "full_at": "caller",
    "empty_at": "caller",
    "vector": "caller",
    "allocate": "setup",
    "allocate_ring": "setup",
    "begin_barriers": "setup",
    "begin_ring": "setup",
}


@aggregate
class Ring:
    """Ring buffer in shared memory, with a `full` and an `empty` mbarrier per slot."""

    tiles: gl.shared_memory_descriptor  # (SIZE, rows, columns)
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    SIZE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty, SIZE):
        self.tiles, self.full, self.empty = tiles, full, empty
        self.SIZE = gl.constexpr(SIZE)

    @gluon.jit
    def tile(self, n):
        return self.tiles.index(place_in(n, self.SIZE))

    @gluon.jit
    def wait_full(self, n):
        mbarrier.wait(self.full.index(place_in(n, self.SIZE)), phase(n, self.SIZE))

    @gluon.jit
    def wait_empty(self, n):
        mbarrier.wait(self.empty.index(place_in(n, self.SIZE)), phase(n, self.SIZE) ^ 1)

    @gluon.jit
    def full_at(self, n):
        return self.full.index(place_in(n, self.SIZE))

    @gluon.jit
    def empty_at(self, n):
        return self.empty.index(place_in(n, self.SIZE))


@aggregate
class Rings:
    """The rings of a program.  Uses of `queries`, `weights` and `outputs` count the chunks of the second pass, those of
    the other rings count the chunks of both passes."""

    keys: Ring  # k (i, K); its barriers also cover the vectors
    values: Ring  # v (i, V)
    queries: Ring  # q (i, K)
    inverses: Ring  # inverse (j, i), transposed
    updates: Ring  # X (j, K)
    weights: Ring  # W (i, j)
    outputs: Ring  # out (i, V)
    vectors: gl.shared_memory_descriptor  # (slots of keys * VECTORS, CHUNK)
    turns: gl.shared_memory_descriptor  # mbarriers: the role `states` of each lane waits for the other's products

    @gluon.constexpr_function
    def __init__(self, keys, values, queries, inverses, updates, weights, outputs, vectors, turns):
        self.keys, self.values, self.queries, self.inverses = keys, values, queries, inverses
        self.updates, self.weights, self.outputs, self.vectors, self.turns = updates, weights, outputs, vectors, turns

    @gluon.jit
    def vector(self, n, which: gl.constexpr):
        return self.vectors.index(place_in(n, self.keys.SIZE) * VECTORS + which)


@gluon.jit
def allocate_ring(dtype: gl.constexpr, SIZE: gl.constexpr, COLUMNS: gl.constexpr):
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, COLUMNS], dtype)
    return Ring(
        gl.allocate_shared_memory(dtype, [SIZE, CHUNK, COLUMNS], layout),
        gl.allocate_shared_memory(gl.int64, [SIZE, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [SIZE, 1], barrier),
        SIZE,
    )


@gluon.jit
def allocate(dtype: gl.constexpr, KEY_RING: gl.constexpr, RING: gl.constexpr):
    """Allocate all rings.  The barriers are not initialised yet."""
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Rings(
        keys=allocate_ring(dtype, KEY_RING, DIM),
        values=allocate_ring(dtype, RING, DIM),
        queries=allocate_ring(dtype, RING, DIM),
        inverses=allocate_ring(dtype, RING, CHUNK),
        updates=allocate_ring(dtype, RING, DIM),
        weights=allocate_ring(dtype, RING, CHUNK),
        outputs=allocate_ring(dtype, 1, DIM),
        vectors=gl.allocate_shared_memory(gl.float32, [KEY_RING * VECTORS, CHUNK], vector),
        turns=gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
    )


@gluon.jit
def begin_ring(ring, FULL: gl.constexpr, EMPTY: gl.constexpr):
    for i in gl.static_range(ring.SIZE):
        mbarrier.init(ring.full.index(i), count=FULL)
        mbarrier.init(ring.empty.index(i), count=EMPTY)


@gluon.jit
def begin_barriers(rings, SECOND_PASS: gl.constexpr):
    """Initialise the barriers with their arrival counts.  In `states` every thread arrives, in other roles one thread.

    Without a second pass, the lanes also have the role of `scores` (`parts.py`).

    Only barriers that the roles use are initialised.  Triton may place the arguments of the roles in the memory of an
    idle barrier, and PTX forbids another use of that memory before mbarrier.inval.
    """
    begin_ring(rings.values, 1, STATE_THREADS)
    if SECOND_PASS:
        for lane in gl.static_range(2):
            mbarrier.init(rings.turns.index(lane), count=STATE_THREADS // 2)
        begin_ring(rings.keys, 2, STATE_THREADS + 1)  # full: loads and gates; empty: states and scores
        begin_ring(rings.queries, 1, STATE_THREADS + 1)
        begin_ring(rings.inverses, 1, 1)
        begin_ring(rings.updates, 1, STATE_THREADS)
        begin_ring(rings.weights, 1, STATE_THREADS)
        begin_ring(rings.outputs, STATE_THREADS, 1)
    else:
        begin_ring(rings.keys, 2, STATE_THREADS)
        begin_ring(rings.inverses, 1, STATE_THREADS)
        begin_ring(rings.updates, STATE_THREADS, STATE_THREADS)
