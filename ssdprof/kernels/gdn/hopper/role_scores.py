"""Role `scores`: computes from a chunk's inverse the update X of the state and the weights W of the
output.

With B_ij = e_i A_ij beta_j as `prep_kernel.py` stores it, and log2 decays G_i since the chunk's
start,

    X_j  = 2^(G_end - G_j) (B^T K)_j                        (j, K)
    W_ij = scale / |q_i| 2^(G_i - G_j) (tril(Q K^T) B)_ij   (i, j), lower triangular

so that decays multiply products whose operands have none.  |q_i| is 1 if the call does not
normalise q.  X is computed first, because the state waits for it.  Before Q K^T is rounded to fp16,
its rows are multiplied by 2^UP scale / |q_i|, because the products of long or short q may be
outside fp16's range; the decays that follow are then 2^(G_i - UP - G_j).

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

# log2 of a further factor of the rows of Q K^T in fp16, which W does not keep.  With a scale of
# 128^-1/2 the whole factor is 1.4 / |q_i|, so that the scores of a key are at most 1.4 |k_j| if the
# call normalises q.
UP = gl.constexpr(4.0)
COLUMN_BLOCKS = gl.constexpr(2)  # X is computed in so many blocks of columns, to limit registers

# stages of functions and of waits: `stalls/attribute.py`
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
    """Compute X (j, K) of the program's n-th chunk, and store it in the ring `updates`."""
    WIDTH: gl.constexpr = DIM // COLUMN_BLOCKS
    layout: gl.constexpr = product_layout(WIDTH, 4)
    rings.keys.wait_full(n)  # for k from `loads` and all vectors from `gates`
    rings.inverses.wait_full(n)
    k, inverse, X = rings.keys.tile(n), rings.inverses.tile(n), rings.updates.tile(n)
    # the product of a block of columns runs while the block before it is stored
    begun = begin_product(inverse, k.slice(0, WIDTH, dim=1), layout)
    to_end = rings.vector(n, TO_END).load(gl.SliceLayout(1, layout))
    rings.updates.wait_empty(n)
    for block in gl.static_range(COLUMN_BLOCKS):
        product = warpgroup_mma_wait(0, deps=[begun])
        X.slice(block * WIDTH, WIDTH, dim=1).store((product * to_end[:, None]).to(X.dtype))
        if block + 1 < COLUMN_BLOCKS:
            begun = begin_product(inverse, k.slice((block + 1) * WIDTH, WIDTH, dim=1), layout)
    fence_async_shared()  # makes the stores visible to the asynchronous products that read X
    mbarrier.arrive(rings.updates.full_at(n), count=1)


@gluon.jit
def weights_of(rings, n, m, lower):
    """Compute W (i, j) of the program's n-th chunk, the m-th of the second pass, and store it in
    the ring `weights`.  `update_of` has waited for the chunk's keys, inverse and vectors.

    lower: (i, j) int16, all bits set on and below the diagonal, none above it
    """
    layout: gl.constexpr = product_layout(CHUNK, 4)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    rings.queries.wait_full(m)
    k, inverse = rings.keys.tile(n), rings.inverses.tile(n)
    q, W = rings.queries.tile(m), rings.weights.tile(m)
    # P, the lower triangle of Q K^T, as an operand in registers
    QK = warpgroup_mma_wait(0, deps=[begin_product(q, k.permute((1, 0)), layout)])
    if q.dtype == gl.float16:
        # ROW - COLUMN is log2(scale / |q_i|).  P gets this factor and 2^UP, and the decays get the
        # rest of the row's factors: G_i - UP.
        row_log2 = rings.vector(n, COLUMN).load(rows) - UP
        QK *= gl.exp2(rings.vector(n, ROW).load(rows) - row_log2)[:, None]
    P = gl.convert_layout(masked(QK.to(q.dtype), lower), gl.DotOperandLayout(0, layout, 2))
    # the product with the inverse, and the decays between positions
    begun = begin_product(P, inverse.permute((1, 0)), layout)
    row, column = rings.vector(n, ROW).load(rows), rings.vector(n, COLUMN).load(columns)
    if q.dtype == gl.float16:
        row = row_log2  # P has the other factors of the row already
    decay = gl.exp2(row[:, None] - column[None, :])
    product = warpgroup_mma_wait(0, deps=[begun])
    rings.weights.wait_empty(m)
    # mask last: products above the diagonal may overflow
    W.store(masked((product * decay).to(W.dtype), lower))
    fence_async_shared()  # as in `update_of`
    mbarrier.arrive(rings.weights.full_at(m), count=1)


@gluon.jit
def scores(env):
    """Role: compute X of every chunk, and W of those of the second pass."""
    rings = env.rings
    layout: gl.constexpr = product_layout(CHUNK, 4)
    o_i, o_j = tile_indices(CHUNK, CHUNK, layout)
    lower = gl.where(o_i[:, None] >= o_j[None, :], -1, 0).to(gl.int16)
    for i_segment in range(env.work.segments()):
        segment, n = env.work.segment_at(i_segment)
        for j in range(segment.warmup):
            update_of(rings, n + j)
            mbarrier.arrive(rings.inverses.empty_at(n + j), count=1)
            mbarrier.arrive(rings.keys.empty_at(n + j), count=1)
        # The m-th chunk of the second pass.  The program had n chunks before this segment, all of
        # them in the second pass: a program with several segments has no first pass.
        for m in range(n, n + segment.nchunks):
            update_of(rings, m + segment.warmup)
            weights_of(rings, m + segment.warmup, m, lower)
            mbarrier.arrive(rings.inverses.empty_at(m + segment.warmup), count=1)
            mbarrier.arrive(rings.keys.empty_at(m + segment.warmup), count=1)
            mbarrier.arrive(rings.queries.empty_at(m), count=1)
