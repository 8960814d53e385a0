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
    KEY,
    ROW,
    SLICE,
    B_place,
    C_place,
    async_load,
    async_store,
    load_gate,
    phase,
    place_in,
    product_layout,
    role_barrier,
    rows_of,
    scalar,
    x_place,
)

STAGES = {
    "load_x": "loads",
    "load_rows": "loads",
    "loads": "loads",
    "stores": "chunk_scan.residual",
    "masked": "caller",
    "decayed": "chunk_scan.current",
    "clear_rows": "bmm_chunk",
    "bmm_chunk": "bmm_chunk",
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


@gluon.jit
def load_x(shared, segment, place, t, x_desc, full, SLICES: gl.constexpr):
    for k in gl.static_range(shared.UNITS):
        unit = segment.unit + k
        x = shared.x.index(place * shared.UNITS + k)
        async_load(x_desc, [t, unit // SLICES, unit % SLICES * SLICE], full, x)


@gluon.jit
def load_rows(shared, place, t, desc, first_column, full):
    """B or C, in tiles of (q, half of N)."""
    WIDTH: gl.constexpr = shared.rows.shape[2]
    for k in gl.static_range(shared.HALVES):
        async_load(desc, [t, first_column + k * WIDTH], full, rows_of(shared, place, k))


@gluon.jit
def loads(
    shared, segment, x_desc, B_desc, C_desc,
    DSTATE: gl.constexpr, SLICES: gl.constexpr, HEADS_PER_GROUP: gl.constexpr,
):  # fmt: skip
    B_BYTES: gl.constexpr = CHUNK * DSTATE * 2
    X_BYTES: gl.constexpr = shared.UNITS * CHUNK * SLICE * 2
    first_column = segment.unit // SLICES // HEADS_PER_GROUP * DSTATE
    first = shared.first
    seen = 0
    if segment.goes_back:
        c = segment.seen - 1
        go = c >= 0
        while go:
            for k in gl.static_range(first.TURN):
                slot = place_in(seen + k, first.RING)
                full = first.full.index(slot)
                mbarrier.wait(first.empty.index(slot), phase(seen + k, first.RING) ^ 1)
                mbarrier.expect(full, B_BYTES + X_BYTES)
                # before the segment there are zeros, which the copy engine has before its first row
                t = gl.where(c >= k, segment.begin + (segment.seen_first + c - k) * CHUNK, -CHUNK)
                load_rows(shared, slot, t, B_desc, first_column, full)
                load_x(shared, segment, slot, t, x_desc, full, SLICES)
            word = seen // first.TURN
            mbarrier.wait(first.told.index(place_in(word, first.WORDS)), phase(word, first.WORDS))
            go = scalar(first.goes_on.index(place_in(word, first.WORDS))) != 0
            c -= first.TURN
            seen += first.TURN
    for i in range(segment.nchunks):
        slot = place_in(i, shared.RING)
        full = shared.full.index(slot)
        t = segment.begin + (segment.first + i) * CHUNK
        # the last chunk of the first pass that was where these go
        before = seen - first.RING + (i + 1) * shared.HALVES - 1
        here = (i < shared.RING) & (before >= 0)
        before = gl.maximum(before, 0)
        mbarrier.wait(first.empty.index(place_in(before, first.RING)), phase(before, first.RING), pred=here)
        mbarrier.wait(shared.empty.index(slot), phase(i, shared.RING) ^ 1)
        mbarrier.expect(full, 2 * B_BYTES + X_BYTES)
        load_rows(shared, B_place(shared, seen, i), t, B_desc, first_column, full)
        load_x(shared, segment, x_place(shared, seen, i), t, x_desc, full, SLICES)
        load_rows(shared, C_place(shared, seen, i), t, C_desc, first_column, full)


# --- stores


@gluon.jit
def stores(shared, segment, out_desc, SLICES: gl.constexpr):
    """Outputs of whole chunks.  What ends within one is stored by who made it."""
    OWN: gl.constexpr = shared.out.shape[1]
    end = segment.begin + segment.length
    for i in range(segment.nchunks):
        t = segment.begin + (segment.first + i) * CHUNK
        for k in gl.static_range(2):
            unit, row = segment.unit + k // shared.HALVES, t + k % shared.HALVES * OWN
            if row + OWN <= end:
                mbarrier.wait(shared.written.index(k), i & 1)
                async_store(out_desc, [row, unit // SLICES, unit % SLICES * SLICE], shared.out.index(k))
        tma.store_wait(0)
        if t + CHUNK <= end:  # or it is the last one
            for k in gl.static_range(2):
                mbarrier.arrive(shared.unwritten.index(k), count=1)


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
def clear_rows(buffer, valid):
    """Zero the rows (q, columns) from `valid` on: they are another sequence's, and 0 * NaN is NaN.

    Eight rows of 64 columns at a time: these lie together, those of the first 64 columns before the others.
    """
    AT_ONCE: gl.constexpr = 8
    BLOCKS: gl.constexpr = buffer.shape[1] // 64
    together: gl.constexpr = gl.NVMMASharedLayout.get_default_for([AT_ONCE, 64], buffer.dtype)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    rows = buffer._reinterpret(buffer.dtype, [BLOCKS * CHUNK // AT_ONCE, AT_ONCE, 64], together)
    o_q = gl.arange(0, AT_ONCE, gl.SliceLayout(1, layout))
    for k in range(BLOCKS * CHUNK // AT_ONCE):
        inside = gl.where(k * AT_ONCE % CHUNK + o_q < valid, -1, 0).to(gl.int16)
        rows.index(k).store(masked(rows.index(k).load(layout), inside[:, None]))


@gluon.jit
def bmm_chunk(shared, seen, i, zero):
    """C B^T of chunk i, begun."""
    CB = zero
    for k in gl.static_range(shared.HALVES):
        B = rows_of(shared, B_place(shared, seen, i), k).permute((1, 0))
        CB = warpgroup_mma(rows_of(shared, C_place(shared, seen, i), k), B, CB, use_acc=k > 0, is_async=True)
    return CB


@gluon.jit
def scores(
    shared, segment, rates, low, high,
    SLICES: gl.constexpr, DT_SOFTPLUS: gl.constexpr, RELAXED: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = product_layout(CHUNK)
    row: gl.constexpr = gl.SliceLayout(1, layout)
    col: gl.constexpr = gl.SliceLayout(0, layout)
    dtype: gl.constexpr = shared.scores.dtype
    seen = 0
    if segment.goes_back:
        seen = first_pass_gates(shared, segment, rates, low, high, SLICES, DT_SOFTPLUS)
    causal = gl.arange(0, CHUNK, row)[:, None] >= gl.arange(0, CHUNK, col)[None, :]
    causal = gl.where(causal, -1, 0).to(gl.int16)
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, layout)
    mbarrier.wait(shared.full.index(0), 0, pred=segment.nchunks > 0)
    CB_begun = bmm_chunk(shared, seen, 0, zero)
    for i in range(segment.nchunks):
        slot, stage = place_in(i, shared.RING), place_in(i, shared.SCORE_RING)
        row_0, key_0 = load_gate(shared, slot, ROW, 0, row), load_gate(shared, slot, KEY, 0, col)
        if shared.UNITS == 2:
            row_1 = load_gate(shared, slot, ROW, 1, row)
        CB = warpgroup_mma_wait(0, deps=[CB_begun])
        if RAGGED:  # scores with what follows the sequence are above the diagonal; its B and x would not be
            valid = segment.length - (segment.first + i) * CHUNK
            if valid < CHUNK:
                for k in range(shared.HALVES):
                    clear_rows(rows_of(shared, B_place(shared, seen, i), k), valid)
                for k in range(shared.UNITS):
                    clear_rows(
                        shared.x.index(x_place(shared, seen, i) * shared.UNITS + k).reshape([CHUNK, SLICE]), valid
                    )
                fence_async_shared()
                role_barrier()
        # stage chunk_scan.current: the decayed scores
        m = decayed(CB, row_0, key_0, causal, RELAXED, dtype)
        if shared.UNITS == 2:
            key_1 = load_gate(shared, slot, KEY, 1, col)
        mbarrier.wait(shared.unscored.index(stage), phase(i, shared.SCORE_RING) ^ 1)
        if shared.UNITS == 2:
            shared.scores.index(stage * 2).store(m)
            m = decayed(CB, row_1, key_1, causal, RELAXED, dtype)
        mbarrier.arrive(shared.empty.index(slot), count=1)
        shared.scores.index(stage * shared.UNITS + shared.UNITS - 1).store(m)
        fence_async_shared()
        mbarrier.arrive(shared.scored.index(stage), count=1)
        # stage bmm_chunk: the next product; after the last chunk it is not used
        following = i + 1
        more = following < segment.nchunks
        mbarrier.wait(shared.full.index(place_in(following, shared.RING)), phase(following, shared.RING), pred=more)
        CB_begun = bmm_chunk(shared, seen, following, zero)
    # stage bmm_chunk
    warpgroup_mma_wait(0, deps=[CB_begun])
