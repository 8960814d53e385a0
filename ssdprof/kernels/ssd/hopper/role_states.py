"""Role `units`: keeps the states of both lanes in registers and computes their outputs.

States and outputs are transposed, (lane p, n) and (lane p, q), so that a state is a matrix operand
directly from registers.  `lanes.py` explains how one role serves both lanes.

state_passing (docs/ssd-mathematics.md, equation 13a): in its first pass, a segment computes its
part, the state that it adds to a zero state, and publishes the part with a flag.  The flag is zero
until the part is stored, and then holds the segment's decay.  The state that enters segment k is
the sum over earlier segments j of part_j times the decays of j + 1 .. k - 1, plus the initial state
times all decays.  Parts are always summed from the nearest to the farthest.  The sum stops where
the product of the decays is zero, so that non-finite parts before that point have no effect.  A
program with a share of all sequences (`hopper_kernel.py`) publishes no part, but the state itself,
in fp32 and with a decay of zero, so that the sum stops there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ssdprof.kernels._gluon import (
    arrive,
    load_acquire,
    phase,
    place_in,
    reinterpret,
    role_barrier,
    scalar,
)
from ssdprof.kernels.hopper.ring import CHUNK
from ssdprof.kernels.ssd.hopper.lanes import (
    LANES,
    first_of,
    give_part,
    grouped,
    half_of,
    lane_number,
    lane_scalar_layout,
    lanes_layout,
    load_transposed,
    own_positions,
    rounded_off,
    store_tiles,
    take_part,
    tiles_of,
    unit_of,
    weighted,
)
from ssdprof.kernels.ssd.hopper.rings import (
    ENTERING,
    FLAG_STRIDE,
    SLICE,
    WEIGHT,
    lane_of,
    rows_of,
    slots_of,
)

# the sign bit of a flag, which is set where the flag is; the other bits are those of a decay, which
# is not negative
SIGN = gl.constexpr(-(1 << 31))

# stages of functions: `stalls/attribute.py`
STAGES = {
    "add_turn": "chunk_state.first_pass",
    "segment_state": "chunk_state.first_pass",
    "publish": "state_passing.store",
    "wait_for_decay": "state_passing.wait",
    "publish_segment": "state_passing.store",
    "sum_before": "state_passing.load",
    "add_residual": "chunk_scan.residual",
    "hand_out": "chunk_scan.residual",
    "scan_chunk": "setup",
    "scan_segment": "setup",
    "units": "setup",
}
# Stage of a wait at each barrier.  The wait for a free slot of `out` belongs to the output's store.
WAITS = {"full": "waiting.chunk", "scored": "waiting.scores", "unwritten": "chunk_scan.residual"}


@gluon.jit
def add_turn(shared, state, x, weight, seen, lane, RELAXED: gl.constexpr):
    """Add to `state` the contribution of one turn of the first pass, which processes one chunk, or
    two if N is split (`rings.py`).

    x, weight: of the turn's first chunk, for whose barrier `full` the caller has waited.
    seen: chunks that earlier turns of the first pass read.
    lane: the lane of this thread, 0 or 1 (`lanes.py`).
    RELAXED: multiply x by the first 16-bit part of each weight only, not by both (`weighted`).

    Returns the state; x and weight of the next turn's first chunk, which mean nothing after the
    last turn; the decay of all chunks read so far, this turn included; and whether there is a next
    turn.
    """
    operand: gl.constexpr = gl.DotOperandLayout(0, lanes_layout(shared.rows.shape[2]), 2)
    weights: gl.constexpr = gl.SliceLayout(0, operand)
    half = half_of(shared, lane)
    first = shared.first
    # slots of the turn's first chunk, in the ring of chunks, and in those of weights and of decays
    slot, weight_slot = place_in(seen, first.DEPTH), place_in(seen, first.weights.shape[0])
    # the products of the turn's chunks: weighted x^T times B
    xw = weighted(x, weight, not RELAXED)
    product = warpgroup_mma(xw, rows_of(shared, slot, half), state, is_async=True)
    if first.TURN == 2:
        # for x and B; `full` of the turn's first chunk covers the weights of both chunks
        mbarrier.wait(first.full.index(slot + 1), phase(seen, first.DEPTH))
        x = load_transposed(shared, slot + 1, lane, operand)
        xw = weighted(x, lane_of(first.weights, weight_slot + 1, lane).load(weights), not RELAXED)
        product = warpgroup_mma(xw, rows_of(shared, slot + 1, half), product, is_async=True)
    # The flag and the decay of the turn.  No wait is needed: `scores` writes both before it arrives
    # at `full` of the turn's first chunk, for which this role has waited
    flag_slot = place_in(seen // first.TURN, first.FLAG_SLOTS)
    goes_on = scalar(first.continue_flag.index(flag_slot)) != 0
    decay = scalar(lane_of(first.decay, weight_slot + first.TURN - 1, lane))
    if first.TURN == 2:
        product = warpgroup_mma_wait(1, deps=[product])
        arrive(first.empty.index(slot))
    # load the next turn's first operands during this turn's last product; after the last turn they
    # are unused
    following = place_in(seen + first.TURN, first.DEPTH)
    mbarrier.wait(first.full.index(following), phase(seen + first.TURN, first.DEPTH), pred=goes_on)
    x = load_transposed(shared, following, lane, operand)
    weight_slot = place_in(seen + first.TURN, first.weights.shape[0])
    weight = lane_of(first.weights, weight_slot, lane).load(weights)
    state = warpgroup_mma_wait(0, deps=[product])
    arrive(first.empty.index(slot + first.TURN - 1))
    return state, x, weight, decay, goes_on


@gluon.jit
def segment_state(shared, state, lane, RELAXED: gl.constexpr):
    """The first pass, from the last chunk backwards: (the state that its chunks add to a zero
    state, their decay, the number of chunks read).

    state: zeros.  lane, RELAXED: see `add_turn`
    """
    operand: gl.constexpr = gl.DotOperandLayout(0, lanes_layout(shared.rows.shape[2]), 2)
    first = shared.first
    mbarrier.wait(first.full.index(0), 0)  # x and B from `loads`, weights from `scores`
    x = load_transposed(shared, 0, lane, operand)
    weight = lane_of(first.weights, 0, lane).load(gl.SliceLayout(0, operand))
    decay = 1.0
    seen = 0
    goes_on = True
    while goes_on:
        state, x, weight, decay, goes_on = add_turn(shared, state, x, weight, seen, lane, RELAXED)
        seen += first.TURN
    return state, decay, seen


@gluon.constexpr_function
def in_fours(part):
    """Layout of a row of `part` numbers per lane: each thread has groups of four consecutive
    numbers, and a warp 128 consecutive ones at a time.
    """
    groups_log2 = (part // 512).bit_length() - 1  # of four numbers of a thread
    registers = [[1], [2]] + [[512 << k] for k in range(groups_log2)]
    threads = [[4 << k] for k in range(5)]
    return gl.DistributedLinearLayout(
        registers, threads, [[128], [256], [part]], [], [LANES * part]
    )


@gluon.jit
def part_of(states):
    """States (lane p, n) as a row of numbers, in an order in which they need not move between
    threads: each thread has groups of four consecutive numbers, each of which one access stores
    (`in_fours`).
    """
    N: gl.constexpr = states.shape[1]
    # p is split into (warp, half of its 16 rows, row), n into (block of 8 columns, thread, column)
    fragments = states.reshape([LANES, 4, 2, 8, N // 8, 4, 2]).permute((0, 4, 1, 3, 5, 2, 6))
    return gl.convert_layout(fragments.reshape([LANES * SLICE * N]), in_fours(SLICE * N))


@gluon.jit
def state_of(parts, N: gl.constexpr, layout: gl.constexpr):
    """The inverse of `part_of`: a row of numbers as states (lane p, n).  N: of one lane"""
    fragments = parts.reshape([LANES, N // 8, 4, 8, 4, 2, 2]).permute((0, 2, 5, 3, 1, 4, 6))
    return gl.convert_layout(fragments.reshape([LANES * SLICE, N]), layout)


@gluon.jit
def publish(parts_ptr, flag_ptr, added, decay):
    """Store the state that a segment adds, (lane p, n), and set the flag with the segment's decay,
    for each lane.
    """
    row = gl.arange(0, LANES * SLICE * added.shape[1], in_fours(SLICE * added.shape[1]))
    gl.store(parts_ptr + row, part_of(added).to(parts_ptr.dtype.element_ty))
    role_barrier()  # all threads have stored their numbers before the flags are set
    flag = gl.cast(decay, gl.int32, bitcast=True) | SIGN
    # tensors with one element per lane: if these were scalars, lane 0 would store for both
    zeros = gl.full([LANES], 0, gl.int32, lane_scalar_layout)
    gl.atomic_xchg(flag_ptr + zeros, flag + zeros, sem="release")


@gluon.jit
def wait_for_decay(flag_ptr, pred):
    """Wait for a segment's flag, and return the decay that it holds.  Returns 0 at once if `pred`
    is false.
    """
    flag = 0
    while (flag == 0) & pred:
        flag = load_acquire(flag_ptr)
    return gl.cast(flag & ~SIGN, gl.float32, bitcast=True)


@gluon.jit
def slot_of(segment, begin, lane, states_ptr, flags_ptr, ALL_LANES: gl.constexpr, N: gl.constexpr):
    """(pointer to the lanes' parts in slot 0, pointer to the lane's flag in slot 0, offset of the
    segment's slot, in lanes).

    begin: index of the program's first lane among the ALL_LANES of a slot
    states_ptr, flags_ptr: all parts (slot, lane, p, n), and their flags.  N: of one lane
    """
    return (
        states_ptr + (begin + first_of(lane)).to(gl.int64) * (SLICE * N),
        flags_ptr + (begin + lane) * FLAG_STRIDE,
        segment.slot.to(gl.int64) * ALL_LANES,
    )


@gluon.jit
def publish_segment(segment, slot, added, decay):
    """Publish the segment's parts (lane p, n), or its states, and its decay.  The last segment of a
    sequence publishes nothing.

    slot: result of `slot_of`.  added: the parts or states
    """
    parts_ptr, flags_ptr, offset = slot
    if not segment.last:
        PART: gl.constexpr = SLICE * added.shape[1]
        publish(parts_ptr + offset * PART, flags_ptr + offset * FLAG_STRIDE, added, decay)


@gluon.jit
def sum_before(segment, slot, ALL_LANES: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
    """The sum (lane p, n) of the parts of earlier segments, each decayed to the end of the
    preceding segment, and the decay of all these segments together.

    slot: result of `slot_of`.  N: of one lane.  layout: of the sum
    """
    PART: gl.constexpr = SLICE * N
    parts_ptr, flags_ptr, offset = slot
    row = gl.arange(0, LANES * PART, in_fours(PART))
    sum_of_parts = gl.full([LANES * PART], 0.0, gl.float32, in_fours(PART))
    # in assembly, because LLVM would turn gl.fma into one operation on a vector of all numbers of a
    # thread, and take long to compile it
    multiply_add: gl.constexpr = "fma.rn.f32 $0, $1, $2, $3;"
    step = segment.slot_step.to(gl.int64) * ALL_LANES
    previous = offset - step  # offset of the preceding segment's slot
    remaining = segment.index
    passed = 1.0  # the decay of all segments whose parts have been summed
    goes_on = remaining > 0
    # a flag is set with release order after its part is stored, and is read with acquire order
    decay = wait_for_decay(flags_ptr + previous * FLAG_STRIDE, goes_on)
    while goes_on:
        part = gl.load(parts_ptr + previous * PART + row, cache_modifier=".cg")
        weight, passed = passed, passed * decay
        previous, remaining = previous - step, remaining - 1
        goes_on = (remaining > 0) & (passed != 0.0)
        # this wait overlaps the load of the part
        decay = wait_for_decay(flags_ptr + previous * FLAG_STRIDE, goes_on)
        args = [part.to(gl.float32), weight, sum_of_parts]
        sum_of_parts = gl.inline_asm_elementwise(
            multiply_add, "=f,f,f,f", args, dtype=gl.float32, is_pure=True, pack=1
        )
    return state_of(sum_of_parts, N, layout), passed


@gluon.jit
def add_residual(out, x, D):
    """out + D x in fp32, (lane p, q).  D: (lane p, 1)

    In assembly, because the compiler would otherwise keep x as fp32 from its first use on, and
    spill.  In fp16, x is negated before and after the conversion, because ptxas would otherwise
    reuse and keep an earlier conversion.
    """
    if x.dtype == gl.bfloat16:
        code: gl.constexpr = """{
            .reg .b32 lo, hi;
            shl.b32 lo, $4, 16;
            and.b32 hi, $4, 0xffff0000;
            fma.rn.f32 $0, lo, $5, $2;
            fma.rn.f32 $1, hi, $6, $3;
        }"""
    else:
        code: gl.constexpr = """{
            .reg .b16 a, b;
            .reg .f32 lo, hi;
            .reg .b32 minus;
            neg.f16x2 minus, $4;
            mov.b32 {a, b}, minus;
            cvt.f32.f16 lo, a;
            cvt.f32.f16 hi, b;
            neg.f32 lo, lo;
            neg.f32 hi, hi;
            fma.rn.f32 $0, lo, $5, $2;
            fma.rn.f32 $1, hi, $6, $3;
        }"""
    return gl.inline_asm_elementwise(
        code, "=f,=f,f,f,r,f,f", [out, x, D], dtype=gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def own_rows(tile, ROWS: gl.constexpr, half):
    """The ROWS rows of a tile, or numbers of a vector, that a half of N finishes: the half-th group
    of ROWS.  If N is not split, ROWS are all of them, and half is 0.
    """
    return reinterpret(tile, tile.dtype, grouped(tile.shape, ROWS), tile.layout).index(half)


@gluon.jit
def hand_out(shared, lane):
    """Pass this lane's output of a chunk to `stores`."""
    fence_async_shared()  # makes the output visible to TMA
    arrive(shared.written.index(lane))


@gluon.jit
def scan_chunk(env, state, D, i, n, seen, lane):
    """Compute and store the output of chunk i of the segment, the program's n-th, and return the
    state after it.  The output is passed to `stores` by the next chunk, or after the last one.

    out_q = 2^a_q C_q . state + sum_{s <= q} scores_qs x_s + D x_q; each half of N has a partial sum
    of the first term.

    D: (lane p), or None.  seen: chunks that the first pass read
    lane: the lane of this thread, 0 or 1
    """
    shared = env.shared
    RELAXED: gl.constexpr = env.S.RELAXED
    dtype: gl.constexpr = shared.x.dtype
    N_SPLIT: gl.constexpr = shared.N_SPLIT
    OWN: gl.constexpr = CHUNK // N_SPLIT  # positions of a chunk whose output one lane finishes
    # whether registers suffice for `lost` before the first wait
    AT_ONCE: gl.constexpr = N_SPLIT == 2 and not RELAXED
    by_q: gl.constexpr = lanes_layout(CHUNK)  # (lane p, q)
    by_own: gl.constexpr = lanes_layout(OWN)  # (lane p, own q)
    q_operand: gl.constexpr = gl.DotOperandLayout(0, by_q, 2)
    n_operand: gl.constexpr = gl.DotOperandLayout(0, lanes_layout(shared.rows.shape[2]), 2)
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LANES, OWN, SLICE], dtype)
    half = half_of(shared, lane)
    slot, score_slot = place_in(n, shared.DEPTH), place_in(n, shared.SCORE_DEPTH)
    # for the tiles of the chunk from `loads`, and for its vectors and its decay from `gates`
    mbarrier.wait(shared.full.index(slot), phase(n, shared.DEPTH))
    # stage chunk_state: its operands
    B_slot, C_slot, x_slot = slots_of(shared, seen, n)
    x = load_transposed(shared, x_slot, lane, q_operand)
    weight = lane_of(shared.gates, slot * 4 + WEIGHT, lane).load(gl.SliceLayout(0, q_operand))
    decay = scalar(lane_of(shared.decay, slot, lane))
    # stage chunk_scan.previous: the product of the entering state with C
    C = rows_of(shared, C_slot, half).permute((1, 0))
    zero = gl.full([LANES * SLICE, CHUNK], 0.0, gl.float32, by_q)
    entered = gl.convert_layout(state.to(dtype), q_operand)
    out_begun = warpgroup_mma(entered, C, zero, use_acc=False, is_async=True)
    # stage chunk_state: the products with B
    B = rows_of(shared, B_slot, half)
    xw = weighted(x, weight, WHOLE=False)
    state_begun = warpgroup_mma(gl.convert_layout(xw, n_operand), B, state * decay, is_async=True)
    if AT_ONCE:  # add the rounding error of xw
        lost = gl.convert_layout(rounded_off(x, weight, xw), n_operand)
        state_begun = warpgroup_mma(lost, B, state_begun, is_async=True)
    # stage chunk_scan.residual: pass on the output of the chunk before, beside these products
    if i > 0:
        hand_out(shared, lane)
    # stage chunk_scan.previous
    out = warpgroup_mma_wait(2 if AT_ONCE else 1, deps=[out_begun])
    # stage chunk_state: the rounding error of xw, here, where registers are free again
    if not RELAXED and not AT_ONCE:
        weight_again = lane_of(shared.gates, slot * 4 + WEIGHT, lane).load(
            gl.SliceLayout(0, q_operand)
        )
        lost = gl.convert_layout(rounded_off(x, weight_again, xw), n_operand)
        state_begun = warpgroup_mma(lost, B, state_begun, is_async=True)
    # stage chunk_scan.previous: the sum over N, and the decay of each position
    if N_SPLIT == 2:
        out = give_part(env.exchange, out, lane, by_own)
    entering = own_rows(lane_of(shared.gates, slot * 4 + ENTERING, lane), OWN, half)
    entering = entering.load(gl.SliceLayout(0, by_own))[None, :]
    out *= entering
    # stage chunk_scan.current: the product of the scores with x
    mbarrier.wait(shared.scored.index(score_slot), phase(n, shared.SCORE_DEPTH))
    tile = shared.scores.index(score_slot * shared.UNITS + unit_of(shared, lane))
    scores = own_rows(tile, OWN, half)
    out_begun = warpgroup_mma(x, scores.permute((1, 0)), out, is_async=True)
    # a loop that waits at an mbarrier needs one barrier per iteration; here it costs least
    if N_SPLIT == 2:
        # stage chunk_scan.previous
        from_other_half = take_part(env.exchange, lane, by_own)
        # stage chunk_scan.current
    else:
        role_barrier()
    state, out = warpgroup_mma_wait(0, deps=[state_begun, out_begun])
    arrive(shared.unscored.index(score_slot))
    arrive(shared.empty.index(slot))
    # stage chunk_scan.residual: the skip, and the store of the output
    if D is not None:
        own_x = gl.convert_layout(x, by_q)
        if N_SPLIT == 2:
            own_x = own_positions(own_x, half, by_own)
        out = add_residual(out, own_x, D[:, None])
    if N_SPLIT == 2:
        # stage chunk_scan.previous
        out += entering * from_other_half
        # stage chunk_scan.residual
    mbarrier.wait(shared.unwritten.index(lane), (n & 1) ^ 1)
    store_tiles(tiles_of(shared.out, lane, out_layout).permute((0, 2, 1)), out.to(dtype))
    return state


