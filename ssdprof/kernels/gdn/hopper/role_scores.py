"""Role `scores`: computes from a chunk's inverse the update X of the state and the weights W of the
output.

With B_ij = e_i A_ij beta_j as `prep_kernel.py` stores it, and log2 decays G_i since the chunk's
start,

    X_j  = 2^(G_end - G_j) (B^T K)_j                        (j, K)
    W_ij = scale / |q_i| 2^(G_i - G_j) (tril(Q K^T) B)_ij   (i, j), lower triangular

so that decays multiply products whose operands have none.  X is computed first, because the state
waits for it.  Before Q K^T is rounded to fp16, its rows are multiplied by scale / |q_i|, lest long
or short q leave fp16's range.
Shared memory: `rings.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from ssdprof.kernels._gluon import begin_product, masked, product_layout, tile_indices
from ssdprof.kernels.gdn.hopper.rings import COLUMN, DIM, ROW, TO_END
from ssdprof.kernels.hopper.ring import CHUNK

UP = gl.constexpr(4.0)  # log2 of a factor of fp16 scores, which are about |k_j| then
PARTS = gl.constexpr(2)  # X is computed in this many column blocks, to limit registers

STAGES = {"update_of": "state_factor", "weights_of": "out_factor", "scores": "out_factor"}
WAITS = {
    "keys": "waiting.chunk",
    "inverses": "waiting.inverse",
    "queries": "waiting.chunk",
    "updates": "ahead",
    "weights": "ahead",
}


@gluon.jit
def update_of(rings, n):
    """Compute X of the program's n-th chunk."""
    WIDTH: gl.constexpr = DIM // PARTS
    layout: gl.constexpr = product_layout(WIDTH, 4)
    rings.keys.wait_full(n)
    rings.inverses.wait_full(n)
    k, inverse, X = rings.keys.tile(n), rings.inverses.tile(n), rings.updates.tile(n)
    begun = begin_product(inverse, k.slice(0, WIDTH, dim=1), layout)
    to_end = rings.vector(n, TO_END).load(gl.SliceLayout(1, layout))
    rings.updates.wait_empty(n)
    for p in gl.static_range(PARTS):
        part = warpgroup_mma_wait(0, deps=[begun])
        X.slice(p * WIDTH, WIDTH, dim=1).store((part * to_end[:, None]).to(X.dtype))
        if p + 1 < PARTS:
            begun = begin_product(inverse, k.slice((p + 1) * WIDTH, WIDTH, dim=1), layout)
    fence_async_shared()
    mbarrier.arrive(rings.updates.full_at(n), count=1)


@gluon.jit
def weights_of(rings, n, m, lower):
    """Compute W of the program's n-th chunk, the m-th of the second pass."""
    layout: gl.constexpr = product_layout(CHUNK, 4)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    rings.queries.wait_full(m)
    k, inverse = rings.keys.tile(n), rings.inverses.tile(n)
    q, W = rings.queries.tile(m), rings.weights.tile(m)
    QK = warpgroup_mma_wait(0, deps=[begin_product(q, k.permute((1, 0)), layout)])
    if q.dtype == gl.float16:
        G = rings.vector(n, COLUMN).load(rows) - UP
        QK *= gl.exp2(rings.vector(n, ROW).load(rows) - G)[:, None]
    P = gl.convert_layout(masked(QK.to(q.dtype), lower), gl.DotOperandLayout(0, layout, 2))
    begun = begin_product(P, inverse.permute((1, 0)), layout)
    row, column = rings.vector(n, ROW).load(rows), rings.vector(n, COLUMN).load(columns)
    if q.dtype == gl.float16:
        row = G
    decay = gl.exp2(row[:, None] - column[None, :])
    product = warpgroup_mma_wait(0, deps=[begun])
    rings.weights.wait_empty(m)
    # mask last: products above the diagonal may overflow
    W.store(masked((product * decay).to(W.dtype), lower))
    fence_async_shared()
    mbarrier.arrive(rings.weights.full_at(m), count=1)


@gluon.jit
def scores(env):
    """Role: compute X of every chunk, and W of those whose output is wanted."""
    rings = env.rings
    layout: gl.constexpr = product_layout(CHUNK, 4)
    o_i, o_j = tile_indices(CHUNK, CHUNK, layout)
    lower = gl.where(o_i[:, None] >= o_j[None, :], -1, 0).to(gl.int16)
    for k in range(env.work.segments()):
        segment, n = env.work.segment_at(k)
        for j in range(segment.back):
            update_of(rings, n + j)
            mbarrier.arrive(rings.inverses.empty_at(n + j), count=1)
            mbarrier.arrive(rings.keys.empty_at(n + j), count=1)
        for m in range(n, n + segment.nchunks):
            update_of(rings, m + segment.back)
            weights_of(rings, m + segment.back, m, lower)
            mbarrier.arrive(rings.inverses.empty_at(m + segment.back), count=1)
            mbarrier.arrive(rings.keys.empty_at(m + segment.back), count=1)
            mbarrier.arrive(rings.queries.empty_at(m), count=1)
