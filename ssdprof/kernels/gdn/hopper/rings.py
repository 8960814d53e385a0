"""Shared memory of `hopper_kernel.py`: ring buffers of tiles and vectors, and their mbarriers.  The
roles that fill and empty them:

    states   2 x 4 warps  two lanes, each with half of the transposed state; computes outputs
                                                                                      role_states.py
    scores   4 warps      computes X and W of a chunk from its inverse                role_scores.py
    gates    2 warps      computes vectors of decays                                  role_gates.py
    loads    1 warp       loads q, k, v and the inverse of a chunk through TMA        role_copies.py
    stores   1 warp       stores the output of a chunk through TMA                    role_copies.py

TMA is the Tensor Memory Accelerator.  `parts.py` uses some of the rings, with roles of its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ssdprof.kernels._gluon import aggregate, place_in
from ssdprof.kernels.hopper.ring import CHUNK, Ring, allocate_ring, barriers, begin_ring

DIM = gl.constexpr(128)  # K and V
STATE_THREADS = gl.constexpr(256)  # of both lanes of `states`
# Vectors (CHUNK) of a chunk, by their index.  With log2 decays G_i since the chunk's start, and the
# norms |k_i| and |q_i|, which are 1 if the call does not normalise:
FROM_STATE = gl.constexpr(0)  # 2^G_i / |k_i|: factor of row i of K S, S the state that enters
TO_OUTPUT = gl.constexpr(1)  # scale 2^G_i / |q_i|: factor of row i of Q S
ROW = gl.constexpr(2)  # G_i + log2(scale / |q_i|)
COLUMN = gl.constexpr(3)  # G_i
TO_END = gl.constexpr(4)  # 2^(G_end - G_i)
DECAY = gl.constexpr(5)  # 2^G_end, repeated 64 times
VECTORS = gl.constexpr(6)  # their number

# stages of functions: `stalls/attribute.py`
STAGES = {"allocate": "setup", "begin_barriers": "setup"}


@aggregate
class Rings:
    """The rings of a program, with the shapes of their tiles; i and j are positions of a chunk.

    The uses of `queries`, `weights` and `outputs` are numbered by the program's chunks of the
    second pass, those of the other rings by its chunks of both passes.
    """

    keys: Ring  # k (i, K); its barriers also cover the vectors
    values: Ring  # v (i, V)
    queries: Ring  # q (i, K)
    inverses: Ring  # inverse (j, i), transposed
    updates: Ring  # X (j, K)
    weights: Ring  # W (i, j)
    outputs: Ring  # out (i, V)
    vectors: gl.shared_memory_descriptor  # (slots * VECTORS, CHUNK)
    # an mbarrier of each lane of `states`, at which it waits until the other lane has issued
    # products
    turns: gl.shared_memory_descriptor

    @gluon.jit
    def vector(self, n, which: gl.constexpr):
        """Vector `which` of the program's n-th chunk."""
        return self.vectors.index(place_in(n, self.keys.DEPTH) * VECTORS + which)


@gluon.jit
def allocate(dtype: gl.constexpr, DEPTH: gl.constexpr):
    """Allocate all rings.  The barriers are not initialised yet."""
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Rings(
        keys=allocate_ring(dtype, DEPTH, DIM),
        values=allocate_ring(dtype, DEPTH, DIM),
        queries=allocate_ring(dtype, DEPTH, DIM),
        inverses=allocate_ring(dtype, DEPTH, CHUNK),
        updates=allocate_ring(dtype, DEPTH, DIM),
        weights=allocate_ring(dtype, DEPTH, CHUNK),
        outputs=allocate_ring(dtype, 1, DIM),
        vectors=gl.allocate_shared_memory(gl.float32, [DEPTH * VECTORS, CHUNK], vector),
        turns=barriers(2),
    )


@gluon.jit
def begin_barriers(rings, SECOND_PASS: gl.constexpr):
    """Initialise the barriers with their arrival counts, of `full` and of `empty`.  In `states` and
    `part_states` every thread arrives, in other roles one thread.

    SECOND_PASS: whether the program is one of `_hopper_kernel`; otherwise it is one of
        `_parts_kernel`, in which the lanes also compute the updates, and there are no outputs

    Only barriers that the roles use are initialised.  Triton may place the arguments of the roles
    in the memory of an idle barrier, and PTX forbids another use of that memory before
    mbarrier.inval.
    """
    begin_ring(rings.values, 1, STATE_THREADS)
    if SECOND_PASS:
        for lane in gl.static_range(2):
            mbarrier.init(rings.turns.index(lane), count=STATE_THREADS // 2)
        # `loads` and `gates` fill the ring; `states` and `scores` empty it
        begin_ring(rings.keys, 2, STATE_THREADS + 1)
        begin_ring(rings.queries, 1, STATE_THREADS + 1)
        begin_ring(rings.inverses, 1, 1)
        begin_ring(rings.updates, 1, STATE_THREADS)
        begin_ring(rings.weights, 1, STATE_THREADS)
        begin_ring(rings.outputs, STATE_THREADS, 1)
    else:
        begin_ring(rings.keys, 2, STATE_THREADS)
        begin_ring(rings.inverses, 1, STATE_THREADS)
        begin_ring(rings.updates, STATE_THREADS, STATE_THREADS)
