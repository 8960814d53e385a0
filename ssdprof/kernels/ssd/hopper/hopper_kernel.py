"""SSD, all five stages in one launch, for Hopper, in Gluon: warp roles, TMA copies, states in
registers.

The algorithm is that of `portable.py`, but for how states pass between segments.  A first pass
reads the segment backwards and computes the state that it adds.  The program publishes that state,
and sums the states that earlier segments have published.  So no segment waits for more than the
first passes of others.  A second pass reads the segment forwards and computes the output.  With
more pairs of units than SMs there are no first passes: programs process equal shares of all
sequences.

A program owns two units (heads, or slices of 64 of a head's P) that share B and C, or one unit if N
is 256.  Its warps have roles (`rings.py`).  States and outputs are transposed, so that the state is
a matrix operand directly from registers, and x, loaded once, serves all three products.
docs/kernels.md has the reasons, and docs/ssd-mathematics.md the equations of segments.

Assignment of work: with at most as many pairs of units as SMs, sequences are cut into segments, one
per program.  With more, there is one program per SM, and each processes an equal share of all
chunks: several whole pairs and, because these do not divide evenly, the end of one sequence and the
beginning of another.  A program computes the beginning first and leaves its state for another
program.  That program computes the rest last, a sequence later, so that it hardly waits.

Example: seven pairs of eight chunks on four programs of 14 chunks each.  The rows list the pair of
each chunk in the order in which a program computes them; pairs 0 to 3 are whole:

    program 0   6 6 6 6 6 6 . 3 3 3 3 3 3 3 3
    program 1   5 5 5 5 . 2 2 2 2 2 2 2 2 . 6 6
    program 2   4 4 . 1 1 1 1 1 1 1 1 . 5 5 5 5
    program 3   0 0 0 0 0 0 0 0 . 4 4 4 4 4 4

Programs at about the same position of their sequences own neighbouring pairs, which share B and C.
Tiles that one of them has loaded are then in L2 when the others need them.  So pairs are assigned
by the programs' ranks: programs with shorter beginnings, which reach their whole pairs earlier,
have lower ranks.

This assignment is Stream-K with a data-parallel part, which Osama et al. 2023 (arXiv:2301.03598)
describe for matrix products.

In:   x (b, l, h, p) | dt (b, l, h) | A, dt_bias (h) | B, C (b, l, g, n) | D (h) or (h, p)
      initial_states (sequences, h, p, n) | cu_seqlens (sequences + 1)
Out:  out (b, l, h, p), x's dtype | final_states (sequences, h, p, n) fp32
Work: states (slots, lanes, 64 * n / n_split) state_dtype: the state that each segment except a
          sequence's last adds; or, with equal shares, (programs, 2, 64 * n / n_split) fp32: the
          state after the chunks that each program begins
      sync int32, zeroed: the ticket counter, and a flag per slot and lane: the segment's decay, as
          soon as its state is stored
Grid: (segments * lanes / 2), units fastest, then sequences, then segments; for packed sequences,
      segments before sequences, and an upper bound; or one program per SM.  A program waits only
      for lower tickets, whose programs have started, so that progress does not require two programs
      to run at the same time.
Oracle: `reference.py`.  Source: Dao and Gu 2024 (arXiv:2405.21060), section 6;
docs/ssd-mathematics.md for segments.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssdprof.kernels._gluon import add, aggregate, chunks, role_barrier, segment_at, segments
from ssdprof.kernels.hopper.ring import CHUNK
from ssdprof.kernels.ssd.hopper.lanes import allocate_exchange
from ssdprof.kernels.ssd.hopper.rings import SLICE, Shared, allocate, begin_barriers
from ssdprof.kernels.ssd.hopper.role_copies import loads, stores
from ssdprof.kernels.ssd.hopper.role_gates import gates, scores
from ssdprof.kernels.ssd.hopper.role_states import units

FLAGS = gl.constexpr(8)  # index of the first flag in `sync`, whose first number is the ticket
SEQUENCE_BLOCK = gl.constexpr(128)  # packed sequences per iteration of `find_segment`

# stages of functions: `stalls/attribute.py`
STAGES = {
    "segments": "ticket",
    "segment_at": "ticket",
    "chunks": "ticket",
    "extent_of": "ticket",
    "segment_of": "ticket",
    "find_segment": "ticket",
    "packed_segment_of": "ticket",
    "share_of": "ticket",
    "_fused_hopper_kernel": "setup",
}


@aggregate
class SSDSegment:
    """Consecutive chunks of a sequence, and the work of a program that owns one segment."""

    sequence: gl.tensor  # index of the sequence
    # index of the segment in its sequence; in a share: 1 if it takes over a state, else 0
    index: gl.tensor
    length: gl.tensor  # positions of the sequence
    dt_begin: gl.tensor  # offset of the sequence's dt
    tile: gl.tensor  # first TMA coordinate of the sequence's tiles
    row: gl.tensor  # offset of the third TMA coordinate; TMA reads zeros past the sequence's end
    first_chunk: gl.tensor
    nchunks: gl.tensor
    unit: gl.tensor  # the first of the program's two units, or its only one
    last: gl.tensor  # whether the segment ends its sequence
    # whether the segment has a first pass; the constant False if no segment of the launch has one
    has_first_pass: gl.tensor | gl.constexpr
    # the chunk at which the first pass ends.  It runs backwards, and may stop earlier
    first_pass_end: gl.tensor
    first_pass_chunks: gl.tensor  # most chunks of the first pass
    # slot in which the segment leaves its state, or the state that it adds, for later segments
    slot: gl.tensor
    slot_step: gl.tensor  # distance between the slots of neighbouring segments of a sequence

    # methods of a program's work: the program has one segment, which is this one (`_gluon.py`)
    segments, segment_at, chunks = segments, segment_at, chunks


@aggregate
class StreamK:
    """The work of a program that owns an equal share: the beginning of a pair, then whole pairs,
    then the rest of a pair that another program began.  `share_of` computes it.
    """

    program: gl.tensor
    programs: gl.tensor
    rank: gl.tensor  # rank of the program, by the chunks of its beginning
    length: gl.tensor  # positions of a sequence
    nchunks: gl.tensor  # chunks of a sequence
    dt_step: gl.tensor  # stride of dt between sequences
    wholes: gl.tensor  # number of whole pairs
    begun: gl.tensor  # the pair that the program begins
    begun_chunks: gl.tensor  # chunks of that beginning; may be 0
    ended: gl.tensor  # the pair that it takes over
    ended_chunks: gl.tensor  # chunks of the rest of that pair; may be 0
    PAIRS: gl.constexpr  # pairs per sequence
    UNITS: gl.constexpr  # units per pair

    @gluon.jit
    def segments(self):
        """The number of segments: the whole pairs, and one each for the beginning and for the rest,
        unless that has no chunks.
        """
        return gl.minimum(self.begun_chunks, 1) + self.wholes + gl.minimum(self.ended_chunks, 1)

    @gluon.jit
    def segment_at(self, i):
        """The program's i-th segment, and the number of the program's chunks before it."""
        # the number of the whole pair; -1: the beginning; `wholes`: the rest
        k = i - gl.minimum(self.begun_chunks, 1)
        begins, ends = k < 0, k == self.wholes
        pair = gl.where(
            begins, self.begun, gl.where(ends, self.ended, k * self.programs + self.rank)
        )
        sequence = pair // self.PAIRS
        first = gl.where(ends, self.nchunks - self.ended_chunks, 0)
        nchunks = gl.where(begins, self.begun_chunks, self.nchunks - first)
        segment = SSDSegment(
            sequence,
            gl.minimum(first, 1),  # index
            self.length,
            sequence.to(gl.int64) * self.dt_step,  # dt_begin
            sequence,  # tile
            gl.to_tensor(0),  # row
            first,
            nchunks,
            pair % self.PAIRS * self.UNITS,  # unit
            k >= 0,  # last
            False,  # has_first_pass; the next two are not used
            first,
            nchunks,
            self.program,  # slot
            gl.to_tensor(1),  # slot_step
        )
        return segment, gl.where(begins, 0, self.begun_chunks + k * self.nchunks)

    @gluon.jit
    def chunks(self):
        """The number of chunks of all segments."""
        return self.begun_chunks + self.wholes * self.nchunks + self.ended_chunks


@gluon.jit
def extent_of(index, first, most, length, S: gl.constexpr):
    """(chunks of a segment, whether it ends its sequence, whether it has a first pass, the chunk at
    which the first pass ends, the most chunks of the first pass).

    index: of the segment in its sequence.  first: its first chunk.  most: its number of chunks, if
        the sequence is long enough.  length: positions of the sequence
    """
    nchunks = gl.maximum(gl.minimum(most, gl.cdiv(length, CHUNK) - first), 0)
    last = (first + nchunks) * CHUNK >= length
    if S.PASSING == "recompute":
        return nchunks, last, index > 0, gl.to_tensor(0), first
    elif S.PASSING == "look back":
        return nchunks, last, not last, first, nchunks
    else:
        return nchunks, last, False, first, nchunks


@gluon.jit
def segment_of(
    ticket, seqlen, sequences, dt_strides, segment_chunks, long_count, long_chunks, S: gl.constexpr
):
    """The segment of a ticket, in a batch.  Units vary fastest, then sequences, then segments.  A
    sequence has `long_count` segments of `long_chunks` chunks, and then segments of
    `segment_chunks` chunks.

    seqlen: positions of a sequence.  dt_strides: of dt, the first one between sequences
    """
    rank = ticket // S.PAIRS
    sequence, index = rank % sequences, rank // sequences
    is_long = index < long_count
    first = gl.where(
        is_long,
        index * long_chunks,
        long_count * long_chunks + (index - long_count) * segment_chunks,
    )
    most = gl.where(is_long, long_chunks, segment_chunks)
    nchunks, last, has_first_pass, first_pass_end, first_pass_chunks = extent_of(
        index, first, most, seqlen, S
    )
    return SSDSegment(
        sequence,
        index,
        seqlen,  # length
        sequence.to(gl.int64) * dt_strides[0],  # dt_begin
        sequence,  # tile
        gl.to_tensor(0),  # row
        first,
        nchunks,
        ticket % S.PAIRS * S.UNITS,  # unit
        last,
        has_first_pass,
        first_pass_end,
        first_pass_chunks,
        rank,  # slot
        gl.to_tensor(sequences),  # slot_step
    )


@gluon.jit
def find_segment(rank, cu_seqlens_ptr, cu_seqlens_stride, sequences, segment_chunks):
    """The `rank`-th segment of packed sequences: (its sequence, its index there, the sequence's
    first position and length, whether the segment exists).

    segment_chunks: chunks of a segment, if its sequence is long enough
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    sequence = 0  # number of sequences all of whose segments precede this one
    segments_before = 0  # segments of those sequences
    counted = 0  # segments of all sequences read so far
    for block in range(0, sequences, SEQUENCE_BLOCK):
        o_s = block + gl.arange(0, SEQUENCE_BLOCK, layout)
        # beyond the last sequence, read empty sequences: none of them ends before an existing
        # segment
        o_start = gl.minimum(o_s, sequences).to(gl.int64)
        o_stop = gl.minimum(o_s + 1, sequences).to(gl.int64)
        start = gl.load(cu_seqlens_ptr + o_start * cu_seqlens_stride).to(gl.int32)
        stop = gl.load(cu_seqlens_ptr + o_stop * cu_seqlens_stride).to(gl.int32)
        # an empty sequence has one segment without chunks, which copies the initial state to the
        # final state
        segments = gl.maximum(gl.cdiv(gl.cdiv(stop - start, CHUNK), segment_chunks), 1)
        ends_before = counted + gl.associative_scan(segments, 0, add) <= rank
        sequence += gl.sum(ends_before.to(gl.int32), 0)
        segments_before += gl.sum(gl.where(ends_before, segments, 0), 0)
        counted += gl.sum(segments, 0)
    exists = sequence < sequences
    begin_ptr = (
        cu_seqlens_ptr + gl.minimum(sequence, sequences - 1).to(gl.int64) * cu_seqlens_stride
    )
    begin = gl.load(begin_ptr).to(gl.int32)
    length = gl.load(begin_ptr + cu_seqlens_stride).to(gl.int32) - begin
    return sequence, rank - segments_before, begin, length, exists


