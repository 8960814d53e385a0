# mypy: ignore-errors
"""Role `units`: holds the states of both lanes in registers and computes their outputs.

States and outputs are transposed, (lane p, n) and (lane p, q), so that a state is a matrix operand directly from
registers.  `lanes.py` explains how one role serves both lanes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ssdprof.kernels.ssd.hopper.first_pass import segment_state
from ssdprof.kernels.ssd.hopper.halves import give_part, own_positions, take_part
from ssdprof.kernels.ssd.hopper.lanes import (
    LANES,
    arrive,
    half_of,
    lanes_layout,
    load_transposed,
    store_tiles,
    tiles_of,
    unit_of,
)
from ssdprof.kernels.ssd.hopper.look_back import leave, place_of, sum_before
from ssdprof.kernels.ssd.hopper.rings import (
    CHUNK,
    ENTERING,
    SLICE,
    WEIGHT,
    lane_of,
    phase,
    place_in,
    places_of,
    reinterpret,
    role_barrier,
    rows_of,
    scalar,
)
from ssdprof.kernels.ssd.hopper.weights import rounded_off, weighted

STAGES = {
    "add_residual": "chunk_scan.residual",
    "own_rows": "caller",
    "hand_out": "chunk_scan.residual",
    "scan_chunk": "setup",
    "scan_segment": "setup",
    "unit_states": "setup",
}
WAITS = {
    "full": "waiting.chunk",
    "scored": "waiting.scores",
    "unwritten": "chunk_scan.residual",
    "empty": "ahead",
    "unscored": "ahead",
    "written": "ahead",
}


@gluon.jit
def add_residual(out, x, D):
    """out + D x in fp32.  In assembly, because the compiler otherwise keeps x as fp32 from its first use, and spills.

    In fp16, x is negated before and after the conversion, otherwise ptxas reuses and keeps an earlier conversion.
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
    return gl.inline_asm_elementwise(code, "=f,=f,f,f,r,f,f", [out, x, D], dtype=gl.float32, is_pure=True, pack=2)


