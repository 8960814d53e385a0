# mypy: ignore-errors
"""The role that makes a chunk's vectors of decays.  What the roles share: `rings.py`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ssdprof.kernels.gdn.hopper.rings import CHUNK, COLUMN, DECAY, FROM_STATE, ROW, TO_END, TO_OUTPUT

STAGES = {"chunk_gates": "gate_cumsum", "gates": "gate_cumsum"}
WAITS = {"keys": "ahead"}


@gluon.jit
def chunk_gates(
    rings, segment, j, n, decays_ptr, norms_ptr, scale, HEADS: gl.constexpr, KEY_HEADS: gl.constexpr
):  # fmt: skip
    """The vectors of the j-th chunk of both passes, the program's n-th."""
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
    rings.vector(n, TO_OUTPUT).store(from_state * to_output)
    rings.vector(n, ROW).store(G + gl.log2(gl.to_tensor(to_output)))
    rings.vector(n, COLUMN).store(G)
    rings.vector(n, TO_END).store(gl.exp2(G_end - G))
    rings.vector(n, DECAY).store(gl.exp2(G_end + gl.full([CHUNK], 0.0, gl.float32, layout)))
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
