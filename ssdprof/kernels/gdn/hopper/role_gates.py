# mypy: ignore-errors
"""Role `gates`: computes each chunk's vectors of decays.  Shared memory: `rings.py`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ssdprof.kernels.gdn.hopper.decays import log2_decays, sums
from ssdprof.kernels.gdn.hopper.rings import BETA, CHUNK, COLUMN, DECAY, FROM_STATE, ROW, TO_END, TO_OUTPUT

STAGES = {
    "store_decays": "gate_cumsum",
    "chunk_gates": "gate_cumsum",
    "gates": "gate_cumsum",
    "load_gates": "gate_cumsum",
    "gates_of_inputs": "gate_cumsum",
}
WAITS = {"keys": "ahead"}


@gluon.jit
def store_decays(rings, n, G, G_end, to_output, layout: gl.constexpr):
    """Store all vectors of decays except FROM_STATE."""
    rings.vector(n, TO_OUTPUT).store(gl.exp2(G) * to_output)
    rings.vector(n, ROW).store(G + gl.log2(gl.to_tensor(to_output)))
    rings.vector(n, COLUMN).store(G)
    rings.vector(n, TO_END).store(gl.exp2(G_end - G))
    rings.vector(n, DECAY).store(gl.exp2(G_end + gl.full([CHUNK], 0.0, gl.float32, layout)))


@gluon.jit
def chunk_gates(
    rings, segment, j, n, decays_ptr, norms_ptr, scale, HEADS: gl.constexpr, KEY_HEADS: gl.constexpr
):  # fmt: skip
    """Compute the vectors of the segment's j-th chunk, counted over both passes, which is the program's n-th."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [2], [0])
    o_i = gl.arange(0, CHUNK, layout)
    slot = (segment.sequence.slot + segment.first - segment.back + j).to(gl.int64)
    row = decays_ptr + (slot * HEADS + segment.head) * CHUNK
    G, G_end = gl.load(row + o_i), gl.load(row + CHUNK - 1)
    from_state, to_output = gl.exp2(G), scale
    if norms_ptr is not None:
        norms = norms_ptr + (slot * KEY_HEADS + segment.head // (HEADS // KEY_HEADS)) * (2 * CHUNK) + o_i
        to_output = scale * gl.load(norms + CHUNK)
        key_norm = gl.load(norms)
    rings.keys.wait_empty(n)
    store_decays(rings, n, G, G_end, to_output, layout)
    if norms_ptr is not None:
        from_state *= key_norm
    rings.vector(n, FROM_STATE).store(from_state)
    mbarrier.arrive(rings.keys.full_at(n), count=1)


@gluon.jit
def gates(rings, work, decays_ptr, norms_ptr, scale, HEADS: gl.constexpr, KEY_HEADS: gl.constexpr):
    for k in range(work.segments()):
        segment, n = work.segment_at(k)
        for j in range(segment.back + segment.nchunks):
            chunk_gates(rings, segment, j, n + j, decays_ptr, norms_ptr, scale, HEADS, KEY_HEADS)


@gluon.jit
def load_gates(work, n, inputs, PACKED: gl.constexpr, layout: gl.constexpr):
    """g and beta of the program's n-th chunk; zeros if it does not exist, and beyond the sequence's end."""
    g_ptr, beta_ptr, g_strides, beta_strides = inputs
    segment, chunk = work.chunk_at(n)
    o_i = gl.arange(0, CHUNK, layout)
    t = chunk * CHUNK + o_i
    inside = (t < segment.sequence.length) & (n < work.chunks())
    sequence, head = segment.sequence, segment.head.to(gl.int64)
    position = (sequence.begin + t).to(gl.int64)
    batch = gl.where(PACKED, 0, sequence.index).to(gl.int64)
    g_at = batch * g_strides[0] + head * g_strides[2] + position * g_strides[1]
    beta_at = batch * beta_strides[0] + head * beta_strides[2] + position * beta_strides[1]
    g = gl.load(g_ptr + g_at, mask=inside, other=0.0)
    beta = gl.load(beta_ptr + beta_at, mask=inside, other=0.0)
    return g.to(gl.float32), beta.to(gl.float32)


@gluon.jit
def gates_of_inputs(rings, work, inputs, scale, PACKED: gl.constexpr):
    """Compute the vectors of all chunks, and beta, from the gates themselves.  Loads are one chunk ahead.

    Used without a launch of `prep_kernel.py`, which sums the gates otherwise.
    """
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    o_i = gl.arange(0, CHUNK, layout)
    g, beta = load_gates(work, gl.to_tensor(0), inputs, PACKED, layout)
    for n in range(work.chunks()):
        next_g, next_beta = load_gates(work, n + 1, inputs, PACKED, layout)
        G = sums(log2_decays(g), 0)
        G_end = gl.sum(gl.where(o_i == CHUNK - 1, G, 0.0), 0)
        rings.keys.wait_empty(n)
        store_decays(rings, n, G, G_end, scale, layout)
        rings.vector(n, FROM_STATE).store(gl.exp2(G))
        rings.vector(n, BETA).store(beta)
        mbarrier.arrive(rings.keys.full_at(n), count=1)
        g, beta = next_g, next_beta
