# mypy: ignore-errors
"""Which chunks of which head are a program's: a segment of a sequence, or whole sequences one after the other.

A segment that does not begin its sequence needs the state that enters it.  A first pass over chunks before it makes
that state, from the nearest chunk before which nothing counts any more:

    |what entered chunk c, as far as it is left in the state at chunk f|  <=  2^(sum of bounds of chunks c .. f - 1)

times its own size, for the transition of a token is exp(g) (I - beta k k^T), whose 2-norm is at most
exp(g) max(1, |1 - beta |k|^2|).  `prep_kernel.py` sums the logarithms over each chunk.  Where a head forgets slowly,
the state that enters a segment comes from earlier launches (`parts.py`), or the first pass goes over all that is
before.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from ssdprof.kernels._gluon import add
from ssdprof.kernels.gdn.hopper.rings import CHUNK

BLOCK = gl.constexpr(256)  # chunks' sums looked at side by side
FIRST_PASS_16THS = gl.constexpr(9)  # of the time of a chunk of the second pass, that one of a first pass takes

STAGES = {
    "segments": "ticket",
    "segment_at": "ticket",
    "chunks": "ticket",
    "chunk_at": "ticket",
    "sequence_at": "ticket",
    "packed_slot": "ticket",
    "segment_of": "ticket",
    "lead_of": "ticket",
    "boundary": "ticket",
    "first_pass_of": "ticket",
}


@aggregate
class Sequence:
    """Where a sequence lies."""

    index: gl.tensor
    begin: gl.tensor  # position in g and beta
    length: gl.tensor
    tile: gl.tensor  # first coordinate of its tiles for the copy engine
    row: gl.tensor  # what is added to the third one; beyond the sequence's end are zeros
    slot: gl.tensor  # of its first chunk among all chunks

    @gluon.constexpr_function
    def __init__(self, index, begin, length, tile, row, slot):
        self.index, self.begin, self.length, self.tile, self.row, self.slot = index, begin, length, tile, row, slot


@aggregate
class Segment:
    """The part of a sequence that a program takes, for one value head."""

    sequence: Sequence
    head: gl.tensor
    value_head: gl.tensor  # whose v is loaded; past the last one are zeros
    first: gl.tensor  # chunk
    back: gl.tensor  # chunks before it, over which the first pass goes
    nchunks: gl.tensor
    last: gl.tensor  # the sequence ends with it
    row: gl.tensor  # of the state that enters it, or that it makes, among those of slow heads; -1: there is none
    MAKES_PARTS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, sequence, head, value_head, first, back, nchunks, last, row):
        self.sequence, self.head, self.value_head, self.first, self.back = sequence, head, value_head, first, back
        self.nchunks, self.last, self.row, self.MAKES_PARTS = nchunks, last, row, gl.constexpr(False)

    @gluon.jit
    def segments(self):
        return 1

    @gluon.jit
    def segment_at(self, k):  # noqa: ARG002
        return self, 0

    @gluon.jit
    def chunks(self):
        """Chunks of all segments, where none has a first pass."""
        return self.nchunks

    @gluon.jit
    def chunk_at(self, n):
        """The n-th one's segment and its place in its sequence."""
        return self, self.first + n


