# mypy: ignore-errors
"""Shared memory of `hopper_kernel.py`: rings of tiles and vectors, and the barriers at which its roles meet.

    states      8 warps   the state, transposed, in registers; outputs             role_states.py
    scores      4 warps   X and W of a chunk, from its inverse                     role_scores.py
    gates       2 warps   vectors of decays                                        role_gates.py
    loads       1 warp    q, k, v and the inverse of a chunk, by the copy engine   role_loads.py
    stores      1 warp    outputs of a chunk, likewise                             role_stores.py

Each ring has two barriers a place: `full`, at which its readers wait, and `empty`, at which its writer does.  Turn n of
a ring of SIZE places has place n % SIZE, and phase n / SIZE % 2.
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
FROM_STATE = gl.constexpr(0)  # 2^G_i / n_i: what is left of the state that entered, for key i
TO_OUTPUT = gl.constexpr(1)  # scale 2^G_i / a_i: the same for query i
ROW = gl.constexpr(2)  # G_i + log2(scale / a_i)
COLUMN = gl.constexpr(3)  # G_i
TO_END = gl.constexpr(4)  # 2^(G_end - G_i)
DECAY = gl.constexpr(5)  # 2^G_end, 64 times
BETA = gl.constexpr(6)  # where the kernel inverts
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
    """Places in shared memory, and for each a barrier that it is full and one that it is empty."""

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
    """All of a program's shared memory.  Turns of `queries`, `weights` and `outputs` count chunks of the second pass,
    those of the others the chunks of both passes."""

    keys: Ring  # k (i, K); `full` also says that the vectors are there
    values: Ring  # v (i, V)
    queries: Ring  # q (i, K)
    inverses: Ring  # (j, i), transposed
    updates: Ring  # X (j, K)
    weights: Ring  # W (i, j)
    outputs: Ring  # (i, V)
    vectors: gl.shared_memory_descriptor  # (places of keys * VECTORS, CHUNK)

    @gluon.constexpr_function
    def __init__(self, keys, values, queries, inverses, updates, weights, outputs, vectors):
        self.keys, self.values, self.queries, self.inverses = keys, values, queries, inverses
        self.updates, self.weights, self.outputs, self.vectors = updates, weights, outputs, vectors

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
    """All rings; barriers are not to be used yet."""
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
    )


@gluon.jit
def begin_ring(ring, FULL: gl.constexpr, EMPTY: gl.constexpr):
    for i in gl.static_range(ring.SIZE):
        mbarrier.init(ring.full.index(i), count=FULL)
        mbarrier.init(ring.empty.index(i), count=EMPTY)


@gluon.jit
def begin_barriers(rings, SECOND_PASS: gl.constexpr):
    """Says how many arrive: of the states' role each thread for itself, of other roles one for all.

    It begins only barriers that the roles use.  Triton may put the arguments of the roles where an idle barrier lies,
    and PTX forbids another use of that memory before mbarrier.inval.
    """
    begin_ring(rings.keys, 2, STATE_THREADS + 1)  # by loads and gates; states and scores
    begin_ring(rings.values, 1, STATE_THREADS)
    begin_ring(rings.queries, 1, STATE_THREADS + 1)
    begin_ring(rings.inverses, 1, 1)
    begin_ring(rings.updates, 1, STATE_THREADS)
    if SECOND_PASS:
        begin_ring(rings.weights, 1, STATE_THREADS)
        begin_ring(rings.outputs, STATE_THREADS, 1)