@gluon.constexpr_function
def in_parts(shape, rows):
    return [shape[0] // rows, rows, *shape[1:]]


@gluon.jit
def own_rows(tile, ROWS: gl.constexpr, half):
    """The ROWS of a tile, or numbers of a vector, of one half; all of them if N is not halved."""
    return reinterpret(tile, tile.dtype, in_parts(tile.shape, ROWS), tile.layout).index(half)


@gluon.jit
def hand_out(shared, lane):
    """Pass the output of a chunk to `stores`."""
    fence_async_shared()
    arrive(shared.written.index(lane))


@gluon.jit
def scan_chunk(shared, exchange, state, D, i, n, seen, lane, RELAXED: gl.constexpr):
    """Compute the output of chunk i of the segment, the program's n-th, and the state after it.

    out_q = 2^a_q C_q . state + sum_{s <= q} scores_qs x_s + D x_q; each half of N has a partial sum of the first term.

    seen: chunks that the first pass read
    """
    dtype: gl.constexpr = shared.x.dtype
    HALVES: gl.constexpr = shared.HALVES
    OWN: gl.constexpr = CHUNK // HALVES  # positions of a chunk whose output one lane finishes
    AT_ONCE: gl.constexpr = HALVES == 2 and not RELAXED  # then registers suffice for `lost` before the first wait
    by_q: gl.constexpr = lanes_layout(CHUNK)  # (lane p, q)
    by_own: gl.constexpr = lanes_layout(OWN)  # (lane p, own q)
    q_operand: gl.constexpr = gl.DotOperandLayout(0, by_q, 2)
    n_operand: gl.constexpr = gl.DotOperandLayout(0, lanes_layout(shared.rows.shape[2]), 2)
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LANES, OWN, SLICE], dtype)
    half = half_of(shared, lane)
    slot, stage = place_in(n, shared.RING), place_in(n, shared.SCORE_RING)
    mbarrier.wait(shared.full.index(slot), phase(n, shared.RING))
    # stage chunk_state: its operands
    B_place, C_place, x_place = places_of(shared, seen, n)
    x = load_transposed(shared, x_place, lane, q_operand)
    weight = lane_of(shared.gates, slot * 4 + WEIGHT, lane).load(gl.SliceLayout(0, q_operand))
    decay = scalar(lane_of(shared.decay, slot, lane))
    # stage chunk_scan.previous: what entered the chunk
    C = rows_of(shared, C_place, half).permute((1, 0))
    zero = gl.full([LANES * SLICE, CHUNK], 0.0, gl.float32, by_q)
    entered = gl.convert_layout(state.to(dtype), q_operand)
    out_begun = warpgroup_mma(entered, C, zero, use_acc=False, is_async=True)
    # stage chunk_state
    B = rows_of(shared, B_place, half)
    xw = weighted(x, weight, False)
    state_begun = warpgroup_mma(gl.convert_layout(xw, n_operand), B, state * decay, is_async=True)
    if AT_ONCE:  # add the rounding error of xw
        lost = gl.convert_layout(rounded_off(x, weight, xw), n_operand)
        state_begun = warpgroup_mma(lost, B, state_begun, is_async=True)
    # stage chunk_scan.residual: the chunk before's output, under these products
    if i > 0:
        hand_out(shared, lane)
    # stage chunk_scan.previous
    out = warpgroup_mma_wait(2 if AT_ONCE else 1, deps=[out_begun])
    # stage chunk_state: what that loses, here, where registers are free again
    if not RELAXED and not AT_ONCE:
        again = lane_of(shared.gates, slot * 4 + WEIGHT, lane).load(gl.SliceLayout(0, q_operand))
        lost = gl.convert_layout(rounded_off(x, again, xw), n_operand)
        state_begun = warpgroup_mma(lost, B, state_begun, is_async=True)
    # stage chunk_scan.previous
    if HALVES == 2:
        out = give_part(exchange, out, lane, by_own)
    entering = own_rows(lane_of(shared.gates, slot * 4 + ENTERING, lane), OWN, half)
    entering = entering.load(gl.SliceLayout(0, by_own))[None, :]
    out *= entering
    # stage chunk_scan.current: what the chunk adds
    mbarrier.wait(shared.scored.index(stage), phase(n, shared.SCORE_RING))
    m = own_rows(shared.scores.index(stage * shared.UNITS + unit_of(shared, lane)), OWN, half)
    out_begun = warpgroup_mma(x, m.permute((1, 0)), out, is_async=True)
    # a loop that waits at an mbarrier needs one barrier per iteration; here it costs least
    if HALVES == 2:
        # stage chunk_scan.previous
        theirs = take_part(exchange, lane, by_own)
        # stage chunk_scan.current
    else:
        role_barrier()
    state, out = warpgroup_mma_wait(0, deps=[state_begun, out_begun])
    arrive(shared.unscored.index(stage))
    arrive(shared.empty.index(slot))
    # stage chunk_scan.residual
    if D is not None:
        own_x = gl.convert_layout(x, by_q)
        if HALVES == 2:
            own_x = own_positions(own_x, half, by_own)
        out = add_residual(out, own_x, D[:, None])
    if HALVES == 2:
        # stage chunk_scan.previous
        out += entering * theirs
        # stage chunk_scan.residual
    mbarrier.wait(shared.unwritten.index(lane), (n & 1) ^ 1)
    store_tiles(tiles_of(shared.out, lane, out_layout).permute((0, 2, 1)), out.to(dtype))
    return state


