# mypy: ignore-errors
# ruff: noqa: SIM102  (the outer condition is a compile-time one)
"""The roles of `fused_hopper.py`, one function each, and the stages that they perform.

    gates       2 warps   chunk_cumsum: dt and the decays of a chunk, for both lanes
    loads       1 warp    B, C and x of a chunk, by the copy engine
    scores      4 warps   bmm_chunk: C B^T, times each unit's decays
    unit_state  4 warps each, two of them: chunk_state, state_passing and chunk_scan of one lane

A unit is a head, or a slice of 64 of a head's P.  A program has two lanes: two units of one group, or, where N is 256,
the two halves of N of one unit, which exchange parts of the output (`hopper_halves.py`).  Roles meet at mbarriers:
`full`/`empty` guard a ring of chunks, `scored`/`unscored` a ring of decayed scores, `told` the gates' word on whether
the first pass goes on.

Decays are in log2 units since the chunk's start: a_t = sum_{s <= t} dt_s A log2(e), and a_end for the whole chunk.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from ssdprof.kernels.ssd.hopper_halves import own_and_other, whole_sum

CHUNK = gl.constexpr(64)  # rows of one matrix instruction
SLICE = gl.constexpr(64)  # of P: likewise
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
LATE = gl.constexpr(32)  # positions at a chunk's end whose weighted x enters the state without being rounded
FORGOTTEN = gl.constexpr(-160.0)  # 2^-160 is zero in fp32, with room for rounding: the least positive one is 2^-149
ROW, KEY, WEIGHT, ENTERING = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)  # vectors of `gates`

STAGES = {
    "scalar": "caller",
    "_add": "caller",
    "log2_approx": "chunk_cumsum",
    "softplus": "chunk_cumsum",
    "chunk_cumsum": "chunk_cumsum",
    "decay_exp2": "chunk_cumsum",
    "put": "chunk_cumsum",
    "gates": "chunk_cumsum",
    "load_x": "loads",
    "load_rows": "loads",
    "loads": "loads",
    "decayed": "chunk_scan.current",
    "clear_rows": "bmm_chunk",
    "bmm_chunk": "bmm_chunk",
    "scores": "bmm_chunk",
    "weighted": "chunk_state",
    "rounded_off": "chunk_state",
    "add_residual": "chunk_scan.residual",
    "load_transposed": "caller",
    "load_gate": "caller",
    "segment_state": "chunk_state.first_pass",
    "wait_for_state": "state_passing.wait",
    "hand_over_state": "state_passing.store",
    "unit_state": "setup",
}
# What a role waits for at a barrier.  Those that wait for a free place are ahead of the others.
WAITS = {
    "full": "waiting.chunk",
    "scored": "waiting.scores",
    "told": "waiting.gates",
    "empty": "ahead",
    "unscored": "ahead",
}


@aggregate
class Shared:
    """Rings in shared memory.  Vectors hold the 64 numbers of lane 0, then those of lane 1."""

    B: gl.shared_memory_descriptor  # (ring * halves, q, n)
    C: gl.shared_memory_descriptor  # (ring * halves, q, n)
    x: gl.shared_memory_descriptor  # (ring * units, q, 1, p)
    scores: gl.shared_memory_descriptor  # (score ring * units, q, s)
    out: gl.shared_memory_descriptor  # (2, q / halves, 1, p)
    gates: gl.shared_memory_descriptor  # (ring * 4, 2 q): ROW a, KEY a - log2 dt, WEIGHT, ENTERING 2^a
    decay: gl.shared_memory_descriptor  # (ring, 2): 2^a_end; in the first pass, of all that was seen of the segment
    goes_on: gl.shared_memory_descriptor  # (told ring, 1): whether the first pass goes on after a chunk
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    scored: gl.shared_memory_descriptor
    unscored: gl.shared_memory_descriptor
    told: gl.shared_memory_descriptor
    RING: gl.constexpr
    SCORE_RING: gl.constexpr
    TOLD: gl.constexpr  # told ring: ring + 2, so that all have read a word before it is overwritten
    HALVES: gl.constexpr  # of N
    UNITS: gl.constexpr  # of this program

    @gluon.constexpr_function
    def __init__(
        self, B, C, x, scores, out, gates, decay, goes_on, full, empty, scored, unscored, told, RING, SCORE_RING, HALVES
    ):
        self.B, self.C, self.x, self.scores, self.out = B, C, x, scores, out
        self.gates, self.decay, self.goes_on = gates, decay, goes_on
        self.full, self.empty, self.scored, self.unscored, self.told = full, empty, scored, unscored, told
        self.RING, self.SCORE_RING, self.TOLD = gl.constexpr(RING), gl.constexpr(SCORE_RING), gl.constexpr(RING + 2)
        self.HALVES, self.UNITS = gl.constexpr(HALVES), gl.constexpr(2 // HALVES)


@aggregate
class Segment:
    """Which positions and units are this program's."""

    sequence: gl.tensor
    index: gl.tensor  # of the segment in its sequence
    begin: gl.tensor  # row at which the sequence begins, among those of all sequences
    length: gl.tensor  # of the sequence
    first: gl.tensor  # chunk
    nchunks: gl.tensor
    unit: gl.tensor  # the first, if there are two
    last: gl.tensor  # the sequence ends with this segment
    goes_back: gl.tensor  # there is a first pass
    seen_first: gl.tensor  # chunk at which it ends, for it goes backwards
    seen: gl.tensor  # chunks that it has at most

    @gluon.constexpr_function
    def __init__(self, sequence, index, begin, length, first, nchunks, unit, last, goes_back, seen_first, seen):
        self.sequence, self.index, self.begin, self.length = sequence, index, begin, length
        self.first, self.nchunks, self.unit, self.last = first, nchunks, unit, last
        self.goes_back, self.seen_first, self.seen = goes_back, seen_first, seen


