"""Roles `loads`, which loads B, C and x of each chunk through TMA, and `stores`, which stores the
chunk's output.  Shared memory: `rings.py`.

`t` is the position of a chunk in its sequence, `segment.row + t` its third TMA coordinate.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ssdprof.kernels._gluon import async_load, async_store, phase, place_in, reinterpret, scalar
from ssdprof.kernels.hopper.ring import CHUNK
from ssdprof.kernels.ssd.hopper.rings import COLUMNS, SLICE, rows_of, slots_of

# stages of functions: `stalls/attribute.py`
STAGES = {
    "load_x": "loads",
    "load_rows": "loads",
    "load_first": "loads",
    "load_chunk": "loads",
    "loads": "loads",
    "store_chunk": "chunk_scan.residual",
    "stores": "chunk_scan.residual",
}
# Stage of a wait at each barrier.  In a wait "ahead", the role waits for a free slot, or for an
# output to store, and delays no other role.
WAITS = {"continue_barrier": "waiting.gates", "empty": "ahead", "written": "ahead"}


@gluon.constexpr_function
def bytes_of(shared, rows):
    """Bytes of a chunk's tiles of 16-bit numbers: x and B if `rows` is 1; x, B and C if it is 2."""
    return 2 * CHUNK * (shared.UNITS * SLICE + rows * shared.N_SPLIT * shared.rows.shape[2])


@gluon.jit
def load_x(env, segment, slot, t, full):
    """Load x (q, p) of the chunk at position t for all units into a slot.

    full: the slot's barrier
    """
    shared = env.shared
    for k in gl.static_range(shared.UNITS):
        unit = segment.unit + k
        x = shared.x.index(slot * shared.UNITS + k).reshape([1, 1, CHUNK, SLICE])
        where = [segment.tile, unit // env.S.SLICES, segment.row + t, unit % env.S.SLICES * SLICE]
        async_load(env.descs[0], where, full, x)  # the descriptor of x


@gluon.jit
def load_rows(shared, segment, slot, t, desc, first_block, full):
    """Load B or C of the chunk at position t into a slot: a tile (q, n), or one for each half of N,
    each as consecutive blocks of COLUMNS columns.

    desc: descriptor of B or of C.  first_block: the group's first block of columns in the tensor.
    full: the slot's barrier
    """
    BLOCKS: gl.constexpr = shared.rows.shape[2] // COLUMNS
    for k in gl.static_range(shared.N_SPLIT):
        rows = rows_of(shared, slot, k)
        rows = reinterpret(rows, rows.dtype, [1, BLOCKS, CHUNK, COLUMNS], desc.layout)
        async_load(desc, [segment.tile, first_block + k * BLOCKS, segment.row + t, 0], full, rows)


@gluon.jit
def load_first(env, segment, seen, chunk: gl.constexpr, first_block):
    """Load B and x of a chunk of the turn after `seen` chunks of the first pass.

    chunk: its index in the turn.  first_block: see `load_rows`
    """
    shared = env.shared
    first = shared.first
    slot = place_in(seen + chunk, first.DEPTH)
    full = first.full.index(slot)
    # c counts chunks from the one at which the first pass ends.  A chunk before that one must be
    # zero: it is read past the sequence's end, where TMA returns zeros
    c = segment.first_pass_chunks - 1 - seen - chunk
    t = gl.where(c >= 0, (segment.first_pass_end + c) * CHUNK, segment.length)
    mbarrier.wait(first.empty.index(slot), phase(seen + chunk, first.DEPTH) ^ 1)
    mbarrier.expect(full, bytes_of(shared, rows=1))
    load_rows(shared, segment, slot, t, env.descs[1], first_block, full)  # B
    load_x(env, segment, slot, t, full)


@gluon.jit
def load_chunk(env, segment, seen, i, n, first_block):
    """Load B, C and x of chunk i of the segment's second pass, the program's n-th.

    seen: chunks of the first pass.  first_block: see `load_rows`
    """
    shared = env.shared
    first = shared.first
    slot = place_in(n, shared.DEPTH)
    full = shared.full.index(slot)
    t = (segment.first_chunk + i) * CHUNK
    # `before` is the last chunk of the first pass that used these slots; negative: none did.  Wait
    # until `units` has read it
    before = seen - first.DEPTH + (n + 1) * shared.N_SPLIT - 1
    was_used = (n < shared.DEPTH) & (before >= 0)
    before = gl.maximum(before, 0)
    first_slot = place_in(before, first.DEPTH)
    mbarrier.wait(first.empty.index(first_slot), phase(before, first.DEPTH), pred=was_used)
    # wait until the chunk of the second pass that used these barriers before has been read
    mbarrier.wait(shared.empty.index(slot), phase(n, shared.DEPTH) ^ 1)
    mbarrier.expect(full, bytes_of(shared, rows=2))
    B_slot, C_slot, x_slot = slots_of(shared, seen, n)
    load_rows(shared, segment, B_slot, t, env.descs[1], first_block, full)  # B
    load_x(env, segment, x_slot, t, full)
    load_rows(shared, segment, C_slot, t, env.descs[2], first_block, full)  # C


@gluon.jit
def loads(env):
    """Role: load x, B and C of every chunk.  After each turn of the first pass, `scores` says
    whether another one follows: none does if all chunks are read, or if earlier ones have decayed.
    """
    first = env.shared.first
    for i_segment in range(env.work.segments()):
        segment, n = env.work.segment_at(i_segment)
        group = segment.unit // env.S.SLICES // env.S.HEADS_PER_GROUP
        first_block = group * (env.S.DSTATE // COLUMNS)
        seen = 0  # chunks of the first pass
        if segment.has_first_pass:
            goes_on = segment.first_pass_chunks > 0
            while goes_on:
                for chunk in gl.static_range(first.TURN):
                    load_first(env, segment, seen, chunk, first_block)
                # whether another turn follows: `scores` has written the flag when it arrives
                turn = seen // first.TURN
                slot = place_in(turn, first.FLAG_SLOTS)
                mbarrier.wait(first.continue_barrier.index(slot), phase(turn, first.FLAG_SLOTS))
                goes_on = scalar(first.continue_flag.index(slot)) != 0
                seen += first.TURN
        for i in range(segment.nchunks):
            load_chunk(env, segment, seen, i, n + i, first_block)


@gluon.jit
def store_chunk(env, segment, i, n):
    """Store the output of chunk i of the segment, the program's n-th, up to the sequence's end: one
    tile from each lane, with the output of its unit, or with half of the positions of the only one.
    """
    shared = env.shared
    OWN: gl.constexpr = shared.out.shape[1]  # positions of a chunk whose output one lane finishes
    t = (segment.first_chunk + i) * CHUNK
    for lane in gl.static_range(2):
        unit = segment.unit + lane // shared.N_SPLIT
        row = segment.row + t + lane % shared.N_SPLIT * OWN
        out = shared.out.index(lane).reshape([1, 1, OWN, SLICE])
        mbarrier.wait(shared.written.index(lane), n & 1)
        where = [segment.tile, unit // env.S.SLICES, row, unit % env.S.SLICES * SLICE]
        async_store(env.descs[3], where, out)  # the descriptor of out
    tma.store_wait(0)  # until TMA has read both tiles
    for lane in gl.static_range(2):
        mbarrier.arrive(shared.unwritten.index(lane), count=1)


@gluon.jit
def stores(env):
    """Role: store the outputs of all segments of the program."""
    for i_segment in range(env.work.segments()):
        segment, n = env.work.segment_at(i_segment)
        for i in range(segment.nchunks):
            store_chunk(env, segment, i, n + i)