@gluon.jit
def scan_segment(
    lane, shared, segment, n, tensors, INITIAL_STRIDES: gl.constexpr,
    HEADS: gl.constexpr, HEADDIM: gl.constexpr, DSTATE: gl.constexpr, SLICES: gl.constexpr, RELAXED: gl.constexpr,
    PASSING: gl.constexpr,
):  # fmt: skip
    """Compute the outputs of a segment and the states after it.  n: the program's chunks before this segment"""
    D_ptr, D_strides, initial_ptr, states_ptr, final_ptr, sync_ptr, exchange = tensors
    HALVES: gl.constexpr = shared.HALVES
    WIDTH: gl.constexpr = DSTATE // HALVES
    OWN: gl.constexpr = CHUNK // HALVES  # positions of a chunk whose output one lane finishes
    by_own: gl.constexpr = lanes_layout(OWN)  # (lane p, own q)
    by_n: gl.constexpr = lanes_layout(WIDTH)  # (lane p, n)
    unit, half = segment.unit + unit_of(shared, lane), half_of(shared, lane)
    i_h, p_0 = unit // SLICES, unit % SLICES * SLICE
    state = gl.full([LANES * SLICE, WIDTH], 0.0, gl.float32, by_n)
    o_p = p_0 + gl.arange(0, LANES * SLICE, gl.SliceLayout(1, by_n)) % SLICE
    o_n = half * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, by_n))
    inside = None  # no mask
    if HEADDIM % SLICE != 0:
        inside = (o_p < HEADDIM)[:, None]

    # stage state_passing.load: the state that enters the segment
    seen = 0
    added, decay = state, 1.0
    if segment.goes_back:
        added, decay, seen = segment_state(shared, state, lane, RELAXED)
    if PASSING == "recompute":
        state = added
    if PASSING == "look back" or PASSING == "hand on":
        ALL_LANES: gl.constexpr = HEADS * SLICES * HALVES if PASSING == "look back" else 2
        begin = segment.unit * HALVES if PASSING == "look back" else gl.to_tensor(0)
        place = place_of(segment, begin, lane, states_ptr, sync_ptr, ALL_LANES, WIDTH)
        if PASSING == "look back":
            leave(segment, place, added, decay)
        state, decay = sum_before(segment, place, ALL_LANES, WIDTH, by_n)
    if initial_ptr is not None:  # in every segment, so that non-finite numbers in it reach all outputs
        # rows past a head's P may hold any value: they do not affect other rows, and are not stored
        sequence = segment.sequence.to(gl.int64)
        own_ptr = initial_ptr + sequence * INITIAL_STRIDES[0] + i_h.to(gl.int64) * INITIAL_STRIDES[1]
        rows = own_ptr + o_p.to(gl.int64) * INITIAL_STRIDES[2]
        initial_tile = rows[:, None] + (o_n.to(gl.int64) * INITIAL_STRIDES[3])[None, :]
        initial = gl.load(initial_tile, mask=inside).to(gl.float32)
        state = gl.fma(initial, decay, state)
    # stage setup: the output, chunk after chunk
    D = None
    if D_ptr is not None:
        o_d = p_0 + gl.arange(0, LANES * SLICE, gl.SliceLayout(1, by_own)) % SLICE
        D_row = D_ptr + i_h.to(gl.int64) * D_strides[0] + o_d.to(gl.int64) * D_strides[1]
        D = gl.load(D_row, mask=o_d < HEADDIM, other=0.0).to(gl.float32)
    role_barrier()  # without it, kernels without a first pass have one more barrier per chunk
    for i in range(segment.nchunks):
        state = scan_chunk(shared, exchange, state, D, i, n + i, seen, lane, RELAXED)
    if segment.nchunks > 0:
        hand_out(shared, lane)
    # stage state_passing.store
    if PASSING == "hand on":
        leave(segment, place, state, gl.to_tensor(0.0))  # the state includes all earlier chunks
    if segment.last:
        own = (segment.sequence.to(gl.int64) * HEADS + i_h) * (HEADDIM * DSTATE)
        gl.store((final_ptr + own + o_p * DSTATE)[:, None] + o_n[None, :], state, mask=inside)


@gluon.jit
def unit_states(
    lane, shared, work, tensors, INITIAL_STRIDES: gl.constexpr,
    HEADS: gl.constexpr, HEADDIM: gl.constexpr, DSTATE: gl.constexpr, SLICES: gl.constexpr, RELAXED: gl.constexpr,
    PASSING: gl.constexpr,
):  # fmt: skip
    for k in range(work.segments()):
        segment, n = work.segment_at(k)
        scan_segment(
            lane, shared, segment, n, tensors, INITIAL_STRIDES, HEADS, HEADDIM, DSTATE, SLICES, RELAXED, PASSING
        )  # fmt: skip
