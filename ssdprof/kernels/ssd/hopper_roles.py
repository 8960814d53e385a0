# mypy: ignore-errors
"""The roles that load a chunk's B, C and x, make its scores, and store its output.  What roles share:
`hopper_shared.py`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ssdprof.kernels.ssd.hopper_gates import exp2_approx, first_pass_gates
from ssdprof.kernels.ssd.hopper_shared import (
    CHUNK,
    COLUMNS,
    KEY,
    ROW,
    SLICE,
    async_load,
    async_store,
    lane_of,
    phase,
    place_in,
    places_of,
    product_layout,
    reinterpret,
    rows_of,
    scalar,
)

STAGES = {
    "load_x": "loads",
    "load_rows": "loads",
    "load_first": "loads",
    "load_chunk": "loads",
    "segment_loads": "loads",
    "loads": "loads",
    "store_chunk": "chunk_scan.residual",
    "stores": "chunk_scan.residual",
    "masked": "caller",
    "decayed": "chunk_scan.current",
    "bmm_chunk": "bmm_chunk",
    "decayed_scores": "bmm_chunk",
    "scores": "bmm_chunk",
}
# What is waited for at a barrier, here or by others.  Those that wait for a free place are ahead of the others.
WAITS = {
    "full": "waiting.chunk",
    "scored": "waiting.scores",
    "told": "waiting.gates",
    "unwritten": "chunk_scan.residual",
    "empty": "ahead",
    "unscored": "ahead",
    "written": "ahead",
}


# --- loads


@gluon.constexpr_function
def bytes_of(shared, rows):
    """What a chunk's x takes, with B, and C if `rows` is 2."""
    return 2 * CHUNK * (shared.UNITS * SLICE + rows * shared.HALVES * shared.rows.shape[2])