@aggregate
class Wholes:
    """Whole sequences of equal length: of all pairs of a sequence and a head, heads fastest, each programs-th."""

    program: gl.tensor
    programs: gl.tensor
    pairs: gl.tensor
    seqlen: gl.tensor
    nchunks: gl.tensor
    HEADS: gl.constexpr
    MAKES_PARTS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, program, programs, pairs, seqlen, nchunks, HEADS):
        self.program, self.programs, self.pairs = program, programs, pairs
        self.seqlen, self.nchunks, self.HEADS = seqlen, nchunks, gl.constexpr(HEADS)
        self.MAKES_PARTS = gl.constexpr(False)

    @gluon.jit
    def segments(self):
        return gl.cdiv(self.pairs - self.program, self.programs)

    @gluon.jit
    def segment_at(self, k):
        """The k-th one, and the program's chunks before it."""
        pair = self.program + k * self.programs
        i = pair // self.HEADS
        sequence = Sequence(i, gl.to_tensor(0), self.seqlen, i, gl.to_tensor(0), i * self.nchunks)
        zero, head = gl.to_tensor(0), pair % self.HEADS
        return Segment(sequence, head, head, zero, zero, self.nchunks, k >= 0, zero - 1), k * self.nchunks

    @gluon.jit
    def chunks(self):
        return self.segments() * self.nchunks

    @gluon.jit
    def chunk_at(self, n):
        segment, before = self.segment_at(n // self.nchunks)
        return segment, n - before


@gluon.jit
def sequence_at(i, seqlen, cu_seqlens_ptr, cu_stride):
    """Sequence i.  Packed ones have slots of their own by their first position, rounded down, and their number."""
    if cu_seqlens_ptr is None:
        return Sequence(i, gl.to_tensor(0), seqlen, i, gl.to_tensor(0), i * gl.cdiv(seqlen, CHUNK))
    else:
        p = cu_seqlens_ptr + i.to(gl.int64) * cu_stride
        begin, end = gl.load(p).to(gl.int32), gl.load(p + cu_stride).to(gl.int32)
        return Sequence(i, begin, end - begin, end, seqlen - (end - begin), begin // CHUNK + i)


@gluon.jit
def packed_slot(slot, sequences, cu_seqlens_ptr, cu_stride):
    """The sequence whose chunks' slots begin at `slot` or nearest before it."""
    low, high = gl.to_tensor(0), gl.to_tensor(sequences)
    while high - low > 1:
        middle = (low + high) // 2
        begin = gl.load(cu_seqlens_ptr + middle.to(gl.int64) * cu_stride).to(gl.int32)
        before = begin // CHUNK + middle <= slot
        low, high = gl.where(before, middle, low), gl.where(before, high, middle)
    return low


@gluon.jit
def segment_of(
    program, seqlen, sequences, cu_seqlens_ptr, cu_stride, bounds_ptr, slots, K, enough, backs_ptr,
    HEADS: gl.constexpr, LEADS: gl.constexpr,
):  # fmt: skip
    """Heads fastest, then sequences, then segments of K chunks.  backs: what `parts.py` found, if it was asked.

    With LEADS, segments have K chunks on average: the first one is longer (`lead_of`).
    bounds: None if segments are whole sequences
    """
    rank = program // HEADS
    sequence = sequence_at(rank % sequences, seqlen, cu_seqlens_ptr, cu_stride)
    s = rank // sequences
    head, first = program % HEADS, s * K
    length = gl.cdiv(sequence.length, CHUNK)
    nchunks = gl.maximum(gl.minimum(K, length - first), 0)
    if LEADS:
        count = gl.cdiv(length, K)
        lead = lead_of(bounds_ptr + head.to(gl.int64) * slots + sequence.slot, (count - 1) * K, enough)
        first = boundary(s, count, lead, length)
        nchunks = boundary(s + 1, count, lead, length) - first
    exists = (nchunks > 0) | (first == 0)  # an empty sequence has one segment, which copies its state
    row = gl.to_tensor(-1)
    if bounds_ptr is None:
        back = gl.to_tensor(0)
    elif backs_ptr is None:
        bounds = bounds_ptr + head.to(gl.int64) * slots + sequence.slot
        back = first_pass_of(bounds, gl.where(exists, first, 0), enough)
    else:
        of_segment = program - sequences * HEADS
        back = gl.load(backs_ptr + of_segment, mask=(first > 0) & exists, other=0)
        row, back = gl.where(back < 0, of_segment, -1), gl.maximum(back, 0)
    return Segment(sequence, head, head, first, back, nchunks, first + nchunks >= length, row), exists


@gluon.jit
def lead_of(bounds_ptr, last, enough):
    """Chunks by which a head's first segment, which has no first pass, is longer: what that of a last segment costs
    which begins at chunk `last`."""
    return first_pass_of(bounds_ptr, last, enough) * FIRST_PASS_16THS // 16


@gluon.jit
def boundary(s, count, lead, length):
    """The first chunk of segment s of `count`; the end of the sequence for s = count."""
    return gl.where(s > 0, lead + s * (length - lead) // count, 0)


@gluon.jit
def first_pass_of(bounds_ptr, first, enough):
    """Chunks of the first pass of a segment that begins at chunk `first`: until their bounds add up to `enough`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    o_c = gl.arange(0, BLOCK, layout)
    seen, left = gl.to_tensor(0), gl.to_tensor(0.0)
    go = first > 0
    while go:
        c = first - 1 - seen - o_c
        bound = gl.load(bounds_ptr + gl.maximum(c, 0), mask=c >= 0, other=0.0)
        sums = left + gl.associative_scan(bound, 0, add)
        reached = gl.min(gl.where((sums <= enough) & (c >= 0), o_c, BLOCK), 0)
        left += gl.sum(bound, 0)
        seen += gl.minimum(reached + 1, BLOCK)
        go = (reached == BLOCK) & (seen < first)
    return gl.minimum(seen, first)
