"""The states that enter segments of heads that forget too slowly for a first pass.

If a first pass would be too long (`first_passes`), the state that enters the segment is computed
from the parts of the preceding segment.  A part has two matrices (docs/gdn-mathematics.md, section
5): N, its final state from a zero state, and M, its transition matrix, which is the final state
from the identity with zeros as values:

    state after a part = M (state before it) + N

The state before a segment's first part is known if the segment begins its sequence, or if a first
pass can compute it.  Then N and M of that part start where that first pass begins, and the state
before that is the initial one or negligible.  Otherwise it is the state after the preceding part.
`_combine_kernel` combines the parts.  It multiplies by M as the sum of two bf16 numbers, which have
16 bits of its mantissa together.

A row is a pair of a head and a segment that does not begin its sequence.  Heads vary fastest, then
sequences, then segments, as programs of `hopper_kernel.py` do.  A row is slow if the state that
enters its segment is computed from parts.  All programs find the same slow rows, and program p of n
computes the parts p, p + n, p + 2n and so on of all slow rows together.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# chooses the interpreter or a GPU before the kernel is defined
import ssdprof.kernels.device  # noqa: F401
from ssdprof.kernels._gluon import (
    add,
    aggregate,
    arrive,
    begin_product,
    product_layout,
    role_barrier,
    scalar,
    tile_indices,
)
from ssdprof.kernels.gdn.hopper.assignment import GDNSegment, Sequence, bounds_of, sequence_at
from ssdprof.kernels.gdn.hopper.rings import DECAY, DIM, FROM_STATE, TO_END
from ssdprof.kernels.gdn.hopper.role_copies import load_keys, load_tile
from ssdprof.kernels.gdn.hopper.role_gates import chunk_gates
from ssdprof.kernels.gdn.hopper.role_states import (
    ROWS,
    by_i,
    by_k,
    i_operand,
    k_operand,
    own_rows,
    row_tile,
)
from ssdprof.kernels.hopper.ring import CHUNK

# Rows in the vectors of `first_passes`: at least one for each thread.  With more than MOST_ROWS,
# fewer than LOOKS / MOST_ROWS = 4 bounds of each row would be read at a time; then segments have no
# parts.
LEAST_ROWS, MOST_ROWS = 128, 512
LOOKS = gl.constexpr(2048)  # bounds that one iteration of `reach_back` reads, for all rows together
# numbers per part in the table of a program's parts: the six of its `Sequence`; head, first (the
# chunk after the part), warmup (the part's chunks) and state_row of its `GDNSegment`; and the
# program's chunks before the part
FIELDS = gl.constexpr(11)
by_j = gl.constexpr(product_layout(64, 4))  # (j, half of K)

# Stages of functions and of waits (`stalls/attribute.py`); functions that are not listed have
# their caller's stage.
STAGES = {
    "segments": "ticket", "segment_at": "ticket", "reach_back": "ticket", "first_passes": "ticket",
    "write_part": "ticket", "nth_slow_row": "ticket", "value_at": "ticket", "parts_of": "ticket",
    "begin_update": "state_factor", "store_update": "state_factor",
    "pass_pair": "warm_up", "store_rows": "setup", "part_states": "setup",
    "part_gates": "gate_cumsum", "part_loads": "loads", "_combine_kernel": "warm_up",
}  # fmt: skip
WAITS = {
    "keys": "waiting.chunk",
    "values": "waiting.chunk",
    "inverses": "waiting.inverse",
    "updates": "waiting.update",
}


@aggregate
class Parts:
    """The parts that a program computes, in order."""

    table: gl.shared_memory_descriptor  # (parts * FIELDS, 1) int32, see `write_part`
    count: gl.tensor  # parts

    @gluon.jit
    def segments(self):
        return self.count

    @gluon.jit
    def segment_at(self, k):
        """The k-th part, as a segment with a first pass only, and the number of the program's
        chunks before it.  The table is complete: `parts_of` ends with a barrier.
        """
        fields = ()
        for i in gl.static_range(FIELDS):
            fields += (scalar(self.table.index(k * FIELDS + i)),)
        head, end, chunks, state_row, before = fields[6:]
        # no chunks after the first pass; and not the end of its sequence (k < 0 is a false scalar)
        sequence, none = Sequence(*fields[:6]), gl.to_tensor(0)
        return GDNSegment(sequence, head, end, chunks, none, k < 0, state_row), before


@gluon.jit
def reach_back(
    first, wanted, bounds_ptr, limit, truncation_log2, LOOK: gl.constexpr, layout: gl.constexpr
):
    """Chunks of a first pass before chunk `first` of each row (rows); all chunks before it if the
    search ends before the state is negligible.

    wanted: whether the result of the row is needed; else it is 0
    bounds_ptr: (rows) pointers to the bound of the first chunk of the row's sequence
    limit: in chunks.  The search ends after the iteration that reaches it, so that it may find more
        chunks than this.
    truncation_log2: log2 of the share of a state that a first pass may neglect where it begins
    LOOK: chunks per row and iteration.  layout: of (rows, LOOK)
    """
    o_c = gl.arange(0, LOOK, gl.SliceLayout(0, layout))
    # back: the result, -1 as long as it is unknown.  bound_sum: of the `seen` chunks before `first`
    back, bound_sum = gl.where(wanted, -1, 0), wanted.to(gl.float32) * 0.0
    seen = gl.to_tensor(0)
    goes_on = gl.max(wanted.to(gl.int32), 0) > 0
    while goes_on:
        c = (first - 1 - seen)[:, None] - o_c[None, :]
        inside = (back < 0)[:, None] & (c >= 0)
        bound = gl.load(bounds_ptr[:, None] + gl.maximum(c, 0), mask=inside, other=0.0)
        bound_sums = bound_sum[:, None] + gl.associative_scan(bound, 1, add)
        reached = gl.min(gl.where(inside & (bound_sums <= truncation_log2), o_c[None, :], LOOK), 1)
        back = gl.where((back < 0) & (reached < LOOK), seen + reached + 1, back)
        bound_sum += gl.sum(bound, 1)
        seen += LOOK
        goes_on = (seen < limit) & (gl.max((back < 0).to(gl.int32), 0) > 0)
    return gl.where(back < 0, first, back)


@gluon.jit
def first_passes(
    rows, packing, sequences, bounds, segment_chunks, limits, truncation_log2, S: gl.constexpr
):
    """Chunks of each row's first pass; -1 if the row is slow, 0 if the segment does not exist.

    A row is slow if its first pass would have more than `longest_first_pass` chunks.  If this is so
    for the last segment of a sequence, all rows of the same sequence and head whose segments begin
    after more than `least_first_pass` chunks are slow.

    rows, sequences: their numbers.  segment_chunks: chunks of a segment
    packing: positions of a row of the batch, the pointer to cu_seqlens, or None, and its stride
    bounds: pointer to the bounds of all chunks (HV, slots), and the number of slots
    limits: `longest_first_pass` and `least_first_pass`, in chunks
    truncation_log2: as in `reach_back`
    """
    longest_first_pass, least_first_pass = limits
    LOOK: gl.constexpr = LOOKS // S.ROWS
    # each thread has whole rows
    layout: gl.constexpr = gl.BlockedLayout([1, LOOK], [32, 1], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, S.ROWS, gl.SliceLayout(1, layout))
    sequence = sequence_at(row // S.HEADS % sequences, *packing)
    # of each row: the segment's first chunk, and the chunks of the sequence
    first = (row // S.HEADS // sequences + 1) * segment_chunks
    nchunks = gl.cdiv(sequence.length, CHUNK)
    exists = (row < rows) & (first < nchunks)
    bounds_ptr = bounds_of(bounds, row % S.HEADS, sequence)
    # rows that are slow because that of the last segment is
    late = exists & (first > least_first_pass)
    first_of_last = gl.where(late, (nchunks - 1) // segment_chunks * segment_chunks, 0)
    back_of_last = reach_back(
        first_of_last, late, bounds_ptr, longest_first_pass, truncation_log2, LOOK, layout
    )
    slow = late & (back_of_last > longest_first_pass)
    # the other rows
    back = reach_back(
        first, exists & (slow == 0), bounds_ptr, longest_first_pass, truncation_log2, LOOK, layout
    )
    return gl.where(exists, gl.where(slow | (back > longest_first_pass), -1, back), 0)


@gluon.jit
def write_part(
    table, k, part_index, before, row, previous, sequence, segment_chunks, pairs, S: gl.constexpr
):
    """Write a part of the segment before a row to the table, as the program's k-th part.  Returns
    `before` plus the chunks of the part.

    table: of `parts_of`, (parts * FIELDS, 1) int32 in shared memory
    part_index: index of the part among those of all slow rows, each of which has PARTS
    before: the program's chunks before this part
    previous: chunks of the first pass of the segment with the parts, -1 if that segment's row is
        slow, too
    sequence: the row's sequence
    segment_chunks: chunks of a segment, a multiple of PARTS
    pairs: sequences times heads
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    part = part_index % S.PARTS
    end = row // pairs * segment_chunks + (part + 1) * (segment_chunks // S.PARTS)
    # the first part begins with that first pass, unless the state before it is unknown
    chunks = segment_chunks // S.PARTS + gl.where((part == 0) & (previous >= 0), previous, 0)
    fields = (
        sequence.index,
        sequence.begin,
        sequence.length,
        sequence.tile,
        sequence.tile_row,
        sequence.slot,
        row % S.HEADS,
        end,
        chunks,
        row * S.PARTS + part,  # state_row
        before,
    )
    for i in gl.static_range(FIELDS):
        table.index(k * FIELDS + i).store(gl.full([1], 0, gl.int32, layout) + fields[i])
    return before + chunks