@gluon.jit
def load_x(shared, segment, place, t, x_desc, full, SLICES: gl.constexpr):
    for k in gl.static_range(shared.UNITS):
        unit = segment.unit + k
        x = shared.x.index(place * shared.UNITS + k).reshape([1, 1, CHUNK, SLICE])
        async_load(x_desc, [segment.tile, unit // SLICES, segment.row + t, unit % SLICES * SLICE], full, x)


@gluon.jit
def load_rows(shared, segment, place, t, desc, first_block, full):
    """B or C, in tiles of (q, half of N): blocks of 64 columns that lie one behind the other."""
    BLOCKS: gl.constexpr = shared.rows.shape[2] // COLUMNS
    for k in gl.static_range(shared.HALVES):
        rows = rows_of(shared, place, k)
        rows = reinterpret(rows, rows.dtype, [1, BLOCKS, CHUNK, COLUMNS], desc.layout)
        async_load(desc, [segment.tile, first_block + k * BLOCKS, segment.row + t, 0], full, rows)


@gluon.jit
def load_first(shared, segment, seen, k: gl.constexpr, descs, first_block, SLICES: gl.constexpr):
    """What chunk k of the turn after `seen` chunks of the first pass needs."""
    first = shared.first
    x_desc, B_desc, _ = descs
    slot = place_in(seen + k, first.RING)
    full = first.full.index(slot)
    # before the segment there are zeros, which the copy engine has past the sequence's end
    c = segment.back_most - 1 - seen - k
    t = gl.where(c >= 0, (segment.back_first + c) * CHUNK, segment.length)
    mbarrier.wait(first.empty.index(slot), phase(seen + k, first.RING) ^ 1)
    mbarrier.expect(full, bytes_of(shared, rows=1))
    load_rows(shared, segment, slot, t, B_desc, first_block, full)
    load_x(shared, segment, slot, t, x_desc, full, SLICES)


@gluon.jit
def load_chunk(shared, segment, seen, i, n, descs, first_block, SLICES: gl.constexpr):
    """What chunk i of the segment's second pass needs, the program's n-th."""
    first = shared.first
    x_desc, B_desc, C_desc = descs
    slot = place_in(n, shared.RING)
    full = shared.full.index(slot)
    t = (segment.first_chunk + i) * CHUNK
    # the last chunk of the first pass that was where these go
    before = seen - first.RING + (n + 1) * shared.HALVES - 1
    here = (n < shared.RING) & (before >= 0)
    before = gl.maximum(before, 0)
    mbarrier.wait(first.empty.index(place_in(before, first.RING)), phase(before, first.RING), pred=here)
    mbarrier.wait(shared.empty.index(slot), phase(n, shared.RING) ^ 1)
    mbarrier.expect(full, bytes_of(shared, rows=2))
    B, C, x = places_of(shared, seen, n)
    load_rows(shared, segment, B, t, B_desc, first_block, full)
    load_x(shared, segment, x, t, x_desc, full, SLICES)
    load_rows(shared, segment, C, t, C_desc, first_block, full)


@gluon.jit
def segment_loads(shared, segment, n, descs, DSTATE: gl.constexpr, SLICES: gl.constexpr, HEADS_PER_GROUP: gl.constexpr):
    """What a segment needs, after n chunks of others."""
    first_block = segment.unit // SLICES // HEADS_PER_GROUP * (DSTATE // COLUMNS)
    first = shared.first
    seen = 0
    if segment.goes_back:
        go = segment.back_most > 0
        while go:
            for k in gl.static_range(first.TURN):
                load_first(shared, segment, seen, k, descs, first_block, SLICES)
            word = seen // first.TURN
            mbarrier.wait(first.told.index(place_in(word, first.WORDS)), phase(word, first.WORDS))
            go = scalar(first.goes_on.index(place_in(word, first.WORDS))) != 0
            seen += first.TURN
    for i in range(segment.nchunks):
        load_chunk(shared, segment, seen, i, n + i, descs, first_block, SLICES)


@gluon.jit
def loads(
    shared, work, x_desc, B_desc, C_desc,
    DSTATE: gl.constexpr, SLICES: gl.constexpr, HEADS_PER_GROUP: gl.constexpr,
):  # fmt: skip
    descs = (x_desc, B_desc, C_desc)
    for k in range(work.segments()):
        segment, n = work.segment_at(k)
        segment_loads(shared, segment, n, descs, DSTATE, SLICES, HEADS_PER_GROUP)


# --- stores


@gluon.jit
def store_chunk(shared, segment, i, n, out_desc, SLICES: gl.constexpr):
    """The output of chunk i of the segment, the program's n-th, up to the sequence's end."""
    OWN: gl.constexpr = shared.out.shape[1]
    t = (segment.first_chunk + i) * CHUNK
    for k in gl.static_range(2):
        unit, row = segment.unit + k // shared.HALVES, segment.row + t + k % shared.HALVES * OWN
        out = shared.out.index(k).reshape([1, 1, OWN, SLICE])
        mbarrier.wait(shared.written.index(k), n & 1)
        async_store(out_desc, [segment.tile, unit // SLICES, row, unit % SLICES * SLICE], out)
    tma.store_wait(0)
    for k in gl.static_range(2):
        mbarrier.arrive(shared.unwritten.index(k), count=1)


@gluon.jit
def stores(shared, work, out_desc, SLICES: gl.constexpr):
    for k in range(work.segments()):
        segment, n = work.segment_at(k)
        for i in range(segment.nchunks):
            store_chunk(shared, segment, i, n + i, out_desc, SLICES)


# --- scores


@gluon.jit
def masked(v, bits):
    """v where all of `bits` are set, 0 where none is; two at a time."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [v, bits], dtype=v.dtype, is_pure=True, pack=2)


@gluon.jit
def decayed(CB, row, key, causal, RELAXED: gl.constexpr, dtype: gl.constexpr):
    """CB * 2^(a_q - a_s) * dt_s where s <= q, else 0; `causal` has all bits set there, and none elsewhere."""
    decay = exp2_approx(row[:, None] - key[None, :])
    scores = CB.to(dtype) * decay.to(dtype) if RELAXED else (CB * decay).to(dtype)
    return masked(scores, causal)  # after all that may overflow above the diagonal


@gluon.jit
def bmm_chunk(shared, seen, n):
    """C B^T of the n-th chunk, begun."""
    B, C, _ = places_of(shared, seen, n)
    CB = gl.full([CHUNK, CHUNK], 0.0, gl.float32, product_layout(CHUNK, 4))
    for k in gl.static_range(shared.HALVES):
        B_t = rows_of(shared, B, k).permute((1, 0))
        CB = warpgroup_mma(rows_of(shared, C, k), B_t, CB, use_acc=k > 0, is_async=True)
    return CB


@gluon.jit
def decayed_scores(shared, seen, n, causal, RELAXED: gl.constexpr):
    """Both units' scores of the n-th chunk.  Vectors of gates are loaded while the product runs."""
    layout: gl.constexpr = product_layout(CHUNK, 4)
    row: gl.constexpr = gl.SliceLayout(1, layout)
    col: gl.constexpr = gl.SliceLayout(0, layout)
    dtype: gl.constexpr = shared.scores.dtype
    slot, stage = place_in(n, shared.RING), place_in(n, shared.SCORE_RING)
    mbarrier.wait(shared.full.index(slot), phase(n, shared.RING))
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
    mbarrier.wait(shared.unscored.index(stage), phase(n, shared.SCORE_RING) ^ 1)
    if shared.UNITS == 2:
        shared.scores.index(stage * 2).store(m)
        m = decayed(CB, row_1, key_1, causal, RELAXED, dtype)
    mbarrier.arrive(shared.empty.index(slot), count=1)
    shared.scores.index(stage * shared.UNITS + shared.UNITS - 1).store(m)
    fence_async_shared()
    mbarrier.arrive(shared.scored.index(stage), count=1)


@gluon.jit
def scores(
    shared, work, rates, low, high, SLICES: gl.constexpr, DT_SOFTPLUS: gl.constexpr, RELAXED: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = product_layout(CHUNK, 4)
    segment, _ = work.segment_at(0)
    seen = 0
    if segment.goes_back:
        seen = first_pass_gates(shared, segment, rates, low, high, SLICES, DT_SOFTPLUS)
    o_q, o_s = gl.arange(0, CHUNK, gl.SliceLayout(1, layout)), gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    causal = gl.where(o_q[:, None] >= o_s[None, :], -1, 0).to(gl.int16)
    for n in range(work.chunks()):
        decayed_scores(shared, seen, n, causal, RELAXED)
