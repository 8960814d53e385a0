# mypy: ignore-errors
"""Segments of heads that forget too slowly for a first pass, and the parts of a sequence that replace it.

If a first pass would have more than `limit` chunks, the state that enters the segment is computed from the parts of the
preceding segment.  A part has two matrices, computed as two items of work: N, its final state from a zero state, and M,
its transition matrix, computed with the identity as the initial state and zeros as values:

    state after a part = M (state before it) + N

The state before a segment's first part is known at the sequence's start, or if a first pass can compute it.  N of that
part then starts from the known state, and M is not computed.  `combine_kernel.py` combines the parts.

A row is a pair of a head and a segment that does not begin its sequence.  Heads vary fastest, then sequences, then
segments, as programs of `hopper_kernel.py` do.  All programs find the same rows, and program p of n computes items p,
p + n, p + 2n and so on.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from ssdprof.kernels._gluon import add, role_barrier, scalar
from ssdprof.kernels.gdn.hopper.assignment import GDNSegment, Sequence, sequence_at
from ssdprof.kernels.hopper.ring import CHUNK

LEAST_ROWS, MOST_ROWS = 128, 512
LOOKS = gl.constexpr(4096)  # bounds that one iteration reads, for all rows together
FIELDS = gl.constexpr(12)  # table entries per part

STAGES = {
    "segments": "ticket", "segment_at": "ticket", "first_passes": "ticket", "write_part": "ticket",
    "parts_of": "ticket", "field": "ticket",
}  # fmt: skip


@aggregate
class Parts:
    """The parts that a program computes, in order."""

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
        """The k-th part, as a segment with a first pass only, and the number of the program's chunks before it."""
        sequence = Sequence(
            self.field(k, 0), self.field(k, 1), self.field(k, 2), self.field(k, 3), self.field(k, 4), self.field(k, 5)
        )  # fmt: skip
        segment = GDNSegment(
            sequence, self.field(k, 6), self.field(k, 7), self.field(k, 8), self.field(k, 9), gl.to_tensor(0), k < 0,
            self.field(k, 10),
        )  # fmt: skip
        return segment, self.field(k, 11)


@gluon.jit
def first_passes(
    rows, seqlen, sequences, cu_seqlens_ptr, cu_stride, bounds_ptr, slots, K, limit, enough,
    HEADS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Chunks of each row's first pass; -1 if the head forgets too slowly, 0 if the segment does not exist."""
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
    back = gl.where(back < 0, first, back)  # without a negligible state: all chunks before the segment
    return gl.where(exists, gl.where(back > limit, -1, back), 0)


@gluon.jit
def write_part(table, k, t, before, row, previous, sequence, K, pairs, HEADS: gl.constexpr, PARTS: gl.constexpr):
    """Write item t % (2 PARTS) of a row as the program's k-th part.  Returns `before` plus the chunks of the part.

    before: the program's chunks before this part
    previous: chunks of the preceding segment's first pass, -1 if the head forgets too slowly for one
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    part, transition = t % PARTS, t // PARTS % 2
    begin = row // pairs * K + part * (K // PARTS)
    known = (part == 0) & (previous >= 0)
    # if the state before is known: N with the first pass before it, and no chunks for M
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
    """The program's parts, at most MOST.  Program 0 stores the lengths of first passes for the next launches."""
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
        previous = gl.sum(gl.where(o_r == row - pairs, backs, 0), 0)  # 0 if that segment begins its sequence
        sequence = sequence_at(row // HEADS % sequences, seqlen, cu_seqlens_ptr, cu_stride)
        before = write_part(table, k, t, before, row, previous, sequence, K, pairs, HEADS, PARTS)
    role_barrier()
    return Parts(table, count)
