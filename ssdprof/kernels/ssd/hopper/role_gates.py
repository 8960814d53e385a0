"""Roles `gates`, which computes dt and the decays of each chunk, and `scores`, which computes C B^T
of each chunk times the decays of each unit.

In the first pass, `scores` computes the weights of positions instead, because there are no scores
to compute.

Shared memory: `rings.py`.  A column is a chunk of a lane.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ssdprof.kernels._gluon import (
    add,
    masked,
    phase,
    place_in,
    product_layout,
    reinterpret,
    tile_indices,
)
from ssdprof.kernels.hopper.ring import CHUNK
from ssdprof.kernels.ssd.hopper.lanes import two_parts
from ssdprof.kernels.ssd.hopper.rings import ENTERING, KEY, ROW, WEIGHT, lane_of, rows_of, slots_of

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
# a log2 below which a decay is zero in fp32, whose smallest number is 2^-149; the margin is for
# rounding
FORGOTTEN = gl.constexpr(-160.0)
# layout (q, column) of the first pass: one warp for each of the four columns of two chunks
by_column = gl.constexpr(gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1]))

# stages of functions: `stalls/attribute.py`
STAGES = {
    "log2_approx": "chunk_cumsum", "softplus": "chunk_cumsum", "load_bits": "chunk_cumsum",
    "number_of": "chunk_cumsum", "chunk_cumsum": "chunk_cumsum", "decay_exp2": "chunk_cumsum",
    "put": "chunk_cumsum", "rates_of": "chunk_cumsum", "write_flag": "chunk_cumsum",
    "announce_weights": "chunk_cumsum", "of_each_lane": "chunk_cumsum",
    "store_two_weights": "chunk_cumsum",
    "first_pass_gates": "chunk_cumsum", "put_gates": "chunk_cumsum", "gates": "chunk_cumsum",
    "decayed": "chunk_scan.current", "bmm_chunk": "bmm_chunk", "decayed_scores": "bmm_chunk",
    "scores": "bmm_chunk",
}  # fmt: skip
# Stage of a wait at each barrier.  In a wait "ahead", the role waits for a free slot, and delays no
# other role.
WAITS = {"full": "waiting.chunk", "empty": "ahead", "unscored": "ahead"}


@gluon.jit
def exp2_approx(v):
    """2^v by the instruction to which `gl.exp2` compiles.  `gl.exp2` would link CUDA's libdevice,
    which takes long.
    """
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [v], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def log2_approx(v):
    """log2 of v by one instruction, for the same reason as `exp2_approx`."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [v], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def softplus(v):
    """log(1 + e^v) with a relative error below 5e-6; 0 where e^v is below the least normal number,
    2^-126.  For e^v below 1/16, where 1 + e^v would lose digits, it is computed from the series;
    for v above 20 it is v, with which log(1 + e^v) agrees in fp32.
    """
    e = exp2_approx(v * LOG2_E)
    series = e * (
        1.0 + e * (-0.5 + e * (0.33333333333 + e * (-0.25 + e * (0.2 - e * 0.16666666667))))
    )
    return gl.where(v > 20.0, v, gl.where(e < 0.0625, series, log2_approx(1.0 + e) * LN_2))


