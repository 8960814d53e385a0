"""Shared memory of a program that has all of a sequence and head (`whole_kernel.py`), in chunks of
32 positions, and its mbarriers.

    states   4 warps   holds the state in registers; computes outputs                states.py
    decays   4 warps   decays, operands of the scores, keys and queries              decays.py
    scores   2 x 2     vectors, scores, the inverse of I + L, X and W                scores.py
    loads    1 warp    loads q, k, g and v through TMA                               whole_kernel.py
    stores   1 warp    stores the outputs through TMA                                whole_kernel.py

    loads --q, k, g--> decays --operands--> scores --X, W--> states --outputs--> stores
                              --keys, queries, ends--------> states
          --q, k--> scores --vectors--> decays --keys at the chunk's end--> scores

A vector has a number for each position of a chunk.  Keys and queries take the place of k and q, and
outputs that of v.  TMA is the Tensor Memory Accelerator.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ssdprof.kernels._gluon import aggregate, phase, place_in
from ssdprof.kernels.hopper.ring import Ring, barriers, begin_ring
from ssdprof.kernels.kda.hopper.prep import HALF, allocate_tile, vector_layout

SIZE = gl.constexpr(32)  # positions of a chunk
DIM = gl.constexpr(128)  # K and V
THREADS = gl.constexpr(128)  # of the roles `states` and `decays`
# indices of the five vectors
K_FACTOR = gl.constexpr(0)  # 1 / |k_i|
Q_FACTOR = gl.constexpr(1)  # 1 / |q_i|
Q_SCALED = gl.constexpr(2)  # scale / |q_i|
BETA = gl.constexpr(3)
Q_DOT_K = gl.constexpr(4)  # q_i . k_i before the norm

# stages of functions: `stalls/attribute.py`
STAGES = {"allocate": "setup", "begin_barriers": "setup", "allocate_chunk_ring": "setup"}


@aggregate
class Operands:
    """Operands of the scores of a chunk, (half of the channels, rows, K / 2) each.

    Rows of products are those of q and k in turn, eight of each; columns are rows of k.  "Sorted"
    operands have the first eight of each 16 positions before all second ones.
    """

    # inside blocks of 8, both sorted
    anchor_rows: gl.shared_memory_descriptor
    anchor_columns: gl.shared_memory_descriptor
    # between the two blocks of 8 of each 16 positions, sorted; the columns are k of the first ones
    eight_rows: gl.shared_memory_descriptor
    # between the halves of the chunk; the columns are k of the first half
    half_rows: gl.shared_memory_descriptor


@aggregate
class KDARings:
    """Tiles in shared memory, and mbarriers.  These fields have the same slot for a chunk: `keys`,
    `queries`, `decayed` and `ends`; `values` and `written`; `updates` and `weights`.
    """

    keys: Ring  # k (i, K), then keys; its barriers are those of q and k
    queries: gl.shared_memory_descriptor  # q (i, K), then queries
    decayed: gl.shared_memory_descriptor  # mbarriers: keys, queries and ends are stored
    ends: gl.shared_memory_descriptor  # decays over whole chunks (slot, K)
    gates: Ring  # g (i, K)
    values: Ring  # v (i, V), then outputs
    written: gl.shared_memory_descriptor  # mbarriers: outputs are stored
    operands: Operands
    ready: gl.shared_memory_descriptor  # mbarriers (n % 2, half): operands of chunk n are stored
    read: gl.shared_memory_descriptor  # mbarriers (half): operands may be replaced
    vectors: gl.tuple  # vector WHICH: (n % 2, i) of chunk n
    vectors_stored: gl.shared_memory_descriptor  # mbarriers (n % 2): those of chunk n are
    at_end: Ring  # keys decayed to the chunk's end (i, K), fp16
    updates: Ring  # X (j, K); its barriers are those of X and W
    weights: gl.shared_memory_descriptor  # W (i, j)

    @gluon.jit
    def vector(self, n, WHICH: gl.constexpr):
        """Vector WHICH (i) of the program's n-th chunk."""
        return self.vectors[WHICH].index(place_in(n, 2))

    @gluon.jit
    def ready_at(self, n, half):
        """The barrier of half of the operands of the program's n-th chunk."""
        return self.ready.index(2 * place_in(n, 2) + half)

    @gluon.jit
    def slot(self, n):
        """The slot of the keys, and of everything that shares it, of the program's n-th chunk."""
        return place_in(n, self.keys.DEPTH)

    @gluon.jit
    def query_tile(self, n):
        """q, then queries (i, K), of the program's n-th chunk."""
        return self.queries.index(self.slot(n))

    @gluon.jit
    def wait_decayed(self, n):
        """Wait until keys, queries and ends of the program's n-th chunk are stored."""
        mbarrier.wait(self.decayed.index(self.slot(n)), phase(n, self.keys.DEPTH))


