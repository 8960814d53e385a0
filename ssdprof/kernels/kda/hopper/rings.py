"""Shared memory of a program that has all of a sequence and head (`whole_kernel.py`), in chunks of
32 positions, and its mbarriers.

    states   4 warps   holds the state in registers; computes outputs                states.py
    decays   4 warps   decays, operands of the scores, keys and queries              decays.py
    scores   2 x 2     norms, scores, their inverse, X and W                         scores.py
    loads    1 warp    loads q, k, g and v through TMA                               whole_kernel.py
    stores   1 warp    stores the outputs through TMA                                whole_kernel.py

    loads --q, k, g--> decays --operands--> scores --X, W--> states --outputs--> stores
                              --keys, queries, ends--------> states
          --q, k--> scores --norms--> decays --keys at the chunk's end--> scores

Keys and queries take the place of k and q, and outputs that of v.  TMA is the Tensor Memory
Accelerator.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ssdprof.kernels._gluon import aggregate, phase, place_in
from ssdprof.kernels.hopper.ring import Ring, barriers, begin_ring
from ssdprof.kernels.kda.hopper.prep import HALF, allocate_tile, vector_layout

SIZE = gl.constexpr(32)  # positions of a chunk
DIM = gl.constexpr(128)  # K and V
THREADS = gl.constexpr(128)  # of a role that computes
# numbers of each position: norms are 1 / |k|, 1 / |q|
K_NORM = gl.constexpr(0)
Q_NORM = gl.constexpr(1)
SCALED = gl.constexpr(2)  # scale / |q|
BETA = gl.constexpr(3)
OWN = gl.constexpr(4)  # q . k of the position

STAGES = {"allocate": "setup", "begin_barriers": "setup", "allocate_tiles": "setup"}


@aggregate
class Operands:
    """Operands of the scores of a chunk, (half of the channels, i, K) each.  Rows are those of q
    and k in turn, eight of each; columns are rows of k.  "Sorted" ones have the first eight of each
    16 positions before all second ones.
    """

    anchor_rows: gl.shared_memory_descriptor  # inside blocks of 8, sorted
    anchor_columns: gl.shared_memory_descriptor
    eight_rows: gl.shared_memory_descriptor  # between blocks of 8, sorted; columns are first ones
    half_rows: gl.shared_memory_descriptor  # between the halves; columns are those of the first


@aggregate
class KDARings:
    """keys, queries and `decayed` share slots; so do X and W, and v and outputs."""

    keys: Ring  # k (i, K), then keys; its barriers are those of q and k
    queries: gl.shared_memory_descriptor  # q (i, K), then queries
    decayed: gl.shared_memory_descriptor  # mbarriers: keys, queries and ends are there
    ends: gl.shared_memory_descriptor  # decays of whole chunks (slot, K)
    gates: Ring  # g (i, K)
    values: Ring  # v (i, V), then outputs
    written: gl.shared_memory_descriptor  # mbarriers: outputs are there
    operands: Operands
    ready: gl.shared_memory_descriptor  # mbarriers (chunks in turn, half): operands are there
    read: gl.shared_memory_descriptor  # mbarriers (half): operands may be replaced
    vectors: gl.tuple  # numbers of each position, of two chunks in turn
    normed: gl.shared_memory_descriptor  # mbarriers: vectors are there
    at_end: Ring  # keys decayed to the chunk's end (i, K), fp16
    updates: Ring  # X (j, K)
    weights: gl.shared_memory_descriptor  # W (i, j)

    @gluon.jit
    def vector(self, n, WHICH: gl.constexpr):
        return self.vectors[WHICH].index(place_in(n, 2))

    @gluon.jit
    def ready_at(self, n, half):
        return self.ready.index(2 * place_in(n, 2) + half)

    @gluon.jit
    def slot(self, n):
        return place_in(n, self.keys.DEPTH)

    @gluon.jit
    def query_tile(self, n):
        return self.queries.index(self.slot(n))

    @gluon.jit
    def wait_decayed(self, n):
        mbarrier.wait(self.decayed.index(self.slot(n)), phase(n, self.keys.DEPTH))


@gluon.jit
def allocate_tiles(dtype: gl.constexpr, DEPTH: gl.constexpr):
    tiles = allocate_tile(dtype, [DEPTH, SIZE, DIM])
    return Ring(tiles, barriers(DEPTH), barriers(DEPTH), DEPTH)


@gluon.jit
def allocate(dtype: gl.constexpr, gates: gl.constexpr, S: gl.constexpr):
    """Allocates all of it.  The barriers are not initialised yet."""
    vectors = ()
    for _ in gl.static_range(5):
        vectors += (gl.allocate_shared_memory(gl.float32, [2, SIZE], vector_layout),)
    return KDARings(
        keys=allocate_tiles(dtype, S.SLOTS),
        queries=allocate_tile(dtype, [S.SLOTS, SIZE, DIM]),
        decayed=barriers(S.SLOTS),
        ends=gl.allocate_shared_memory(gl.float32, [S.SLOTS, DIM], vector_layout),
        gates=allocate_tiles(gates, S.GATE_SLOTS),
        values=allocate_tiles(dtype, S.SLOTS),
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
        normed=barriers(2),
        at_end=allocate_tiles(gl.float16, 2),
        updates=allocate_tiles(dtype, 2),
        weights=allocate_tile(dtype, [2, SIZE, SIZE]),
    )


@gluon.jit
def begin_barriers(rings):
    """Initialises the barriers: `states` and `decays` arrive with every thread, `decays` for each
    half of the channels, others once.
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
        mbarrier.init(rings.normed.index(i), count=1)
        mbarrier.init(rings.read.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(rings.ready.index(i), count=THREADS)