@gluon.jit
def scan_segment(lane, env, segment, n):
    """Compute the outputs of a segment, and the final state if it ends its sequence.

    n: the program's chunks before this segment
    """
    shared = env.shared
    S: gl.constexpr = env.S
    HEADDIM: gl.constexpr = S.HEADDIM
    DSTATE: gl.constexpr = S.DSTATE
    PASSING: gl.constexpr = S.PASSING
    N_SPLIT: gl.constexpr = shared.N_SPLIT
    WIDTH: gl.constexpr = DSTATE // N_SPLIT
    OWN: gl.constexpr = CHUNK // N_SPLIT  # positions of a chunk whose output one lane finishes
    by_own: gl.constexpr = lanes_layout(OWN)  # (lane p, own q)
    by_n: gl.constexpr = lanes_layout(WIDTH)  # (lane p, n)
    unit, half = segment.unit + unit_of(shared, lane), half_of(shared, lane)
    i_h, p_0 = unit // S.SLICES, unit % S.SLICES * SLICE
    state = gl.full([LANES * SLICE, WIDTH], 0.0, gl.float32, by_n)
    o_p = p_0 + gl.arange(0, LANES * SLICE, gl.SliceLayout(1, by_n)) % SLICE
    o_n = half * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, by_n))
    inside = None  # no mask
    if HEADDIM % SLICE != 0:
        inside = (o_p < HEADDIM)[:, None]

    # stage state_passing.load: the state that enters the segment
    seen = 0
    added, decay = state, 1.0
    if segment.has_first_pass:
        added, decay, seen = segment_state(shared, state, lane, S.RELAXED)
    if PASSING == "recompute":
        state = added
    if PASSING == "look back" or PASSING == "carry":
        # the lanes of a slot, and which of them is the program's first one: a segment's slot has
        # the lanes of all units of the sequence, and a share's slot those of its program
        ALL_LANES: gl.constexpr = S.HEADS * S.SLICES * N_SPLIT if PASSING == "look back" else 2
        begin = segment.unit * N_SPLIT if PASSING == "look back" else gl.to_tensor(0)
        slot = slot_of(segment, begin, lane, env.states_ptr, env.flags_ptr, ALL_LANES, WIDTH)
        if PASSING == "look back":
            publish_segment(segment, slot, added, decay)
        state, decay = sum_before(segment, slot, ALL_LANES, WIDTH, by_n)
    # the initial state times all decays; in every segment, so that non-finite numbers in it reach
    # all outputs
    if env.initial_ptr is not None:
        # rows past a head's P may hold any value: they do not affect other rows, and are not stored
        of_sequence = segment.sequence.to(gl.int64) * S.INITIAL_STRIDES[0]
        of_head = i_h.to(gl.int64) * S.INITIAL_STRIDES[1]
        rows = env.initial_ptr + of_sequence + of_head + o_p.to(gl.int64) * S.INITIAL_STRIDES[2]
        initial_tile = rows[:, None] + (o_n.to(gl.int64) * S.INITIAL_STRIDES[3])[None, :]
        initial = gl.load(initial_tile, mask=inside).to(gl.float32)
        state = gl.fma(initial, decay, state)
    # stage setup: the output, chunk after chunk
    D = None
    if env.D_ptr is not None:
        o_d = p_0 + gl.arange(0, LANES * SLICE, gl.SliceLayout(1, by_own)) % SLICE
        D_strides = env.strides[3]
        D_row = env.D_ptr + i_h.to(gl.int64) * D_strides[0] + o_d.to(gl.int64) * D_strides[1]
        D = gl.load(D_row, mask=o_d < HEADDIM, other=0.0).to(gl.float32)
    role_barrier()  # without it, kernels without a first pass have one more barrier per chunk
    for i in range(segment.nchunks):
        state = scan_chunk(env, state, D, i, n + i, seen, lane)
    if segment.nchunks > 0:
        hand_out(shared, lane)
    # stage state_passing.store
    if PASSING == "carry":
        # the state includes all earlier chunks
        publish_segment(segment, slot, state, gl.to_tensor(0.0))
    if segment.last:
        first = (segment.sequence.to(gl.int64) * S.HEADS + i_h) * (HEADDIM * DSTATE)
        gl.store((env.final_ptr + first + o_p * DSTATE)[:, None] + o_n[None, :], state, mask=inside)


@gluon.jit
def units(env):
    """Role of both lanes, of the program's first threads: compute the outputs and final states of
    all segments of the program.
    """
    lane = lane_number()
    for i_segment in range(env.work.segments()):
        segment, n = env.work.segment_at(i_segment)
        scan_segment(lane, env, segment, n)
