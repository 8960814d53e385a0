# mypy: ignore-errors
"""Segments whose head forgets too slowly: which they are, and the parts of a sequence that are computed for them.

A first pass of more than `limit` chunks is not made.  The state that would come of it comes from parts of the segment
before instead, each computed by a program of its own from a zero state (N) and with the identity as state and zeros as
values (M, the transition matrix of the part):

    state after a part = M (state before it) + N

N of the segment's first part has M in it where the state before it is known: at the sequence's start, and after a first
pass where the head forgets.  `combine_kernel.py` takes the parts together.

A row is a segment that does not begin its sequence, and a head: heads fastest, then sequences, then segments, as
programs of `hopper_kernel.py` are.  All programs find the same rows, and take each so-many-th of their parts.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from ssdprof.kernels._gluon import add, role_barrier, scalar
from ssdprof.kernels.gdn.hopper.assignment import Segment, Sequence, sequence_at
from ssdprof.kernels.gdn.hopper.rings import CHUNK

LEAST_ROWS, MOST_ROWS = 128, 512
LOOKS = gl.constexpr(4096)  # chunks' bounds looked at side by side, of all rows
FIELDS = gl.constexpr(12)  # of a part in the table

STAGES = {
    "segments": "ticket",
    "segment_at": "ticket",
    "first_passes": "ticket",
    "write_part": "ticket",
    "parts_of": "ticket",
    "field": "ticket",
}


@aggregate
class Parts:
    """The parts that a program computes, one after the other."""

    table: gl.shared_memory_descriptor  # (parts * FIELDS, 1)
    count: gl.tensor
    MAKES_PARTS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, table, count):
        self.table, self.count, self.MAKES_PARTS = table, count, gl.constexpr(True)

    @gluon.jit
    def segments(self):
        return self.count

    @gluon.jit
    def field(self, k, which: gl.constexpr):
        return scalar(self.table.index(k * FIELDS + which))

    @gluon.jit
    def segment_at(self, k):
        """The k-th one as a first pass without a second, and the program's chunks before it."""
        sequence = Sequence(
            self.field(k, 0), self.field(k, 1), self.field(k, 2), self.field(k, 3), self.field(k, 4), self.field(k, 5)
        )  # fmt: skip
        segment = Segment(
            sequence, self.field(k, 6), self.field(k, 7), self.field(k, 8), self.field(k, 9), gl.to_tensor(0), k < 0,
            self.field(k, 10),
        )  # fmt: skip
        return segment, self.field(k, 11)


@gluon.jit
def first_passes(
    rows, seqlen, sequences, cu_seqlens_ptr, cu_stride, bounds_ptr, slots, K, limit, enough,
    HEADS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Chunks of each row's first pass; -1 if the head forgets too slowly, 0 if there is no such segment."""
    LOOK: gl.constexpr = LOOKS // ROWS
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // LOOK, LOOK // 4], [gl.num_warps(), 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    row, o_c = gl.arange(0, ROWS, by_row), gl.arange(0, LOOK, gl.SliceLayout(0, layout))
    sequence = sequence_at(row // HEADS % sequences, seqlen, cu_seqlens_ptr, cu_stride)
    first = (row // HEADS // sequences + 1) * K
    exists = (row < rows) & (first < gl.cdiv(sequence.length, CHUNK))
    bounds = bounds_ptr + (row % HEADS).to(gl.int64) * slots + sequence.slot
    back, left = gl.full([ROWS], -1, gl.int32, by_row), gl.full([ROWS], 0.0, gl.float32, by_row)
    seen = gl.to_tensor(0)
    go = gl.max(exists.to(gl.int32), 0) > 0
    while go:
        c = (first - 1 - seen)[:, None] - o_c[None, :]
        wanted = (exists & (back < 0))[:, None] & (c >= 0)
        bound = gl.load(bounds[:, None] + gl.maximum(c, 0), mask=wanted, other=0.0)
        sums = left[:, None] + gl.associative_scan(bound, 1, add)
        reached = gl.min(gl.where(wanted & (sums <= enough), o_c[None, :], LOOK), 1)
        back = gl.where(reached < LOOK, seen + reached + 1, back)
        left += gl.sum(bound, 1)
        seen += LOOK
        go = (seen < limit) & (gl.max((exists & (back < 0)).to(gl.int32), 0) > 0)
    back = gl.where(back < 0, first, back)  # over all that is before, if that is short
    return gl.where(exists, gl.where(back > limit, -1, back), 0)


@gluon.jit
def write_part(table, k, t, before, row, previous, sequence, K, pairs, HEADS: gl.constexpr, PARTS: gl.constexpr):
    """Part t % (2 PARTS) of a row as the k-th one, with so many chunks before; returns its chunks, too.

    previous: chunks of the first pass of the row of the segment before, -1 if that one forgets too slowly
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    part, transition = t % PARTS, t // PARTS % 2
    begin = row // pairs * K + part * (K // PARTS)
    known = (part == 0) & (previous >= 0)
    # the transition matrix where the state before is known: nothing
    chunks = K // PARTS + gl.where(known, gl.where(transition == 1, -(K // PARTS), previous), 0)
    head = row % HEADS
    fields = (
        sequence.index, sequence.begin, sequence.length, sequence.tile, sequence.row, sequence.slot,
        head, gl.where(transition == 1, HEADS, head), begin + K // PARTS, chunks, (row * PARTS + part) * 2 + transition,
        before,
    )  # fmt: skip
    for i in gl.static_range(FIELDS):
        table.index(k * FIELDS + i).store(gl.full([1], 0, gl.int32, layout) + fields[i])
    return before + chunks


@gluon.jit
def parts_of(
    program, programs, rows, seqlen, sequences, cu_seqlens_ptr, cu_stride, bounds_ptr, slots, K, limit, enough,
    backs_ptr, HEADS: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, MOST: gl.constexpr,
):  # fmt: skip
    """The program's parts, MOST at most.  The first program stores the rows' first passes for the launches after."""
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    backs = first_passes(
        rows, seqlen, sequences, cu_seqlens_ptr, cu_stride, bounds_ptr, slots, K, limit, enough, HEADS, ROWS
    )  # fmt: skip
    backs, o_r = gl.convert_layout(backs, vector), gl.arange(0, ROWS, vector)
    if program == 0:
        gl.store(backs_ptr + o_r, backs, mask=o_r < rows)
    slow = (backs < 0).to(gl.int32)
    upto = gl.associative_scan(slow, 0, add)
    table = gl.allocate_shared_memory(gl.int32, [MOST * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    count = gl.maximum(gl.cdiv(gl.sum(slow, 0) * (2 * PARTS) - program, programs), 0)
    pairs = sequences * HEADS
    before = gl.to_tensor(0)
    for k in range(count):
        t = program + k * programs
        row = gl.sum((upto <= t // (2 * PARTS)).to(gl.int32), 0)
        previous = gl.sum(gl.where(o_r == row - pairs, backs, 0), 0)  # 0 where the segment before begins its sequence
        sequence = sequence_at(row // HEADS % sequences, seqlen, cu_seqlens_ptr, cu_stride)
        before = write_part(table, k, t, before, row, previous, sequence, K, pairs, HEADS, PARTS)
    role_barrier()
    return Parts(table, count)