@gluon.jit
def load_bits(pointers, inside):
    """Load the numbers at `pointers` as 32-bit integers; zero where not `inside`.

    If a loop loads 16-bit numbers for its next iteration, the compiler packs two of them into one
    register at the end of the iteration, and so waits for them one iteration too early.  It does
    not pack 32-bit numbers.
    """
    code: gl.constexpr = """{
        .reg .pred inside;
        setp.ne.b32 inside, $2, 0;
        mov.b32 $0, 0;
        @inside ld.global.BITS $0, [$1];
    }"""
    load: gl.constexpr = code.replace(
        "BITS", "b32" if pointers.dtype.element_ty == gl.float32 else "b16"
    )
    return gl.inline_asm_elementwise(
        load, "=r,l,r", [pointers, inside.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def number_of(bits, dtype: gl.constexpr):
    """Convert numbers of `dtype` that `load_bits` has loaded to fp32."""
    if dtype != gl.float32:
        bits = bits.to(gl.int16)
    return gl.cast(bits, dtype, bitcast=True).to(gl.float32)


@gluon.jit
def chunk_cumsum(env, raw, dt_bias, A, valid):
    """dt (q, column), a (q, column) and a_end (column) of chunks.  NaN stays NaN.

    raw: dt before bias, softplus and limit (q, column).  dt_bias, A: (column), A times log2(e).
    valid: whether the position exists, (q, column) or (q, 1); dt is 0 where it does not
    """
    v = raw + dt_bias[None, :]
    if env.S.DT_SOFTPLUS:
        v = softplus(v)
    dt = gl.where(v == v, gl.minimum(gl.maximum(v, env.dt_limit[0]), env.dt_limit[1]), v)
    dt = gl.where(valid, dt, 0.0)
    dA = dt * A[None, :]
    # a step below FORGOTTEN decays to zero anyway, and would cost later differences their precision
    dA = gl.where(dA == dA, gl.maximum(gl.minimum(dA, 0.0), FORGOTTEN), dA)
    return dt, gl.associative_scan(dA, 0, add), gl.reduce(dA, 0, add)


@gluon.jit
def decay_exp2(log2_decay):
    """2^log2_decay, at most 1: the exponent is a rounded difference of sums, which may be slightly
    above 0.  NaN stays NaN.
    """
    return exp2_approx(gl.where(log2_decay > 0.0, 0.0, log2_decay))


@gluon.jit
def put(vector, v):
    """Store v (q, column) in a vector of a ring, column after column."""
    vector.store(gl.permute(v, (1, 0)).reshape([v.shape[0] * v.shape[1]]))


@gluon.jit
def rates_of(env, segment, CHUNKS: gl.constexpr, layout: gl.constexpr):
    """(A log2(e), dt_bias, pointer to the sequence's dt, offsets in dt, stride of dt between
    positions).

    A log2(e) and dt_bias are (column); offsets are (q, column), from a chunk's first position.
    Columns are both lanes of the chunk and, if CHUNKS is 2, both lanes of the chunk before it.
    """
    dt_strides, A_strides, dt_bias_strides, _, _ = env.strides
    o_c = gl.arange(0, 2 * CHUNKS, gl.SliceLayout(0, layout))
    o_h = (segment.unit + o_c % 2 // env.shared.N_SPLIT) // env.S.SLICES
    A = gl.load(env.A_ptr + o_h.to(gl.int64) * A_strides[0]).to(gl.float32) * LOG2_E
    dt_bias = gl.full([2 * CHUNKS], 0.0, gl.float32, gl.SliceLayout(0, layout))
    if env.dt_bias_ptr is not None:
        dt_bias = gl.load(env.dt_bias_ptr + o_h.to(gl.int64) * dt_bias_strides[0]).to(gl.float32)
    o_t = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))[:, None] - (o_c // 2 * CHUNK)[None, :]
    tile = (o_t * dt_strides[1] + (o_h * dt_strides[2])[None, :]).to(gl.int32)
    return A, dt_bias, env.dt_ptr + segment.dt_begin, tile, dt_strides[1]


@gluon.jit
def write_flag(first, seen, goes_on):
    """Write the flag that says whether another turn of the first pass follows the turn that begins
    after `seen` chunks, and announce it to `loads`.  `units` reads the flag later, after
    `announce_weights`.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slot = place_in(seen // first.TURN, first.FLAG_SLOTS)
    first.continue_flag.index(slot).store(gl.full([1], goes_on.to(gl.int32), gl.int32, layout))
    mbarrier.arrive(first.continue_barrier.index(slot), count=1)


@gluon.jit
def announce_weights(first, seen):
    """Announce that the weights and decays of the turn that begins after `seen` chunks of the first
    pass are stored.
    """
    mbarrier.arrive(first.full.index(place_in(seen, first.DEPTH)), count=1)


@gluon.jit
def pairs_of(vectors):
    """View a ring of vectors as a ring of pairs of vectors, one after the other."""
    pairs: gl.constexpr = [vectors.shape[0] // 2, 2 * vectors.shape[1]]
    return reinterpret(vectors, vectors.dtype, pairs, vectors.layout)


@gluon.jit
def of_each_lane(v):
    """The four numbers of v (column), whose columns are (chunk, lane), as two pairs of scalars:
    first those of lane 0, of the first and of the second chunk, then those of lane 1.
    """
    four: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    two: gl.constexpr = gl.SliceLayout(
        0, gl.BlockedLayout([1, 2], [32, 1], [gl.num_warps(), 1], [1, 0])
    )
    lane_0, lane_1 = gl.split(gl.convert_layout(v, four).reshape([2, 2]))
    return gl.split(gl.convert_layout(lane_0, two)), gl.split(gl.convert_layout(lane_1, two))


@gluon.jit
def store_two_weights(shared, seen, c, decay_0, decay_1, dt, a, a_end):
    """Compute and store the weights of chunks c and c - 1 of the first pass, from dt and a (q,
    column), and a_end (column).

    seen: chunks read before them.  decay_0, decay_1: log2 of each lane's decay of all chunks after
        c

    Returns decay_0 and decay_1 with these two chunks included, the number of chunks to read so far,
    and whether more follow.
    """
    first = shared.first
    o_c = gl.arange(0, 4, gl.SliceLayout(0, by_column))
    # log2 of the decay of all chunks after each of the two (column); middle: after chunk c - 1
    ends_0, ends_1 = of_each_lane(a_end)
    middle_0, middle_1 = decay_0 + ends_0[0], decay_1 + ends_1[0]
    is_c = o_c < 2
    after_c = gl.where(o_c == 0, decay_0, decay_1)
    decay = gl.where(is_c, after_c, gl.where(o_c == 2, middle_0, middle_1))
    weight = decay_exp2(a_end[None, :] - a) * exp2_approx(decay)[None, :] * dt
    decay_0, decay_1 = middle_0 + ends_0[1], middle_1 + ends_1[1]
    # more: whether chunk c - 1 has to be read.  goes_on: whether chunk c - 2 has to be
    more = (c > 0) & (gl.maximum(middle_0, middle_1) > FORGOTTEN)
    goes_on = more & (c > 1) & (gl.maximum(decay_0, decay_1) > FORGOTTEN)
    write_flag(first, seen, more if first.TURN == 1 else goes_on)
    # wait until the chunk ring has room for the turn: then the slots of its weights are free, too
    last = seen + first.TURN - 1
    mbarrier.wait(first.empty.index(place_in(last, first.DEPTH)), phase(last, first.DEPTH) ^ 1)
    pair = place_in(seen // 2, first.weights.shape[0] // 2)
    put(pairs_of(first.weights).index(pair), two_parts(weight, shared.x.dtype))
    pairs_of(first.decay).index(pair).store(exp2_approx(decay + a_end))
    announce_weights(first, seen)
    if first.TURN == 1:
        if more:
            write_flag(first, seen + 1, goes_on)
            # no wait is needed: before `units` released the slot of `seen`, it waited for the
            # earlier use of this barrier
            announce_weights(first, seen + 1)
        seen += 1 + more.to(gl.int32)
    else:
        seen += 2
    # wait for the copy of an earlier chunk, so as not to run further ahead of the copies: with more
    # copies in flight, all are slower
    before = gl.maximum(seen - 2, 0)
    mbarrier.wait(first.full.index(place_in(before, first.DEPTH)), phase(before, first.DEPTH))
    return decay_0, decay_1, seen, goes_on


@gluon.jit
def first_pass_gates(env, segment):
    """Compute the weights of the chunks of the first pass, from the last chunk backwards.  Returns
    the number of chunks that the first pass reads.

    Different warps process two chunks at once, because each chunk's chain of dependent instructions
    takes long.  With two chunks per turn, the second chunk of the last turn may lie before the
    first chunk of the pass.  It is then all zeros.
    """
    A, dt_bias, dt_ptr, tile, dt_stride = rates_of(env, segment, 2, by_column)
    dtype: gl.constexpr = dt_ptr.dtype.element_ty
    # (q, column): how many chunks before c the column's chunk is, 0 or 1
    column = gl.arange(0, 4, gl.SliceLayout(0, by_column))[None, :]
    back = column // 2 + gl.full([CHUNK, 4], 0, gl.int32, by_column)
    # c: the later one of two chunks, whose dt begins at `chunk_ptr`.  dt of the next two chunks is
    # loaded one iteration ahead
    c = segment.first_pass_chunks - 1
    step = gl.to_tensor(dt_stride).to(gl.int64) * CHUNK
    chunk_ptr = dt_ptr + (segment.first_pass_end + c) * step
    bits = load_bits(chunk_ptr + tile, back <= c)
    decay_0, decay_1 = 0.0, 0.0
    seen = 0
    goes_on = True
    while goes_on:
        chunk_ptr -= 2 * step
        raw = number_of(bits, dtype)
        bits = load_bits(chunk_ptr + tile, back <= c - 2)
        dt, a, a_end = chunk_cumsum(env, raw, dt_bias, A, back <= c)
        decay_0, decay_1, seen, goes_on = store_two_weights(
            env.shared, seen, c, decay_0, decay_1, dt, a, a_end
        )
        c -= 2
    return seen


@gluon.jit
def put_gates(shared, n, dt, a, a_end):
    """Store all vectors of the program's n-th chunk, and its decays, from dt and a (q, lane) and
    a_end (lane).
    """
    slot = place_in(n, shared.DEPTH)
    mbarrier.wait(shared.empty.index(slot), phase(n, shared.DEPTH) ^ 1)
    # each vector is computed at its store: if this role took more registers, the loops of `units`
    # would be longer with N = 256
    put(shared.gates.index(slot * 4 + ROW), a)
    put(shared.gates.index(slot * 4 + ENTERING), exp2_approx(a))
    put(shared.gates.index(slot * 4 + KEY), a - log2_approx(dt))
    weight = decay_exp2(a_end[None, :] - a) * dt
    put(shared.gates.index(slot * 4 + WEIGHT), two_parts(weight, shared.x.dtype))
    shared.decay.index(slot).store(exp2_approx(a_end))
    mbarrier.arrive(shared.full.index(slot), count=1)


@gluon.jit
def gates(env):
    """Role: compute the gates of all chunks of the second pass.  `scores` computes those of the
    first pass.
    """
    # (q, lane): one warp per lane
    layout: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 2], [0, 1])
    for i_segment in range(env.work.segments()):
        segment, n = env.work.segment_at(i_segment)
        A, dt_bias, dt_ptr, tile, dt_stride = rates_of(env, segment, 1, layout)
        o_q = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
        dtype: gl.constexpr = dt_ptr.dtype.element_ty
        # dt of the next chunk is loaded one iteration ahead
        t = segment.first_chunk * CHUNK
        bits = load_bits(
            dt_ptr + t.to(gl.int64) * dt_stride + tile, (t + o_q < segment.length)[:, None]
        )
        for i in range(segment.nchunks):
            raw, valid = number_of(bits, dtype), (t + o_q < segment.length)[:, None]
            t += CHUNK
            bits = load_bits(
                dt_ptr + t.to(gl.int64) * dt_stride + tile, (t + o_q < segment.length)[:, None]
            )
            dt, a, a_end = chunk_cumsum(env, raw, dt_bias, A, valid)
            put_gates(env.shared, n + i, dt, a, a_end)


# --- role `scores`


@gluon.jit
def decayed(CB, row, key, causal, RELAXED: gl.constexpr, dtype: gl.constexpr):
    """CB * 2^(a_q - a_s) * dt_s where s <= q, else 0: (q, s).

    row: a_q.  key: a_s - log2 dt_s.  causal: int16, all bits set where s <= q, none elsewhere
    RELAXED: multiply in `dtype`, to which the result is rounded in any case; otherwise in fp32
    """
    decay = exp2_approx(row[:, None] - key[None, :])
    scores = CB.to(dtype) * decay.to(dtype) if RELAXED else (CB * decay).to(dtype)
    return masked(scores, causal)  # mask last: products above the diagonal may overflow


@gluon.jit
def bmm_chunk(shared, seen, n):
    """Start C B^T (q, s) of the program's n-th chunk asynchronously, and return the product, for
    which the caller waits.  seen: chunks of the first pass
    """
    B_slot, C_slot, _ = slots_of(shared, seen, n)
    CB = gl.full([CHUNK, CHUNK], 0.0, gl.float32, product_layout(CHUNK, 4))
    for k in gl.static_range(shared.N_SPLIT):
        B_t = rows_of(shared, B_slot, k).permute((1, 0))
        CB = warpgroup_mma(rows_of(shared, C_slot, k), B_t, CB, use_acc=k > 0, is_async=True)
    return CB


@gluon.jit
def decayed_scores(env, seen, n, causal):
    """Compute the decayed scores of the program's n-th chunk for all units, and store them in the
    ring `scores`.  Vectors of gates are loaded while the product runs.
    """
    shared = env.shared
    RELAXED: gl.constexpr = env.S.RELAXED
    layout: gl.constexpr = product_layout(CHUNK, 4)
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    col_layout: gl.constexpr = gl.SliceLayout(0, layout)
    dtype: gl.constexpr = shared.scores.dtype
    slot, score_slot = place_in(n, shared.DEPTH), place_in(n, shared.SCORE_DEPTH)
    # for B and C of the chunk from `loads`, and for its vectors from `gates`
    mbarrier.wait(shared.full.index(slot), phase(n, shared.DEPTH))
    CB_begun = bmm_chunk(shared, seen, n)
    row_0 = lane_of(shared.gates, slot * 4 + ROW, 0).load(row_layout)
    key_0 = lane_of(shared.gates, slot * 4 + KEY, 0).load(col_layout)
    if shared.UNITS == 2:
        row_1 = lane_of(shared.gates, slot * 4 + ROW, 1).load(row_layout)
    CB = warpgroup_mma_wait(0, deps=[CB_begun])
    # stage chunk_scan.current: the decayed scores
    result = decayed(CB, row_0, key_0, causal, RELAXED, dtype)
    if shared.UNITS == 2:
        # loaded no earlier, because registers of relaxed fp16 would spill beside the first unit's
        key_1 = lane_of(shared.gates, slot * 4 + KEY, 1).load(col_layout)
    mbarrier.wait(shared.unscored.index(score_slot), phase(n, shared.SCORE_DEPTH) ^ 1)
    if shared.UNITS == 2:
        shared.scores.index(score_slot * 2).store(result)
        result = decayed(CB, row_1, key_1, causal, RELAXED, dtype)
    mbarrier.arrive(shared.empty.index(slot), count=1)
    shared.scores.index(score_slot * shared.UNITS + shared.UNITS - 1).store(result)
    fence_async_shared()  # makes the stores visible to the asynchronous products of `units`
    mbarrier.arrive(shared.scored.index(score_slot), count=1)


@gluon.jit
def scores(env):
    """Role: compute the decayed scores of every chunk, and before them the weights of the first
    pass, which only a program with a single segment has.
    """
    layout: gl.constexpr = product_layout(CHUNK, 4)
    segment, _ = env.work.segment_at(0)
    seen = 0
    if segment.has_first_pass:
        seen = first_pass_gates(env, segment)
    o_q, o_s = tile_indices(CHUNK, CHUNK, layout)
    causal = gl.where(o_q[:, None] >= o_s[None, :], -1, 0).to(gl.int16)
    for n in range(env.work.chunks()):
        decayed_scores(env, seen, n, causal)
