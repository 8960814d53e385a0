"""Assignment of work to programs: one segment of a sequence for one value head, or whole sequences
one after the other.

A segment that does not begin its sequence needs the state that enters it.  A first pass over the
chunks that precede the segment computes that state.  It begins at chunk c where the state S_c that
enters c has a negligible effect on the state at the segment's first chunk f:

    |effect of S_c on the state at f|  <=  2^(sum of the bounds of chunks c .. f - 1) |S_c|

The transition of a token is exp(g) (I - beta k k^T), and its 2-norm is at most exp(g) max(1, |1 -
beta |k|^2|).  The bound of a chunk is the sum of the binary logarithms of these numbers
(`prep_kernel.py`).
For a head that forgets slowly, earlier launches compute the state that enters a segment
(`parts.py`), or the first pass covers all chunks before it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssdprof.kernels._gluon import add, aggregate, segment_at, segments
from ssdprof.kernels.hopper.ring import CHUNK

LOOK = gl.constexpr(256)  # bounds that one iteration of `warmup_length` reads
# time of a chunk of the first pass, in sixteenths of the time of a chunk of the second pass (H200)
FIRST_PASS_16THS = gl.constexpr(9)

# function -> stage of `ssdprof stalls`: all of them belong to the choice of the program's work
STAGES = {
    "segments": "ticket",
    "segment_at": "ticket",
    "sequence_at": "ticket",
    "packed_sequence": "ticket",
    "segment_of": "ticket",
    "bounds_of": "ticket",
    "first_segment_extra": "ticket",
    "boundary": "ticket",
    "warmup_length": "ticket",
}


@aggregate
class Sequence:
    """Where a sequence of tokens lies in the tensors (not Python's type of this name)."""

    index: gl.tensor  # among all sequences
    begin: gl.tensor  # its first position in its row of g and beta
    length: gl.tensor  # positions
    tile: gl.tensor  # first TMA coordinate of its tiles
    # offset of the third TMA coordinate: TMA reads zeros beyond the sequence's end
    # (`kernels.tensors.tiles`)
    tile_row: gl.tensor
    slot: gl.tensor  # index of its first chunk among the slots of all chunks


@aggregate
class GDNSegment:
    """Consecutive chunks of a sequence and one value head.  A program computes one segment, or,
    with `Persistent` and in `parts.py`, several one after the other.
    """

    sequence: Sequence
    head: gl.tensor
    first: gl.tensor  # its first chunk
    warmup: gl.tensor  # chunks of the first pass, directly before `first`
    nchunks: gl.tensor  # without those of the first pass
    last: gl.tensor  # whether it ends its sequence
    # row of the state that enters the segment, among the states that `parts.py` computes; -1: that
    # module computes none for it.  If this is a part of `parts.py`: its index among the parts of
    # all rows
    state_row: gl.tensor

    # methods: the program has one segment, which is this one (`_gluon.py`)
    segments, segment_at = segments, segment_at


@aggregate
class Persistent:
    """The work of a program: whole sequences of equal length, from pair `program` on every
    `programs`-th pair of a sequence and a head, heads fastest.  Each pair is one segment without a
    first pass.
    """

    program: gl.tensor
    programs: gl.tensor
    pairs: gl.tensor  # of all programs
    seqlen: gl.tensor
    nchunks: gl.tensor  # chunks of one sequence
    HEADS: gl.constexpr

    @gluon.jit
    def segments(self):
        return gl.cdiv(self.pairs - self.program, self.programs)

    @gluon.jit
    def segment_at(self, k):
        """The program's k-th segment, and the number of the program's chunks before it."""
        pair = self.program + k * self.programs
        i = pair // self.HEADS  # the sequence
        sequence = Sequence(i, gl.to_tensor(0), self.seqlen, i, gl.to_tensor(0), i * self.nchunks)
        zero, head = gl.to_tensor(0), pair % self.HEADS
        # it ends its sequence (k >= 0 is a true scalar), and has no row (-1)
        return GDNSegment(
            sequence, head, zero, zero, self.nchunks, k >= 0, zero - 1
        ), k * self.nchunks


@gluon.jit
def sequence_at(i, seqlen, cu_seqlens_ptr, cu_stride):
    """Sequence i, or, if i is a vector, the sequences of these indices as one `Sequence` of
    vectors.

    seqlen: positions of a row of the batch.  cu_seqlens_ptr, cu_stride: pointer to the bounds of
        packed sequences, None for a batch, and the distance between two bounds

    The slots of a packed sequence begin at begin // CHUNK + i, so that no two sequences share a
    slot.  `tensors.tiles` explains its TMA coordinates.
    """
    if cu_seqlens_ptr is None:
        return Sequence(i, gl.to_tensor(0), seqlen, i, gl.to_tensor(0), i * gl.cdiv(seqlen, CHUNK))
    else:
        begin_ptr = cu_seqlens_ptr + i.to(gl.int64) * cu_stride
        begin, end = gl.load(begin_ptr).to(gl.int32), gl.load(begin_ptr + cu_stride).to(gl.int32)
        return Sequence(i, begin, end - begin, end, seqlen - (end - begin), begin // CHUNK + i)


@gluon.jit
def packed_sequence(slot, sequences, cu_seqlens_ptr, cu_stride):
    """The packed sequence to which a slot belongs: the last one whose first slot is at or before
    it.
    """
    low, high = gl.to_tensor(0), gl.to_tensor(sequences)
    while high - low > 1:
        middle = (low + high) // 2
        begin = gl.load(cu_seqlens_ptr + middle.to(gl.int64) * cu_stride).to(gl.int32)
        before = begin // CHUNK + middle <= slot
        low, high = gl.where(before, middle, low), gl.where(before, high, middle)
    return low


@gluon.jit
def segment_of(
    packing, sequences, bounds, segment_chunks, truncation_log2, warmup_lengths_ptr, S: gl.constexpr
):
    """The segment of a program, and whether it exists.  Heads vary fastest, then sequences, then
    segments of `segment_chunks` chunks.

    With FIRST_SEGMENT_EXTRA, segments have `segment_chunks` chunks at most on average, and the
    first one is longer (`first_segment_extra`).

    packing: the arguments of `sequence_at` after the first: the positions of a row of the batch,
        the pointer to cu_seqlens, or None, and its stride
    sequences: number of sequences
    bounds: pointer to the bounds of all chunks (HV, slots), and the number of slots
    truncation_log2: log2 of the share of a state that a first pass may neglect where it begins
    warmup_lengths_ptr: the lengths of first passes that `parts.py` has written, by row; None: each
        program computes its own
    """
    program = gl.program_id(0)
    rank = program // S.HEADS  # among the segments of a head, sequences fastest
    sequence = sequence_at(rank % sequences, *packing)
    index = rank // sequences  # of the segment in its sequence
    head, first = program % S.HEADS, index * segment_chunks
    chunks = gl.cdiv(sequence.length, CHUNK)  # of the sequence
    nchunks = gl.maximum(gl.minimum(segment_chunks, chunks - first), 0)
    if S.FIRST_SEGMENT_EXTRA:
        count = gl.cdiv(chunks, segment_chunks)
        bounds_ptr = bounds_of(bounds, head, sequence)
        extra = first_segment_extra(bounds_ptr, (count - 1) * segment_chunks, truncation_log2)
        first = boundary(index, count, extra, chunks)
        nchunks = boundary(index + 1, count, extra, chunks) - first
    exists = (nchunks > 0) | (first == 0)  # an empty sequence has one segment, to copy its state
    state_row = gl.to_tensor(-1)
    if warmup_lengths_ptr is None:
        bounds_ptr = bounds_of(bounds, head, sequence)
        warmup = warmup_length(bounds_ptr, gl.where(exists, first, 0), truncation_log2)
    else:
        row_of_segment = program - sequences * S.HEADS  # first segments have no row
        warmup = gl.load(warmup_lengths_ptr + row_of_segment, mask=(first > 0) & exists, other=0)
        # -1: `parts.py` has computed the state that enters
        state_row = gl.where(warmup < 0, row_of_segment, -1)
        warmup = gl.maximum(warmup, 0)
    last = first + nchunks >= chunks
    return GDNSegment(sequence, head, first, warmup, nchunks, last, state_row), exists


@gluon.jit
def bounds_of(bounds, head, sequence):
    """Pointer to the bound of a sequence's first chunk for a head.  bounds: see `segment_of`"""
    bounds_ptr, slots = bounds
    return bounds_ptr + head.to(gl.int64) * slots + sequence.slot


@gluon.jit
def first_segment_extra(bounds_ptr, first_of_last, truncation_log2):
    """Chunks by which a head's first segment is longer than the others, because it has no first
    pass: the cost of the last segment's first pass, in chunks of the second pass.

    bounds_ptr: see `bounds_of`.  first_of_last: about the first chunk of the last segment
    """
    return warmup_length(bounds_ptr, first_of_last, truncation_log2) * FIRST_PASS_16THS // 16


@gluon.jit
def boundary(index, count, extra, chunks):
    """The first chunk of segment `index` among `count` segments of a sequence of `chunks` chunks,
    the first of which is longer by `extra` chunks.  For index = count, the end of the sequence.
    """
    return gl.where(index > 0, extra + index * (chunks - extra) // count, 0)


@gluon.jit
def warmup_length(bounds_ptr, first, truncation_log2):
    """Chunks of the first pass of a segment that begins at chunk `first`: as many as it takes,
    backwards, until the sum of their bounds is at most truncation_log2; at most all before it.

    bounds_ptr: see `bounds_of`
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    o_c = gl.arange(0, LOOK, layout)
    # bound_sum: of all bounds that have been read.  seen: their number; at the end, the number of
    # chunks up to the one at which the sum suffices
    seen, bound_sum = gl.to_tensor(0), gl.to_tensor(0.0)
    goes_on = first > 0
    while goes_on:
        c = first - 1 - seen - o_c
        bound = gl.load(bounds_ptr + gl.maximum(c, 0), mask=c >= 0, other=0.0)
        bound_sums = bound_sum + gl.associative_scan(bound, 0, add)
        # the first of these LOOK places at which the sum suffices; LOOK: there is none
        reached = gl.min(gl.where((bound_sums <= truncation_log2) & (c >= 0), o_c, LOOK), 0)
        bound_sum += gl.sum(bound, 0)
        seen += gl.minimum(reached + 1, LOOK)
        goes_on = (reached == LOOK) & (seen < first)
    return gl.minimum(seen, first)
