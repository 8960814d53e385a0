# mypy: ignore-errors
"""The roles that prepare a chunk: its gates, its B, C and x, and its scores.  What they share: `hopper_shared.py`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ssdprof.kernels.ssd.hopper_shared import (
    CHUNK,
    ENTERING,
    KEY,
    ROW,
    SLICE,
    WEIGHT,
    async_load,
    load_gate,
    role_barrier,
    scalar,
)

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
FORGOTTEN = gl.constexpr(-160.0)  # 2^-160 is zero in fp32, with room for rounding: the least positive one is 2^-149

STAGES = {
    "_add": "caller",
    "exp2_approx": "caller",
    "log2_approx": "chunk_cumsum",
    "softplus": "chunk_cumsum",
    "chunk_cumsum": "chunk_cumsum",
    "decay_exp2": "chunk_cumsum",
    "put": "chunk_cumsum",
    "rates_of": "chunk_cumsum",
    "release": "chunk_cumsum",
    "first_pass_gates": "chunk_cumsum",
    "follow_first_pass": "chunk_cumsum",
    "gates": "chunk_cumsum",
    "load_x": "loads",
    "load_rows": "loads",
    "loads": "loads",
    "decayed": "chunk_scan.current",
    "clear_rows": "bmm_chunk",
    "bmm_chunk": "bmm_chunk",
    "scores": "bmm_chunk",
}
# What is waited for at a barrier.  Those that wait for a free place are ahead of the others.
WAITS = {
    "full": "waiting.chunk",
    "scored": "waiting.scores",
    "told": "waiting.gates",
    "empty": "ahead",
    "unscored": "ahead",
}


# --- gates


@gluon.jit
def _add(a, b):
    return a + b


# --- gates


@gluon.jit
def exp2_approx(v):
    """The instruction that `gl.exp2` becomes once Triton has linked CUDA's library of functions, which takes long."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [v], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def log2_approx(v):
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [v], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def softplus(v):
    """log(1 + e^v) with a relative error below 3e-6: by its series where e^v is small and 1 + e^v would round."""
    e = exp2_approx(v * LOG2_E)
    series = e * (1.0 + e * (-0.5 + e * (0.33333333333 + e * (-0.25 + e * (0.2 - e * 0.16666666667)))))
    return gl.where(v > 20.0, v, gl.where(e < 0.0625, series, log2_approx(1.0 + e) * LN_2))


@gluon.jit
def chunk_cumsum(raw, dt_bias, A, low, high, valid, DT_SOFTPLUS: gl.constexpr):
    """dt (q, lane), a (q, lane) and a_end (lane).  NaN stays NaN."""
    v = raw.to(gl.float32) + dt_bias[None, :]
    if DT_SOFTPLUS:
        v = softplus(v)
    dt = gl.where(v == v, gl.minimum(gl.maximum(v, low), high), v)
    dt = gl.where(valid, dt, 0.0)
    dA = dt * A[None, :]
    # below FORGOTTEN a step decays to zero all the same, and would cost the differences after it their digits
    dA = gl.where(dA == dA, gl.maximum(gl.minimum(dA, 0.0), FORGOTTEN), dA)
    return dt, gl.associative_scan(dA, 0, _add), gl.sum(dA, 0)


@gluon.jit
def decay_exp2(log2_decay):
    """2^log2_decay, at most 1: rounding of a difference of sums cannot push it past.  NaN stays NaN."""
    return exp2_approx(gl.where(log2_decay > 0.0, 0.0, log2_decay))


@gluon.jit
def put(shared, slot, vector: gl.constexpr, v):
    """v (q, lane) into a vector of the ring."""
    shared.gates.index(slot * 4 + vector).store(gl.permute(v, (1, 0)).reshape([2 * CHUNK]))