@gluon.jit
def nth_slow_row(slow_counts, n):
    """The n-th of the slow rows, from 0.

    slow_counts: for each row, the number of slow rows up to it, itself included
    """
    return gl.sum((slow_counts <= n).to(gl.int32), 0)


@gluon.jit
def value_at(values, o_r, i):
    """Element i of a vector with indices o_r; 0 outside of it."""
    return gl.sum(gl.where(o_r == i, values, 0), 0)


@gluon.jit
def parts_of(
    rows, packing, sequences, bounds, segment_chunks, limits, truncation_log2, warmup_lengths_ptr,
    S: gl.constexpr,
):  # fmt: skip
    """The program's parts, at most PARTS_OF_PROGRAM.  Program 0 stores the result of `first_passes`
    (rows) for the next launches at `warmup_lengths_ptr`.  Other arguments are those of
    `first_passes`.
    """
    program, programs = gl.program_id(0), gl.num_programs(0)
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    # the first pass of each row, and which rows are slow
    warmup_lengths = first_passes(
        rows, packing, sequences, bounds, segment_chunks, limits, truncation_log2, S
    )
    warmup_lengths, o_r = gl.convert_layout(warmup_lengths, vector), gl.arange(0, S.ROWS, vector)
    if program == 0:
        gl.store(warmup_lengths_ptr + o_r, warmup_lengths, mask=o_r < rows)
    slow = (warmup_lengths < 0).to(gl.int32)
    slow_counts = gl.associative_scan(slow, 0, add)
    # the table: every `programs`-th part of the slow rows
    table = gl.allocate_shared_memory(
        gl.int32, [S.PARTS_OF_PROGRAM * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    count = gl.maximum(gl.cdiv(gl.sum(slow, 0) * S.PARTS - program, programs), 0)
    pairs = sequences * S.HEADS
    before = gl.to_tensor(0)
    for k in range(count):
        part_index = program + k * programs
        row = nth_slow_row(slow_counts, part_index // S.PARTS)
        # 0 if the segment with the parts begins its sequence: then row - pairs is negative
        previous = value_at(warmup_lengths, o_r, row - pairs)
        sequence = sequence_at(row // S.HEADS % sequences, *packing)
        before = write_part(
            table, k, part_index, before, row, previous, sequence, segment_chunks, pairs, S
        )
    role_barrier()  # the table is written before the roles read it
    return Parts(table, count)


@gluon.jit
def begin_update(rings, n, LANE: gl.constexpr):
    """Begin the lane's columns (j, half of K) of B^T K of the program's n-th chunk
    (`role_scores.py`), asynchronously.  The caller has waited for the chunk's keys and inverse.
    """
    k = rings.keys.tile(n).slice(LANE * (DIM // 2), DIM // 2, dim=1)
    return begin_product(rings.inverses.tile(n), k, by_j)


@gluon.jit
def store_update(rings, n, product, LANE: gl.constexpr):
    """Store the lane's columns of X of the program's n-th chunk in the ring `updates`.  The caller
    has waited for the chunk's keys, whose barrier also covers the vectors.

    product: the result of `begin_update`
    """
    to_end = rings.vector(n, TO_END).load(gl.SliceLayout(1, by_j))
    rings.updates.wait_empty(n)
    X = rings.updates.tile(n).slice(LANE * (DIM // 2), DIM // 2, dim=1)
    X.store((product * to_end[:, None]).to(X.dtype))
    fence_async_shared()  # makes the stores visible to the asynchronous products that read X
    arrive(rings.updates.full_at(n))
    arrive(rings.inverses.empty_at(n))


@gluon.jit
def pass_pair(rings, N, M, entered, n, LANE: gl.constexpr):
    """The lane's rows of N and M, (half of V, K) and (half of K, K) transposed, after the program's
    n-th chunk, and N as an operand.  Also computes the lane's columns of the next chunk's X, for
    which it waits for that chunk's keys, inverse and vectors.

    Both matrices are updated as a state is in `role_states.py`, M with zeros as values: Z = -d (K
    M) takes the place of Y = V - d (K N).  The products are ordered so that sums and conversions
    for one matrix run beside products for the other.

    entered: N before the chunk, as an operand
    """
    dtype: gl.constexpr = rings.keys.tiles.dtype
    # Y, from the product K N
    k = rings.keys.tile(n).permute((1, 0))
    KN = warpgroup_mma_wait(0, deps=[begin_product(entered, k, by_i)])
    rings.values.wait_full(n)  # only now, to limit registers
    v = own_rows(rings.values.tile(n), LANE).load(i_operand)
    from_state = rings.vector(n, FROM_STATE).load(gl.SliceLayout(0, i_operand))
    Y = (v.to(gl.float32) - gl.convert_layout(KN, i_operand) * from_state[None, :]).to(dtype)
    # N after the chunk, and beside it the product K M
    rings.updates.wait_full(n)
    decay = scalar(rings.vector(n, DECAY).slice(0, 1))
    N_begun = warpgroup_mma(
        gl.convert_layout(Y, k_operand), rings.updates.tile(n), N * decay, is_async=True
    )
    KM = begin_product(gl.convert_layout(M.to(dtype), i_operand), k, by_i)
    N, KM = warpgroup_mma_wait(0, deps=[N_begun, KM])
    arrive(rings.values.empty_at(n))
    # Z; then M after the chunk, and beside it the next chunk's X
    rings.keys.wait_full(n + 1)
    rings.inverses.wait_full(n + 1)
    from_state = rings.vector(n, FROM_STATE).load(gl.SliceLayout(0, i_operand))
    Z = (gl.convert_layout(KM, i_operand) * -from_state[None, :]).to(dtype)
    X_begun = begin_update(rings, n + 1, LANE)
    M_begun = warpgroup_mma(
        gl.convert_layout(Z, k_operand), rings.updates.tile(n), M * decay, is_async=True
    )
    X = warpgroup_mma_wait(1, deps=[X_begun])
    store_update(rings, n + 1, X, LANE)
    entered = gl.convert_layout(N.to(dtype), i_operand)
    role_barrier()  # as in `role_states.py`
    M = warpgroup_mma_wait(0, deps=[M_begun])
    arrive(rings.keys.empty_at(n))
    arrive(rings.updates.empty_at(n))
    return N, M, entered


@gluon.jit
def store_rows(transitions_ptr, matrix, value, first_row):
    """Store ROWS rows of a matrix (DIM, DIM) of 16-bit numbers, in stores of 16 bytes per thread.

    matrix: its index among those at `transitions_ptr`.  first_row: the first of the rows
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    gl.store(row_tile(transitions_ptr, matrix, first_row, layout), gl.convert_layout(value, layout))


@gluon.jit
def part_states(env, LANE: gl.constexpr):
    """Role of a lane: compute its rows of N and M of each part, and store N in fp32 and M as the
    sum of two bf16 numbers.
    """
    finals_ptr, transitions_ptr = env.destinations  # of N and of M
    rings, work = env.rings, env.work
    o_v, o_k = tile_indices(ROWS, DIM, by_k)
    # X of the first chunk; each chunk then computes that of the next one
    rings.keys.wait_full(gl.to_tensor(0))  # for k from `part_loads`, vectors from `part_gates`
    rings.inverses.wait_full(gl.to_tensor(0))
    X = warpgroup_mma_wait(0, deps=[begin_update(rings, gl.to_tensor(0), LANE)])
    store_update(rings, gl.to_tensor(0), X, LANE)
    for i_segment in range(work.segments()):
        segment, n = work.segment_at(i_segment)
        # The first of the lane's rows of N and M.  The minimum is always 0, but the compiler does
        # not know it.  So it computes addresses here and keeps none in registers over the loop.
        first_row = LANE * ROWS + gl.minimum(segment.state_row, 0)
        # a zero state, and the identity
        N = gl.full([ROWS, DIM], 0.0, gl.float32, by_k)
        M = gl.where((first_row + o_v)[:, None] == o_k[None, :], 1.0, 0.0)
        role_barrier()  # before the loop, as in `role_states.py`
        entered = gl.convert_layout(N.to(rings.keys.tiles.dtype), i_operand)
        for j in range(segment.warmup):
            N, M, entered = pass_pair(rings, N, M, entered, n + j, LANE)
        gl.store(row_tile(finals_ptr, segment.state_row, first_row, by_k), N)
        high = M.to(gl.bfloat16)
        low = (M - high.to(gl.float32)).to(gl.bfloat16)
        store_rows(transitions_ptr, 2 * segment.state_row, high, first_row)
        store_rows(transitions_ptr, 2 * segment.state_row + 1, low, first_row)


@gluon.jit
def part_gates(env):
    """Role: compute each chunk's vectors of decays, as `gates` does.  After the last chunk, its
    vectors are computed once more, because `pass_pair` computes an X of the chunk after it, which
    is not used.
    """
    work = env.work
    for i_segment in range(work.segments()):
        segment, n = work.segment_at(i_segment)
        for j in range(segment.warmup + (i_segment + 1 == work.segments()).to(gl.int32)):
            chunk_gates(env, segment, gl.minimum(j, segment.warmup - 1), n + j)


@gluon.jit
def part_loads(env):
    """Role: load k, v and the inverse of each chunk, and after the last chunk its k and inverse
    once more, for the same reason as in `part_gates`.
    """
    k_desc, v_desc, A_desc = env.descs
    for i_segment in range(env.work.segments()):
        segment, n = env.work.segment_at(i_segment)
        first = segment.first - segment.warmup
        for j in range(segment.warmup):
            load_keys(env, segment, first + j, n + j, k_desc, A_desc)
            load_tile(env.rings.values, n + j, v_desc, segment.head, segment, first + j)
        if i_segment + 1 == env.work.segments():
            load_keys(env, segment, segment.first - 1, n + segment.warmup, k_desc, A_desc)


@triton.jit(do_not_specialize=["pairs", "boundaries", "segment_chunks"])
def _combine_kernel(
    finals_ptr, transitions_ptr, warmup_lengths_ptr, initial_ptr, entering_ptr, initial_strides,
    pairs, boundaries, segment_chunks, HEADS: tl.constexpr, PARTS: tl.constexpr,
    BOUNDARIES: tl.constexpr, DIM: tl.constexpr, BLOCK_V: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The states that enter the segments of slow rows: BLOCK_V rows of V for one pair of a sequence
    and a head.

    Part by part, S <- M S + N, transposed as N and M are: S^T <- S^T M^T + N^T.  S and M are sums
    of two bf16 numbers in the product.  The product of the two smaller ones is left out: it is at
    most 2^-16 of the whole, less than a rounding of 16-bit inputs.

    In:   finals (rows, PARTS, V, K) fp32: N^T | transitions (rows, PARTS, 2, K, K) bf16: M^T
          warmup_lengths (rows) | initial_state (sequences, hv, K, V)
    Out:  entering (rows, V, K) fp32, for slow rows, whose warmup_lengths are -1
    Grid: pairs * V / BLOCK_V.  A sequence has `boundaries` between segments of `segment_chunks`
          chunks; the segment that begins at one has the row boundary * pairs + pair.
    """
    # the program's pair and rows of V, and the boundaries of the pair's slow rows
    pair, block = tl.program_id(0) // (DIM // BLOCK_V), tl.program_id(0) % (DIM // BLOCK_V)
    o_b = tl.arange(0, BOUNDARIES)
    slow_rows = tl.load(warmup_lengths_ptr + o_b * pairs + pair, mask=o_b < boundaries, other=0) < 0
    o_v, o_k = block * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, DIM)
    tile = o_v[:, None] * DIM + o_k[None, :]
    matrix = o_k[:, None] * DIM + o_k[None, :]
    begin = tl.min(tl.where(slow_rows, o_b, boundaries), 0)
    end = tl.max(tl.where(slow_rows, o_b + 1, 0), 0)
    state = tl.zeros([BLOCK_V, DIM], tl.float32)
    # A row between them that is not slow has no parts: the states that the loop computes for it are
    # not stored, and the next slow row begins from a known state.
    for i in tl.range(begin * PARTS, end * PARTS, num_stages=AHEAD):
        # M^T as two bf16 numbers, and N^T
        row, part = i // PARTS * pairs + pair, i % PARTS
        offset = (row * PARTS + part).to(tl.int64) * (DIM * DIM)
        high = tl.load(transitions_ptr + 2 * offset + matrix)
        low = tl.load(transitions_ptr + 2 * offset + DIM * DIM + matrix)
        N = tl.load(finals_ptr + offset + tile)
        slow = tl.load(warmup_lengths_ptr + row) < 0
        previous = tl.load(warmup_lengths_ptr + row - pairs, mask=row >= pairs, other=0)
        # the first part of a segment that has a first pass, of `previous` chunks: the state before
        # it is the initial state if that pass begins at the sequence's start, else negligible
        if (part == 0) & (previous >= 0):
            state = tl.zeros([BLOCK_V, DIM], tl.float32)
            if initial_ptr is not None:
                sequence, head = (pair // HEADS).to(tl.int64), (pair % HEADS).to(tl.int64)
                of_pair = sequence * initial_strides[0] + head * initial_strides[1]
                at_v = o_v.to(tl.int64) * initial_strides[3]
                at_k = o_k.to(tl.int64) * initial_strides[2]
                # whether that first pass has all chunks before the segment
                begins = previous == i // PARTS * segment_chunks
                tile_of_initial = initial_ptr + of_pair + at_v[:, None] + at_k[None, :]
                state = tl.load(tile_of_initial, mask=begins, other=0.0).to(tl.float32)
        # the state after the part
        state_high = state.to(tl.bfloat16)
        state_low = (state - state_high.to(tl.float32)).to(tl.bfloat16)
        # three sums, so that products do not wait for one another
        moved = tl.dot(state_low, high) + tl.dot(state_high, low) + tl.dot(state_high, high)
        state = N + moved
        entering = entering_ptr + row.to(tl.int64) * (DIM * DIM) + tile
        tl.store(entering, state, mask=tl.where(part == PARTS - 1, slow, False))  # the last one
