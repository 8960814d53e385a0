# mypy: ignore-errors
"""Role `scores`: computes each chunk's scores, C B^T times decays.  In the first pass it computes the gates instead.

Shared memory: `rings.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ssdprof.kernels._gluon import masked, phase, place_in, product_layout
from ssdprof.kernels.hopper.ring import CHUNK
from ssdprof.kernels.ssd.hopper.rings import KEY, ROW, lane_of, places_of, rows_of
from ssdprof.kernels.ssd.hopper.role_gates import exp2_approx, first_pass_gates

STAGES = {
    "decayed": "chunk_scan.current", "bmm_chunk": "bmm_chunk", "decayed_scores": "bmm_chunk", "scores": "bmm_chunk",
}  # fmt: skip
# Stage of a wait at each barrier, in this role or another.  A role that waits for a free slot is ahead of the others.
WAITS = {"full": "waiting.chunk", "scored": "waiting.scores", "empty": "ahead", "unscored": "ahead"}


@gluon.jit
def decayed(CB, row, key, causal, RELAXED: gl.constexpr, dtype: gl.constexpr):
    """CB * 2^(a_q - a_s) * dt_s where s <= q, else 0.  causal: all bits set where s <= q, else none"""
    decay = exp2_approx(row[:, None] - key[None, :])
    scores = CB.to(dtype) * decay.to(dtype) if RELAXED else (CB * decay).to(dtype)
    return masked(scores, causal)  # mask last: products above the diagonal may overflow


@gluon.jit
def bmm_chunk(shared, seen, n):
    """Start C B^T of the n-th chunk asynchronously."""
    B, C, _ = places_of(shared, seen, n)
    CB = gl.full([CHUNK, CHUNK], 0.0, gl.float32, product_layout(CHUNK, 4))
    for k in gl.static_range(shared.N_SPLIT):
        B_t = rows_of(shared, B, k).permute((1, 0))
        CB = warpgroup_mma(rows_of(shared, C, k), B_t, CB, use_acc=k > 0, is_async=True)
    return CB


@gluon.jit
def decayed_scores(env, seen, n, causal):
    """Compute the scores of the n-th chunk for all units.  Vectors of gates are loaded while the product runs."""
    shared = env.shared
    RELAXED: gl.constexpr = env.S.RELAXED
    layout: gl.constexpr = product_layout(CHUNK, 4)
    row: gl.constexpr = gl.SliceLayout(1, layout)
    col: gl.constexpr = gl.SliceLayout(0, layout)
    dtype: gl.constexpr = shared.scores.dtype
    slot, stage = place_in(n, shared.DEPTH), place_in(n, shared.SCORE_DEPTH)
    mbarrier.wait(shared.full.index(slot), phase(n, shared.DEPTH))
    CB_begun = bmm_chunk(shared, seen, n)
    row_0 = lane_of(shared.gates, slot * 4 + ROW, 0).load(row)
    key_0 = lane_of(shared.gates, slot * 4 + KEY, 0).load(col)
    if shared.UNITS == 2:
        row_1 = lane_of(shared.gates, slot * 4 + ROW, 1).load(row)
    CB = warpgroup_mma_wait(0, deps=[CB_begun])
    # stage chunk_scan.current: the decayed scores
    m = decayed(CB, row_0, key_0, causal, RELAXED, dtype)
    if shared.UNITS == 2:
        key_1 = lane_of(shared.gates, slot * 4 + KEY, 1).load(col)
    mbarrier.wait(shared.unscored.index(stage), phase(n, shared.SCORE_DEPTH) ^ 1)
    if shared.UNITS == 2:
        shared.scores.index(stage * 2).store(m)
        m = decayed(CB, row_1, key_1, causal, RELAXED, dtype)
    mbarrier.arrive(shared.empty.index(slot), count=1)
    shared.scores.index(stage * shared.UNITS + shared.UNITS - 1).store(m)
    fence_async_shared()
    mbarrier.arrive(shared.scored.index(stage), count=1)


@gluon.jit
def scores(env):
    layout: gl.constexpr = product_layout(CHUNK, 4)
    segment, _ = env.work.segment_at(0)
    seen = 0
    if segment.has_warmup:
        seen = first_pass_gates(env, segment)
    o_q, o_s = gl.arange(0, CHUNK, gl.SliceLayout(1, layout)), gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    causal = gl.where(o_q[:, None] >= o_s[None, :], -1, 0).to(gl.int16)
    for n in range(env.work.chunks()):
        decayed_scores(env, seen, n, causal)