@gluon.jit
def rates_of(shared, segment, rates, SLICES: gl.constexpr, layout: gl.constexpr):
    """A log2(e) and dt_bias (lane), dt's row at the sequence's begin, and the offsets of a chunk in it (q, lane)."""
    dt_ptr, A_ptr, dt_bias_ptr, dt_strides, A_strides, dt_bias_strides = rates
    o_h = (segment.unit + gl.arange(0, 2, gl.SliceLayout(0, layout)) // shared.HALVES) // SLICES
    A = gl.load(A_ptr + o_h * A_strides[0]).to(gl.float32) * LOG2_E
    dt_bias = gl.zeros_like(A)
    if dt_bias_ptr is not None:
        dt_bias = gl.load(dt_bias_ptr + o_h * dt_bias_strides[0]).to(gl.float32)
    o_q = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    tile = (o_q[:, None] * dt_strides[0] + (o_h * dt_strides[1])[None, :]).to(gl.int32)
    return A, dt_bias, dt_ptr + segment.begin.to(gl.int64) * dt_strides[0], tile, dt_strides[0]


@gluon.jit
def release(shared, it, pred):
    """Let go of chunk `it` of the first pass, once it has arrived."""
    mbarrier.wait(shared.full.index(it % shared.RING), (it // shared.RING) & 1, pred=pred)
    mbarrier.arrive(shared.empty.index(it % shared.RING), count=1, pred=pred)


@gluon.jit
def first_pass_gates(shared, segment, rates, low, high, SLICES: gl.constexpr, DT_SOFTPLUS: gl.constexpr):
    """Weights of the chunks that the first pass reads, from its end backwards.  Returns how many it reads.

    It lets go of chunks like the others, one behind, so that it has seen every turn of the ring (`hopper_shared.py`).
    """
    # (q, lane): a warp for each lane, and the other two do the same again
    layout: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    A, dt_bias, dt_ptr, tile, dt_stride = rates_of(shared, segment, rates, SLICES, layout)
    seen = gl.zeros([2], gl.float32, gl.SliceLayout(0, layout))  # log2 of the decay of all chunks that were seen
    c = segment.seen - 1
    p = dt_ptr + ((segment.seen_first + c) * CHUNK).to(gl.int64) * dt_stride
    raw = gl.load(p + tile)
    it = 0
    go = True
    while go:
        slot = it % shared.RING
        c -= 1
        p -= CHUNK * dt_stride
        ahead = gl.load(p + tile, mask=(c >= 0) & (tile >= 0), other=0.0)
        dt, a, a_end = chunk_cumsum(raw, dt_bias, A, low, high, tile >= 0, DT_SOFTPLUS)
        raw = ahead
        weight = decay_exp2(a_end[None, :] - a) * exp2_approx(seen)[None, :] * dt
        seen += a_end
        go = (c >= 0) & (gl.max(seen, 0) > FORGOTTEN)
        shared.goes_on.index(it % shared.TOLD).store(gl.full([1], go.to(gl.int32), gl.int32, one))
        mbarrier.arrive(shared.told.index(it % shared.TOLD), count=1)
        mbarrier.wait(shared.empty.index(slot), ((it // shared.RING) & 1) ^ 1)
        put(shared, slot, WEIGHT, weight)
        shared.decay.index(slot).store(exp2_approx(seen))
        mbarrier.arrive(shared.full.index(slot), count=1)
        release(shared, it - 1, it > 0)
        it += 1
    release(shared, it - 1, it > 0)
    return it


@gluon.jit
def follow_first_pass(shared):
    """Nothing to do in the first pass but to let go of what was loaded.  Returns how many chunks it read."""
    it = 0
    go = True
    while go:
        mbarrier.wait(shared.full.index(it % shared.RING), (it // shared.RING) & 1)
        go = scalar(shared.goes_on.index(it % shared.TOLD)) != 0
        mbarrier.arrive(shared.empty.index(it % shared.RING), count=1)
        it += 1
    return it


@gluon.jit
def gates(shared, segment, rates, low, high, SLICES: gl.constexpr, DT_SOFTPLUS: gl.constexpr):
    """Gates of the second pass.  Those of the first are made by `scores`, which has nothing else to do then."""
    layout: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 2], [0, 1])  # (q, lane): a warp for each lane
    A, dt_bias, dt_ptr, tile, dt_stride = rates_of(shared, segment, rates, SLICES, layout)
    o_q = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    it = 0
    if segment.goes_back:
        it = follow_first_pass(shared)
    t = segment.first * CHUNK
    raw = gl.load(dt_ptr + t.to(gl.int64) * dt_stride + tile, mask=(t + o_q < segment.length)[:, None], other=0.0)
    for _ in range(segment.nchunks):
        slot = it % shared.RING
        valid = (t + o_q < segment.length)[:, None]
        dt, a, a_end = chunk_cumsum(raw, dt_bias, A, low, high, valid, DT_SOFTPLUS)
        t += CHUNK
        raw = gl.load(dt_ptr + t.to(gl.int64) * dt_stride + tile, mask=(t + o_q < segment.length)[:, None], other=0.0)
        weight = decay_exp2(a_end[None, :] - a) * dt
        key = a - log2_approx(dt)
        entering = exp2_approx(a)
        decay = exp2_approx(a_end)
        mbarrier.wait(shared.empty.index(slot), ((it // shared.RING) & 1) ^ 1)
        put(shared, slot, ROW, a)
        put(shared, slot, KEY, key)
        put(shared, slot, WEIGHT, weight)
        put(shared, slot, ENTERING, entering)
        shared.decay.index(slot).store(decay)
        mbarrier.arrive(shared.full.index(slot), count=1)
        it += 1


# --- loads


@gluon.jit
def load_x(shared, segment, slot, t, x_desc, SLICES: gl.constexpr):
    for k in gl.static_range(shared.UNITS):
        unit = segment.unit + k
        x = shared.x.index(slot * shared.UNITS + k)
        async_load(x_desc, [t, unit // SLICES, unit % SLICES * SLICE], shared.full.index(slot), x)


@gluon.jit
def load_rows(shared, slot, t, desc, first_column, ring):
    """B or C, in tiles of (q, half of N)."""
    WIDTH: gl.constexpr = ring.shape[2]
    for k in gl.static_range(shared.HALVES):
        tile = ring.index(slot * shared.HALVES + k)
        async_load(desc, [t, first_column + k * WIDTH], shared.full.index(slot), tile)


@gluon.jit
def loads(
    shared, segment, x_desc, B_desc, C_desc,
    DSTATE: gl.constexpr, SLICES: gl.constexpr, HEADS_PER_GROUP: gl.constexpr,
):  # fmt: skip
    B_BYTES: gl.constexpr = CHUNK * DSTATE * 2
    X_BYTES: gl.constexpr = shared.UNITS * CHUNK * SLICE * 2
    first_column = segment.unit // SLICES // HEADS_PER_GROUP * DSTATE
    it = 0
    if segment.goes_back:
        t = segment.begin + (segment.seen_first + segment.seen - 1) * CHUNK
        go = segment.seen > 0
        while go:
            slot = it % shared.RING
            mbarrier.wait(shared.empty.index(slot), ((it // shared.RING) & 1) ^ 1)
            mbarrier.expect(shared.full.index(slot), B_BYTES + X_BYTES)
            load_rows(shared, slot, t, B_desc, first_column, shared.B)
            load_x(shared, segment, slot, t, x_desc, SLICES)
            mbarrier.wait(shared.told.index(it % shared.TOLD), (it // shared.TOLD) & 1)
            go = scalar(shared.goes_on.index(it % shared.TOLD)) != 0
            t -= CHUNK
            it += 1
    for c in range(segment.nchunks):
        slot = it % shared.RING
        t = segment.begin + (segment.first + c) * CHUNK
        mbarrier.wait(shared.empty.index(slot), ((it // shared.RING) & 1) ^ 1)
        mbarrier.expect(shared.full.index(slot), 2 * B_BYTES + X_BYTES)
        load_rows(shared, slot, t, B_desc, first_column, shared.B)
        load_x(shared, segment, slot, t, x_desc, SLICES)
        load_rows(shared, slot, t, C_desc, first_column, shared.C)
        it += 1


# --- scores


@gluon.jit
def decayed(CB, row, key, causal, RELAXED: gl.constexpr, dtype: gl.constexpr):
    """CB * 2^(a_q - a_s) * dt_s where s <= q, else 0; `causal` has all bits set there, and none elsewhere."""
    decay = exp2_approx(row[:, None] - key[None, :])
    scores = CB.to(dtype) * decay.to(dtype) if RELAXED else (CB * decay).to(dtype)
    # two at a time, and after all that may overflow above the diagonal
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, $2;", "=r,r,r", [scores, causal], dtype=scores.dtype, is_pure=True, pack=2
    )


@gluon.jit
def clear_rows(buffer, valid, WIDTH: gl.constexpr):
    """Zero the rows from `valid` on: they are another sequence's, and 0 * NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    tile = buffer.load(layout)
    o_q = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))[:, None]
    buffer.store(gl.where(o_q < valid, tile, gl.zeros_like(tile)))
    fence_async_shared()
    role_barrier()


@gluon.jit
def bmm_chunk(shared, slot, zero):
    """C B^T of the chunk in `slot`, begun."""
    HALVES: gl.constexpr = shared.HALVES
    CB = zero
    for k in gl.static_range(HALVES):
        C, B = shared.C.index(slot * HALVES + k), shared.B.index(slot * HALVES + k)
        CB = warpgroup_mma(C, B.permute((1, 0)), CB, use_acc=k > 0, is_async=True)
    return CB


@gluon.jit
def scores(
    shared, segment, rates, low, high,
    SLICES: gl.constexpr, DT_SOFTPLUS: gl.constexpr, RELAXED: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    row: gl.constexpr = gl.SliceLayout(1, layout)
    col: gl.constexpr = gl.SliceLayout(0, layout)
    dtype: gl.constexpr = shared.scores.dtype
    it = 0
    if segment.goes_back:
        it = first_pass_gates(shared, segment, rates, low, high, SLICES, DT_SOFTPLUS)
    causal = gl.arange(0, CHUNK, row)[:, None] >= gl.arange(0, CHUNK, col)[None, :]
    causal = gl.where(causal, -1, 0).to(gl.int16)
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, layout)
    mbarrier.wait(shared.full.index(it % shared.RING), (it // shared.RING) & 1, pred=segment.nchunks > 0)
    CB_begun = bmm_chunk(shared, it % shared.RING, zero)
    for i in range(segment.nchunks):
        slot, stage = it % shared.RING, i % shared.SCORE_RING
        row_0, key_0 = load_gate(shared, slot, ROW, 0, row), load_gate(shared, slot, KEY, 0, col)
        if shared.UNITS == 2:
            row_1 = load_gate(shared, slot, ROW, 1, row)
        CB = warpgroup_mma_wait(0, deps=[CB_begun])
        if RAGGED:  # scores with what follows the sequence are above the diagonal; its B would reach the state
            valid = segment.length - (segment.first + i) * CHUNK
            if valid < CHUNK:
                for k in gl.static_range(shared.HALVES):
                    clear_rows(shared.B.index(slot * shared.HALVES + k), valid, shared.B.shape[2])
        # stage chunk_scan.current: the decayed scores
        m = decayed(CB, row_0, key_0, causal, RELAXED, dtype)
        if shared.UNITS == 2:
            key_1 = load_gate(shared, slot, KEY, 1, col)
        mbarrier.wait(shared.unscored.index(stage), ((i // shared.SCORE_RING) & 1) ^ 1)
        if shared.UNITS == 2:
            shared.scores.index(stage * 2).store(m)
            m = decayed(CB, row_1, key_1, causal, RELAXED, dtype)
        mbarrier.arrive(shared.empty.index(slot), count=2)
        it += 1
        slot = it % shared.RING
        # stage bmm_chunk: the next product, while this one's scores are stored; after the last chunk it is not used
        mbarrier.wait(shared.full.index(slot), (it // shared.RING) & 1, pred=i + 1 < segment.nchunks)
        CB_begun = bmm_chunk(shared, slot, zero)
        # stage chunk_scan.current
        shared.scores.index(stage * shared.UNITS + shared.UNITS - 1).store(m)
        fence_async_shared()
        mbarrier.arrive(shared.scored.index(stage), count=1)
    # stage bmm_chunk
    warpgroup_mma_wait(0, deps=[CB_begun])
