# mypy: ignore-errors
"""The roles that load a chunk's B, C and x and make its scores.  What roles share: `hopper_shared.py`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ssdprof.kernels.ssd.hopper_gates import exp2_approx, first_pass_gates
from ssdprof.kernels.ssd.hopper_shared import (
    CHUNK,
    KEY,
    ROW,
    SLICE,
    async_load,
    load_gate,
    role_barrier,
    scalar,
)

STAGES = {
    "load_x": "loads",
    "load_rows": "loads",
    "loads": "loads",
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
    "empty": "ahead",
    "unscored": "ahead",
}


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