@gluon.jit
def allocate_chunk_ring(dtype: gl.constexpr, DEPTH: gl.constexpr):
    """A ring of DEPTH tiles (SIZE, DIM).  Its barriers are not initialised yet."""
    tiles = allocate_tile(dtype, [DEPTH, SIZE, DIM])
    return Ring(tiles, barriers(DEPTH), barriers(DEPTH), DEPTH)


@gluon.jit
def allocate(dtype: gl.constexpr, gate_dtype: gl.constexpr, S: gl.constexpr):
    """The program's shared memory.  The barriers are not initialised yet.

    dtype: that of q, k and v.  gate_dtype: that of g.
    """
    vectors = ()
    for _ in gl.static_range(5):
        vectors += (gl.allocate_shared_memory(gl.float32, [2, SIZE], vector_layout),)
    return KDARings(
        keys=allocate_chunk_ring(dtype, S.SLOTS),
        queries=allocate_tile(dtype, [S.SLOTS, SIZE, DIM]),
        decayed=barriers(S.SLOTS),
        ends=gl.allocate_shared_memory(gl.float32, [S.SLOTS, DIM], vector_layout),
        gates=allocate_chunk_ring(gate_dtype, S.GATE_SLOTS),
        values=allocate_chunk_ring(dtype, S.SLOTS),
        written=barriers(S.SLOTS),
        operands=Operands(
            anchor_rows=allocate_tile(dtype, [2, 2 * SIZE, HALF]),
            anchor_columns=allocate_tile(dtype, [2, SIZE, HALF]),
            eight_rows=allocate_tile(dtype, [2, 2 * SIZE, HALF]),
            half_rows=allocate_tile(dtype, [2, 2 * SIZE, HALF]),
        ),
        ready=barriers(4),
        read=barriers(2),
        vectors=vectors,
        vectors_stored=barriers(2),
        at_end=allocate_chunk_ring(gl.float16, 2),
        updates=allocate_chunk_ring(dtype, 2),
        weights=allocate_tile(dtype, [2, SIZE, SIZE]),
    )


@gluon.jit
def begin_barriers(rings):
    """Initialise the barriers.  `states` and `decays` arrive with every thread, the other roles and
    TMA once.  `decays` arrives for each half of the channels: twice at a barrier, but once at each
    of `ready`, which is one of a half.
    """
    begin_ring(rings.keys, 1, THREADS)
    begin_ring(rings.gates, 1, 2 * THREADS)
    begin_ring(rings.values, 1, 1)
    begin_ring(rings.at_end, 2 * THREADS, 1)
    begin_ring(rings.updates, 1, THREADS)
    for i in gl.static_range(rings.keys.DEPTH):
        mbarrier.init(rings.decayed.index(i), count=2 * THREADS)
        mbarrier.init(rings.written.index(i), count=THREADS)
    for i in gl.static_range(2):
        mbarrier.init(rings.vectors_stored.index(i), count=1)
        mbarrier.init(rings.read.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(rings.ready.index(i), count=THREADS)
