"""Role `gates`: computes each chunk's vectors of decays from the sums that `prep_kernel.py` has
stored.  Shared memory: `rings.py`, which also says what each vector holds.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ssdprof.kernels._gluon import add
from ssdprof.kernels.gdn.hopper.rings import COLUMN, DECAY, FROM_STATE, ROW, TO_END, TO_OUTPUT
from ssdprof.kernels.hopper.ring import CHUNK

LOG2_E = gl.constexpr(1.4426950408889634)
LEAST = gl.constexpr(-150.0)  # least log2 of a decay: 2^LEAST rounds to 0 in fp32

# stages of functions and of waits: `stalls/attribute.py`
STAGES = {
    "log2_decays": "gate_cumsum",
    "sums": "gate_cumsum",
    "store_vectors": "gate_cumsum",
    "chunk_gates": "gate_cumsum",
    "gates": "gate_cumsum",
}
WAITS = {"keys": "ahead"}


@gluon.jit
def minimum(a, b):
    """Minimum of a and b; NaN if b is NaN.  `gl.minimum` would ignore a NaN.  A NaN of a is ignored
    here, too: in `sums`, where a is NaN, the later sum b is NaN as well.
    """
    return gl.where(b > a, a, b)


@gluon.jit
def log2_decays(g):
    """Convert natural logarithms to log2, clamped between LEAST and 0; NaN stays NaN."""
    g = gl.where(g > 0.0, 0.0, g.to(gl.float32) * LOG2_E)
    return gl.where(g < LEAST, LEAST, g)


@gluon.jit
def sums(g, AXIS: gl.constexpr):
    """Cumulative sums of g <= 0 along AXIS, made non-increasing, because the rounding of a parallel
    scan could make a sum rise.
    """
    return gl.associative_scan(gl.associative_scan(g, AXIS, add), AXIS, minimum)


@gluon.jit
def store_vectors(rings, n, G, G_end, to_output, layout: gl.constexpr):
    """Store all vectors of decays of the program's n-th chunk except FROM_STATE.

    G: log2 decays since the chunk's start (CHUNK), in `layout`.  G_end: that of the whole chunk.
    to_output: scale / |q_i| (CHUNK), or the scale as a scalar if q is not normalised
    """
    rings.vector(n, TO_OUTPUT).store(gl.exp2(G) * to_output)
    rings.vector(n, ROW).store(G + gl.log2(gl.to_tensor(to_output)))
    rings.vector(n, COLUMN).store(G)
    rings.vector(n, TO_END).store(gl.exp2(G_end - G))
    rings.vector(n, DECAY).store(gl.exp2(G_end + gl.full([CHUNK], 0.0, gl.float32, layout)))


@gluon.jit
def chunk_gates(env, segment, j, n):
    """Compute the vectors of the segment's j-th chunk, counted over both passes, which is the
    program's n-th.
    """
    rings = env.rings
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [2], [0])
    o_i = gl.arange(0, CHUNK, layout)
    # sums of g; the tensor `norms` holds the reciprocals of the norms of k and q
    slot = (segment.sequence.slot + segment.first - segment.warmup + j).to(gl.int64)
    row = env.decays_ptr + (slot * env.S.HEADS + segment.head) * CHUNK
    G, G_end = gl.load(row + o_i), gl.load(row + CHUNK - 1)
    from_state, to_output = gl.exp2(G), env.scale
    if env.norms_ptr is not None:
        key_head = segment.head // env.S.GROUP
        norms = env.norms_ptr + (slot * env.S.KEY_HEADS + key_head) * (2 * CHUNK) + o_i
        to_output = env.scale * gl.load(norms + CHUNK)
        key_factor = gl.load(norms)
    rings.keys.wait_empty(n)
    store_vectors(rings, n, G, G_end, to_output, layout)
    if env.norms_ptr is not None:
        from_state *= key_factor
    rings.vector(n, FROM_STATE).store(from_state)
    mbarrier.arrive(rings.keys.full_at(n), count=1)


@gluon.jit
def gates(env):
    """Role: compute the vectors of all chunks of both passes."""
    for i_segment in range(env.work.segments()):
        segment, n = env.work.segment_at(i_segment)
        for j in range(segment.warmup + segment.nchunks):
            chunk_gates(env, segment, j, n + j)