# what Triton 3.7 and 3.9 renamed: the barrier of a role's threads, and copies by the copy engine
role_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
def scalar(buffer):
    """The one number in `buffer`."""
    return gl.max(buffer.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def _add(a, b):
    return a + b


# --- gates


@gluon.jit
def log2_approx(v):
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [v], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def softplus(v):
    """log(1 + e^v) with a relative error below 3e-6: by its series where e^v is small and 1 + e^v would round."""
    e = gl.exp2(v * LOG2_E)
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
    return gl.exp2(gl.where(log2_decay > 0.0, 0.0, log2_decay))


@gluon.jit
def put(shared, slot, vector: gl.constexpr, v):
    """v (q, lane) into a vector of the ring."""
    shared.gates.index(slot * 4 + vector).store(gl.permute(v, (1, 0)).reshape([2 * CHUNK]))


@gluon.jit
def gates(
    shared, segment, dt_ptr, A_ptr, dt_bias_ptr, dt_strides, A_stride, dt_bias_stride, low, high,
    SLICES: gl.constexpr, DT_SOFTPLUS: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 2], [0, 1])  # (q, lane): a warp for each lane
    lanes: gl.constexpr = gl.SliceLayout(0, layout)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [2], [0])
    o_q = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    o_h = (segment.unit + gl.arange(0, 2, lanes) // shared.HALVES) // SLICES
    A = gl.load(A_ptr + o_h * A_stride).to(gl.float32) * LOG2_E
    dt_bias = gl.zeros_like(A)
    if dt_bias_ptr is not None:
        dt_bias = gl.load(dt_bias_ptr + o_h * dt_bias_stride).to(gl.float32)
    dt_ptr += segment.begin.to(gl.int64) * dt_strides[0]
    tile = (o_q[:, None] * dt_strides[0] + (o_h * dt_strides[1])[None, :]).to(gl.int32)
    it = 0

    if segment.goes_back:
        seen = gl.zeros([2], gl.float32, lanes)  # log2 of the decay of all chunks that were seen
        c = segment.seen - 1
        p = dt_ptr + ((segment.seen_first + c) * CHUNK).to(gl.int64) * dt_strides[0]
        raw = gl.load(p + tile)
        go = c >= 0
        while go:
            slot = it % shared.RING
            dt, a, a_end = chunk_cumsum(raw, dt_bias, A, low, high, o_q[:, None] >= 0, DT_SOFTPLUS)
            c -= 1
            p -= CHUNK * dt_strides[0]
            raw = gl.load(p + tile, mask=(c >= 0) & (o_q[:, None] >= 0), other=0.0)
            weight = decay_exp2(a_end[None, :] - a) * gl.exp2(seen)[None, :] * dt
            seen += a_end
            go = (c >= 0) & (gl.max(seen, 0) > FORGOTTEN)
            shared.goes_on.index(it % shared.TOLD).store(gl.full([1], go.to(gl.int32), gl.int32, one))
            mbarrier.arrive(shared.told.index(it % shared.TOLD), count=1)
            mbarrier.wait(shared.empty.index(slot), ((it // shared.RING) & 1) ^ 1)
            put(shared, slot, WEIGHT, weight)
            shared.decay.index(slot).store(gl.exp2(seen))
            mbarrier.arrive(shared.full.index(slot), count=1)
            it += 1

    t = segment.first * CHUNK
    raw = gl.load(dt_ptr + t.to(gl.int64) * dt_strides[0] + tile, mask=(t + o_q < segment.length)[:, None], other=0.0)
    for _ in range(segment.nchunks):
        slot = it % shared.RING
        valid = (t + o_q < segment.length)[:, None]
        dt, a, a_end = chunk_cumsum(raw, dt_bias, A, low, high, valid, DT_SOFTPLUS)
        t += CHUNK
        raw = gl.load(
            dt_ptr + t.to(gl.int64) * dt_strides[0] + tile, mask=(t + o_q < segment.length)[:, None], other=0.0
        )
        weight = decay_exp2(a_end[None, :] - a) * dt
        key = a - log2_approx(dt)
        entering = gl.exp2(a)
        decay = gl.exp2(a_end)
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
def load_gate(shared, slot, vector: gl.constexpr, IDX: gl.constexpr, layout: gl.constexpr):
    return shared.gates.index(slot * 4 + vector).slice(IDX * CHUNK, CHUNK).load(layout)


@gluon.jit
def decayed(CB, row, key, causal, RELAXED: gl.constexpr, dtype: gl.constexpr):
    """CB * 2^(a_q - a_s) * dt_s where s <= q, else 0; `causal` has all bits set there, and none elsewhere."""
    decay = gl.exp2(row[:, None] - key[None, :])
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
def bmm_chunk(shared, segment, i, slot, zero, RAGGED: gl.constexpr):
    """C B^T of the segment's chunk i, begun."""
    HALVES: gl.constexpr = shared.HALVES
    if RAGGED:
        valid = segment.length - (segment.first + i) * CHUNK
        if (valid > 0) & (valid < CHUNK) & (i < segment.nchunks):
            for k in gl.static_range(HALVES):
                clear_rows(shared.B.index(slot * HALVES + k), valid, shared.B.shape[2])
    CB = zero
    for k in gl.static_range(HALVES):
        C, B = shared.C.index(slot * HALVES + k), shared.B.index(slot * HALVES + k)
        CB = warpgroup_mma(C, B.permute((1, 0)), CB, use_acc=k > 0, is_async=True)
    return CB


@gluon.jit
def scores(shared, segment, RELAXED: gl.constexpr, RAGGED: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    row: gl.constexpr = gl.SliceLayout(1, layout)
    col: gl.constexpr = gl.SliceLayout(0, layout)
    dtype: gl.constexpr = shared.scores.dtype
    it = 0
    if segment.goes_back:  # nothing to do in the first pass but to let go of what was loaded
        go = segment.seen > 0
        while go:
            mbarrier.wait(shared.full.index(it % shared.RING), (it // shared.RING) & 1)
            go = scalar(shared.goes_on.index(it % shared.TOLD)) != 0
            mbarrier.arrive(shared.empty.index(it % shared.RING), count=1)
            it += 1
    causal = gl.arange(0, CHUNK, row)[:, None] >= gl.arange(0, CHUNK, col)[None, :]
    causal = gl.where(causal, -1, 0).to(gl.int16)
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, layout)
    mbarrier.wait(shared.full.index(it % shared.RING), (it // shared.RING) & 1, pred=segment.nchunks > 0)
    CB_begun = bmm_chunk(shared, segment, 0, it % shared.RING, zero, RAGGED)
    for i in range(segment.nchunks):
        slot, stage = it % shared.RING, i % shared.SCORE_RING
        row_0, key_0 = load_gate(shared, slot, ROW, 0, row), load_gate(shared, slot, KEY, 0, col)
        if shared.UNITS == 2:
            row_1 = load_gate(shared, slot, ROW, 1, row)
        CB = warpgroup_mma_wait(0, deps=[CB_begun])
        # stage chunk_scan.current: the decayed scores
        m = decayed(CB, row_0, key_0, causal, RELAXED, dtype)
        if shared.UNITS == 2:
            key_1 = load_gate(shared, slot, KEY, 1, col)
        mbarrier.wait(shared.unscored.index(stage), ((i // shared.SCORE_RING) & 1) ^ 1)
        if shared.UNITS == 2:
            shared.scores.index(stage * 2).store(m)
            m = decayed(CB, row_1, key_1, causal, RELAXED, dtype)
        mbarrier.arrive(shared.empty.index(slot), count=1)
        it += 1
        slot = it % shared.RING
        # stage bmm_chunk: the next product, while this one's scores are stored; after the last chunk it is not used
        mbarrier.wait(shared.full.index(slot), (it // shared.RING) & 1, pred=i + 1 < segment.nchunks)
        CB_begun = bmm_chunk(shared, segment, i + 1, slot, zero, RAGGED)
        # stage chunk_scan.current
        shared.scores.index(stage * shared.UNITS + shared.UNITS - 1).store(m)
        fence_async_shared()
        mbarrier.arrive(shared.scored.index(stage), count=1)
    # stage bmm_chunk
    warpgroup_mma_wait(0, deps=[CB_begun])


# --- one unit's state and output, both transposed: (p, n) and (p, q)


@gluon.jit
def weighted(x, weight, RELAXED: gl.constexpr):
    """x^T (p, q) times a weight per position, as a matrix operand."""
    if RELAXED:
        return x * weight.to(x.dtype)[None, :]
    else:
        return (x.to(gl.float32) * weight[None, :]).to(x.dtype)


@gluon.jit
def rounded_off(x, weight):
    """What `weighted` loses by rounding.  In assembly, or x would be kept as fp32 from its first use on, and spill."""
    if x.dtype == gl.bfloat16:
        code: gl.constexpr = """{
            .reg .b32 lo, hi, near;
            shl.b32 lo, $1, 16;
            and.b32 hi, $1, 0xffff0000;
            mul.rn.f32 lo, lo, $2;
            mul.rn.f32 hi, hi, $3;
            cvt.rn.bf16x2.f32 near, hi, lo;
            .reg .b32 near_lo, near_hi;
            shl.b32 near_lo, near, 16;
            and.b32 near_hi, near, 0xffff0000;
            sub.rn.f32 lo, lo, near_lo;
            sub.rn.f32 hi, hi, near_hi;
            cvt.rn.bf16x2.f32 $0, hi, lo;
        }"""
    else:
        code: gl.constexpr = """{
            .reg .b16 a, b;
            .reg .f32 lo, hi, near_lo, near_hi;
            .reg .b32 near;
            mov.b32 {a, b}, $1;
            cvt.f32.f16 lo, a;
            cvt.f32.f16 hi, b;
            mul.rn.f32 lo, lo, $2;
            mul.rn.f32 hi, hi, $3;
            cvt.rn.f16x2.f32 near, hi, lo;
            mov.b32 {a, b}, near;
            cvt.f32.f16 near_lo, a;
            cvt.f32.f16 near_hi, b;
            sub.rn.f32 lo, lo, near_lo;
            sub.rn.f32 hi, hi, near_hi;
            cvt.rn.f16x2.f32 $0, hi, lo;
        }"""
    return gl.inline_asm_elementwise(code, "=r,r,f,f", [x, weight], dtype=x.dtype, is_pure=True, pack=2)


@gluon.jit
def add_residual(out, x, D):
    """out + D x in fp32.  In assembly, or x would be kept as fp32 from its first use on, and spill."""
    if x.dtype == gl.bfloat16:
        code: gl.constexpr = """{
            .reg .b32 lo, hi;
            shl.b32 lo, $4, 16;
            and.b32 hi, $4, 0xffff0000;
            fma.rn.f32 $0, lo, $5, $2;
            fma.rn.f32 $1, hi, $6, $3;
        }"""
    else:
        code: gl.constexpr = """{
            .reg .b16 a, b;
            .reg .f32 lo, hi;
            mov.b32 {a, b}, $4;
            cvt.f32.f16 lo, a;
            cvt.f32.f16 hi, b;
            fma.rn.f32 $0, lo, $5, $2;
            fma.rn.f32 $1, hi, $6, $3;
        }"""
    return gl.inline_asm_elementwise(code, "=f,=f,f,f,r,f,f", [out, x, D], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def load_transposed(shared, slot, IDX: gl.constexpr, layout: gl.constexpr):
    """x^T (p, q) of a lane's unit."""
    x = shared.x.index(slot * shared.UNITS + IDX // shared.HALVES)
    return x.reshape([CHUNK, SLICE]).permute((1, 0)).load(layout)


@gluon.jit
def segment_state(shared, state, IDX: gl.constexpr, RELAXED: gl.constexpr, operand: gl.constexpr):
    """First pass: the state that the segment adds to a zero state, and its decay; from its end backwards."""
    decay = 1.0
    it = 0
    go = True
    while go:
        slot = it % shared.RING
        mbarrier.wait(shared.full.index(slot), (it // shared.RING) & 1)
        go = scalar(shared.goes_on.index(it % shared.TOLD)) != 0
        decay = scalar(shared.decay.index(slot).slice(IDX, 1))
        x = load_transposed(shared, slot, IDX, operand)
        xw = weighted(x, load_gate(shared, slot, WEIGHT, IDX, gl.SliceLayout(0, operand)), RELAXED)
        B = shared.B.index(slot * shared.HALVES + IDX % shared.HALVES)
        begun = warpgroup_mma(xw, B, state, is_async=True)
        state = warpgroup_mma_wait(0, deps=[begun])
        mbarrier.arrive(shared.empty.index(slot), count=1)
        it += 1
    return state, decay, it


@gluon.jit
def wait_for_state(flag_ptr, segments):
    while gl.atomic_add(flag_ptr, 0, sem="acquire") < segments:
        pass


@gluon.jit
def hand_over_state(states_ptr, tile, mask, flag_ptr, state):
    gl.store(states_ptr + tile, state.to(states_ptr.dtype.element_ty), mask=mask)
    role_barrier()  # every thread's part is stored before the flag says so
    gl.atomic_add(flag_ptr, 1, sem="release")


@gluon.jit
def unit_state(
    shared, segment, tensors,
    IDX: gl.constexpr, HEADS: gl.constexpr, HEADDIM: gl.constexpr, DSTATE: gl.constexpr, SLICES: gl.constexpr,
    RELAXED: gl.constexpr, RAGGED: gl.constexpr, HANDOVER: gl.constexpr, RECOMPUTE: gl.constexpr,
):  # fmt: skip
    (
        out_desc, out_ptr, out_strides, D_ptr, D_strides, initial_ptr, initial_strides, states_ptr, final_ptr, sync_ptr,
        exchange,
    ) = tensors  # fmt: skip
    dtype: gl.constexpr = shared.x.dtype
    HALVES: gl.constexpr = shared.HALVES
    UNIT: gl.constexpr = IDX // HALVES  # of the program's
    HALF: gl.constexpr = IDX % HALVES  # of N
    WIDTH: gl.constexpr = DSTATE // HALVES
    OWN: gl.constexpr = CHUNK // HALVES  # positions of a chunk whose output this role finishes
    OWN_FIRST: gl.constexpr = HALF * OWN
    by_q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])  # (p, q)
    by_own: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN, 16])  # (p, own q)
    by_n: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])  # (p, n)
    q_operand: gl.constexpr = gl.DotOperandLayout(0, by_q, 2)
    n_operand: gl.constexpr = gl.DotOperandLayout(0, by_n, 2)
    unit = segment.unit + UNIT
    i_h, p_0 = unit // SLICES, unit % SLICES * SLICE
    state = gl.zeros([SLICE, WIDTH], gl.float32, by_n)
    o_p = p_0 + gl.arange(0, SLICE, gl.SliceLayout(1, by_n))
    o_n = HALF * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, by_n))
    inside = (o_p < HEADDIM)[:, None] & (o_n >= 0)[None, :]
    tile = o_p[:, None] * DSTATE + o_n[None, :]
    lane = (segment.sequence.to(gl.int64) * HEADS + i_h) * (HEADDIM * DSTATE)

    # stage state_passing.load: the state that enters the segment
    it = 0
    added, decay = state, 1.0
    if segment.goes_back:
        added, decay, it = segment_state(shared, state, IDX, RELAXED, n_operand)
    if HANDOVER:
        flag_ptr = sync_ptr + ((segment.sequence * (HEADS * SLICES) + unit) * HALVES + HALF) * 8
        if segment.index > 0:
            wait_for_state(flag_ptr, segment.index)
            state = gl.load(states_ptr + lane + tile, mask=inside, other=0.0, cache_modifier=".cg").to(gl.float32)
    if initial_ptr is not None:
        if (segment.index == 0) | RECOMPUTE:
            p = initial_ptr + segment.sequence.to(gl.int64) * initial_strides[0] + i_h * initial_strides[1]
            initial_tile = o_p[:, None] * initial_strides[2] + o_n[None, :] * initial_strides[3]
            state = gl.load(p + initial_tile, mask=inside, other=0.0).to(gl.float32)
    if RECOMPUTE:
        state = decay * state + added
    if HANDOVER:
        if not segment.last:
            hand_over_state(states_ptr + lane, tile, inside, flag_ptr, decay * state + added)

    # stage setup: the output, chunk after chunk
    D = gl.zeros([SLICE], gl.float32, gl.SliceLayout(1, by_own))
    if D_ptr is not None:
        o_d = p_0 + gl.arange(0, SLICE, gl.SliceLayout(1, by_own))
        D = gl.load(D_ptr + i_h * D_strides[0] + o_d * D_strides[1], mask=o_d < HEADDIM, other=0.0).to(gl.float32)
    zero = gl.zeros([SLICE, CHUNK], gl.float32, by_q)
    out_tile = shared.out.index(IDX).reshape([OWN, SLICE])
    for i in range(segment.nchunks):
        slot, stage = it % shared.RING, i % shared.SCORE_RING
        mbarrier.wait(shared.full.index(slot), (it // shared.RING) & 1)
        # stage chunk_state: its operands
        x = load_transposed(shared, slot, IDX, q_operand)
        t = (segment.first + i) * CHUNK
        if RAGGED:
            if t + CHUNK > segment.length:  # what follows is another sequence's; `scores` clears it from B
                o_q = gl.arange(0, CHUNK, gl.SliceLayout(0, q_operand))
                x = gl.where((t + o_q < segment.length)[None, :], x, gl.zeros_like(x))
                mbarrier.wait(shared.scored.index(stage), (i // shared.SCORE_RING) & 1)
        weight = load_gate(shared, slot, WEIGHT, IDX, gl.SliceLayout(0, q_operand))
        decay = scalar(shared.decay.index(slot).slice(IDX, 1))
        # stage chunk_scan.previous: what entered the chunk
        C = shared.C.index(slot * HALVES + HALF).permute((1, 0))
        entered = gl.convert_layout(state.to(dtype), q_operand)
        out_begun = warpgroup_mma(entered, C, zero, use_acc=False, is_async=True)
        # stage chunk_state
        operand = gl.convert_layout(weighted(x, weight, RELAXED), n_operand)
        state_begun = warpgroup_mma(operand, shared.B.index(slot * HALVES + HALF), state * decay, is_async=True)
        # stage chunk_scan.previous
        entering = shared.gates.index(slot * 4 + ENTERING).slice(IDX * CHUNK + OWN_FIRST, OWN)
        entering = entering.load(gl.SliceLayout(0, by_own))
        out = warpgroup_mma_wait(1, deps=[out_begun])
        if HALVES == 2:
            out = whole_sum(exchange, out, i, HALF, by_own)
        out *= entering[None, :]
        # stage chunk_state: here, where registers are free again
        if not RELAXED:
            late_gate = shared.gates.index(slot * 4 + WEIGHT).slice(IDX * CHUNK + CHUNK - LATE, LATE)
            late_weight = late_gate.load(gl.SliceLayout(0, q_operand))
            _, late_x = gl.split(x.reshape([SLICE, CHUNK // LATE, LATE]).permute((0, 2, 1)))
            late_x = gl.convert_layout(late_x, q_operand)
            lost = gl.convert_layout(rounded_off(late_x, late_weight[None, :]), n_operand)
            late_B = shared.B.index(slot * HALVES + HALF).slice(CHUNK - LATE, LATE)
            state_begun = warpgroup_mma(lost, late_B, state_begun, is_async=True)
        # stage chunk_scan.current: what the chunk adds
        mbarrier.wait(shared.scored.index(stage), (i // shared.SCORE_RING) & 1)
        m = shared.scores.index(stage * shared.UNITS + UNIT).slice(OWN_FIRST, OWN).permute((1, 0))
        out_begun = warpgroup_mma(x, m, out, is_async=True)
        state, out = warpgroup_mma_wait(0, deps=[state_begun, out_begun])
        mbarrier.arrive(shared.unscored.index(stage), count=1)
        mbarrier.arrive(shared.empty.index(slot), count=1)
        # stage chunk_scan.residual
        if D_ptr is not None:
            own_x = gl.convert_layout(x, by_q)
            if HALVES == 2:
                own_x, _ = own_and_other(own_x, HALF, by_own)
            out = add_residual(out, own_x, D[:, None])
        tma.store_wait(0)
        out_tile.permute((1, 0)).store(out.to(dtype))
        if RAGGED:
            whole = t + OWN_FIRST + OWN <= segment.length
            if not whole:
                rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
                o_q = OWN_FIRST + gl.arange(0, OWN, gl.SliceLayout(1, rows))[:, None]
                o_w = p_0 + gl.arange(0, SLICE, gl.SliceLayout(0, rows))[None, :]
                p = out_ptr + (segment.begin + t + o_q).to(gl.int64) * out_strides[0] + i_h * out_strides[1] + o_w
                gl.store(p, out_tile.load(rows), mask=(t + o_q < segment.length) & (o_w < HEADDIM))
        else:
            whole = True
        if whole:
            fence_async_shared()
            async_store(out_desc, [segment.begin + t + OWN_FIRST, i_h, p_0], shared.out.index(IDX))
        it += 1
    tma.store_wait(0)
    # stage state_passing.store
    if segment.last:
        gl.store(final_ptr + lane + tile, state, mask=inside)