@gluon.jit
def packed_segment_of(
    ticket,
    seqlen,
    sequences,
    cu_seqlens_ptr,
    cu_seqlens_stride,
    dt_strides,
    segment_chunks,
    S: gl.constexpr,
):
    """The segment of a ticket, and whether it exists.  Units vary fastest, then segments, then
    sequences.

    seqlen: positions of the pack.  segment_chunks: chunks of a segment, if its sequence is long
        enough.  dt_strides: of dt, the second one between positions
    """
    rank = ticket // S.PAIRS
    sequence, index, begin, length, exists = find_segment(
        rank, cu_seqlens_ptr, cu_seqlens_stride, sequences, segment_chunks
    )
    first = index * segment_chunks
    nchunks, last, has_first_pass, first_pass_end, first_pass_chunks = extent_of(
        index, first, segment_chunks, length, S
    )
    segment = SSDSegment(
        sequence,
        index,
        length,
        begin.to(gl.int64) * dt_strides[1],  # dt_begin
        begin + length,  # tile; `tensors.tiles` explains it and the row
        seqlen - length,  # row
        first,
        nchunks,
        ticket % S.PAIRS * S.UNITS,  # unit
        last,
        has_first_pass,
        first_pass_end,
        first_pass_chunks,
        rank - sequence,  # slot; the last segment of each sequence needs none
        gl.to_tensor(1),  # slot_step
    )
    return segment, exists


