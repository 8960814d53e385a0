# mypy: ignore-errors
"""Role `loads`: loads B, C and x of each chunk through TMA.  Shared memory: `rings.py`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ssdprof.kernels.ssd.hopper.rings import (
    CHUNK,
    COLUMNS,
    SLICE,
    async_load,
    phase,
    place_in,
    places_of,
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
}
# Stage of a wait at each barrier, in this role or another.  A role that waits for a free slot is ahead of the others.
WAITS = {"full": "waiting.chunk", "told": "waiting.gates", "empty": "ahead"}


@gluon.constexpr_function
def bytes_of(shared, rows):
    """Bytes of a chunk's x and B, and C if `rows` is 2."""
    return 2 * CHUNK * (shared.UNITS * SLICE + rows * shared.HALVES * shared.rows.shape[2])


@gluon.jit
def load_x(shared, segment, place, t, x_desc, full, SLICES: gl.constexpr):
    for k in gl.static_range(shared.UNITS):
        unit = segment.unit + k
        x = shared.x.index(place * shared.UNITS + k).reshape([1, 1, CHUNK, SLICE])
        async_load(x_desc, [segment.tile, unit // SLICES, segment.row + t, unit % SLICES * SLICE], full, x)


@gluon.jit
def load_rows(shared, segment, place, t, desc, first_block, full):
    """Load B or C in tiles of (q, half of N), each stored as consecutive blocks of 64 columns."""
    BLOCKS: gl.constexpr = shared.rows.shape[2] // COLUMNS
    for k in gl.static_range(shared.HALVES):
        rows = rows_of(shared, place, k)
        rows = reinterpret(rows, rows.dtype, [1, BLOCKS, CHUNK, COLUMNS], desc.layout)
        async_load(desc, [segment.tile, first_block + k * BLOCKS, segment.row + t, 0], full, rows)


@gluon.jit
def load_first(shared, segment, seen, k: gl.constexpr, descs, first_block, SLICES: gl.constexpr):
    """Load chunk k of the turn after `seen` chunks of the first pass."""
    first = shared.first
    x_desc, B_desc, _ = descs
    slot = place_in(seen + k, first.RING)
    full = first.full.index(slot)
    # a chunk before the segment must be zero, so read past the sequence's end, where TMA returns zeros
    c = segment.back_most - 1 - seen - k
    t = gl.where(c >= 0, (segment.back_first + c) * CHUNK, segment.length)
    mbarrier.wait(first.empty.index(slot), phase(seen + k, first.RING) ^ 1)
    mbarrier.expect(full, bytes_of(shared, rows=1))
    load_rows(shared, segment, slot, t, B_desc, first_block, full)
    load_x(shared, segment, slot, t, x_desc, full, SLICES)


@gluon.jit
def load_chunk(shared, segment, seen, i, n, descs, first_block, SLICES: gl.constexpr):
    """Load chunk i of the segment's second pass, the program's n-th."""
    first = shared.first
    x_desc, B_desc, C_desc = descs
    slot = place_in(n, shared.RING)
    full = shared.full.index(slot)
    t = (segment.first_chunk + i) * CHUNK
    # the last chunk of the first pass that used these slots
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
    """Load the tiles of a segment.  n: the program's chunks before it"""
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