@gluon.jit
def share_of(program, seqlen, sequences, dt_strides, S: gl.constexpr):
    """The share of a program in the pairs of all sequences.  Pairs are numbered with units fastest.
    Requires at least one pair per program.

    `extra` pairs remain if every program owns equally many whole pairs.  Program p begins a pair,
    of which it computes the fractional part of (p + 1) * extra / programs.  It takes over the rest
    of the pair that program p - 1 began.  So all shares are equal, up to rounding to chunks.
    """
    programs, pairs, nchunks = gl.num_programs(0), sequences * S.PAIRS, gl.cdiv(seqlen, CHUNK)
    extra = pairs % programs
    # what this program begins, and what program p - 1 began, in units of 1 / programs of a pair
    begun, taken = (program + 1) * extra % programs, program * extra % programs
    # `divisor`, the greatest common divisor, is the number of programs that begin equally large
    # parts; `same` is how many of these precede this program
    divisor, remainder = programs, extra
    while remainder > 0:
        divisor, remainder = remainder, divisor % remainder
    same = program * divisor // programs
    wholes = pairs // programs - 1 + (begun <= extra).to(gl.int32)
    rest = gl.where(taken > 0, nchunks - nchunks * taken // programs, 0)
    # The first pair that may be divided.  From it on, pairs are begun by the program of their rank,
    # if its beginning has chunks.
    first_begun = pairs - programs
    return StreamK(
        program, programs, begun + same, seqlen, nchunks, gl.to_tensor(dt_strides[0]), wholes,
        first_begun + begun + same, nchunks * begun // programs, first_begun + taken + same, rest,
        S.PAIRS, S.UNITS,
    )  # fmt: skip


@aggregate
class SSDEnv:
    """The arguments that all roles share."""

    shared: Shared
    work: SSDSegment | StreamK
    dt_ptr: gl.tensor
    A_ptr: gl.tensor
    dt_bias_ptr: gl.tensor | gl.constexpr
    strides: gl.tuple  # of dt, A, dt_bias, D, cu_seqlens
    dt_limit: gl.tuple
    descs: gl.tuple  # TMA descriptors of x, B, C, out
    D_ptr: gl.tensor | gl.constexpr
    initial_ptr: gl.tensor | gl.constexpr
    states_ptr: gl.tensor
    final_ptr: gl.tensor
    flags_ptr: gl.tensor
    exchange: gl.shared_memory_descriptor | gl.tuple  # `allocate_exchange`; (): N is not split
    S: gl.constexpr  # compile-time arguments


# Triton 3.6 does not compile warp_specialize with a constant 1 among its arguments, so integers are
# not specialised.  Those in tuples always are.
@gluon.jit(do_not_specialize=["seqlen", "sequences", "segment_chunks", "long_count", "long_chunks"])
def _fused_hopper_kernel(
    x_desc, B_desc, C_desc, out_desc, tensors, strides, dt_limit, seqlen, sequences, segment_chunks,
    long_count, long_chunks, S: gl.constexpr,
):  # fmt: skip
    """Compute outputs and final states of a segment, or of the segments of a share: five roles,
    which pass tiles through rings in shared memory (`rings.py`).

    strides: of dt, A, dt_bias, D, cu_seqlens
    dt_limit: least and largest dt.  seqlen: positions of a sequence; if packed, of all of them.
    segment_chunks, long_count, long_chunks: see `segment_of`
    """
    (
        dt_ptr, A_ptr, dt_bias_ptr, D_ptr, initial_ptr, cu_seqlens_ptr, final_ptr, states_ptr,
        sync_ptr,
    ) = tensors  # fmt: skip
    shared = allocate(x_desc.dtype, S)
    exchange = ()
    if S.N_SPLIT == 2:
        exchange = allocate_exchange(SLICE, CHUNK)
    begin_barriers(shared, S.PASSING == "look back" or S.PASSING == "recompute")

    # stage ticket: the program's segments; strides[0] are those of dt, strides[4] of cu_seqlens
    ticket = gl.program_id(0)
    if S.PASSING == "look back" or S.PASSING == "carry":
        ticket = gl.atomic_add(sync_ptr, 1, sem="relaxed")
        role_barrier()  # threads read the ticket from memory that warp_specialize overwrites next
    exists = True
    if S.PASSING == "carry":
        work = share_of(ticket, seqlen, sequences, strides[0], S)
    elif cu_seqlens_ptr is None:
        work = segment_of(
            ticket, seqlen, sequences, strides[0], segment_chunks, long_count, long_chunks, S
        )
    else:
        work, exists = packed_segment_of(
            ticket, seqlen, sequences, cu_seqlens_ptr, strides[4][0], strides[0], segment_chunks, S
        )
    # stage setup: the roles
    if exists:
        env = SSDEnv(
            shared, work, dt_ptr, A_ptr, dt_bias_ptr, strides, dt_limit,
            (x_desc, B_desc, C_desc, out_desc), D_ptr, initial_ptr, states_ptr, final_ptr,
            sync_ptr + FLAGS, exchange, S,
        )  # fmt: skip
        # an SM has 512 registers for each thread of a group of 128.  Four groups share them: two
        # have the role `units`, one has `scores`, and one has the other roles
        OTHERS: gl.constexpr = S.OTHER_REGISTERS
        gl.warp_specialize(
            [(units, (env,)), (scores, (env,)), (gates, (env,)), (loads, (env,)), (stores, (env,))],
            [4, 2, 1, 1],
            [512 - 2 * S.UNIT_REGISTERS - OTHERS, OTHERS, OTHERS, OTHERS],
        )
