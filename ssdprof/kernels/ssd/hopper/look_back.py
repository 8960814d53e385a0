# mypy: ignore-errors
"""state_passing: how a segment publishes the state that it adds, and how later segments sum these states.

A segment publishes its part, the state that it adds to a zero state, and a flag.  The flag is zero until the part is
stored, and then holds the segment's decay.  The state that enters segment k is the sum over earlier segments j of
part_j times the decays of j + 1 .. k - 1, plus the initial state times all decays.  Parts are always summed from the
nearest to the farthest.  The sum stops where the product of the decays is zero, so that non-finite parts before that
point have no effect.

A share (`assignment.py`) publishes the state itself, in fp32, with a decay of zero, so that the sum stops there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssdprof.kernels.ssd.hopper.lanes import LANES, first_of, of_lanes
from ssdprof.kernels.ssd.hopper.rings import FLAG_STRIDE, SLICE, role_barrier

SIGN = gl.constexpr(-(1 << 31))  # bit that marks a flag as set; a decay is not negative

STAGES = {
    "part_of": "caller",
    "state_of": "caller",
    "published": "state_passing.wait",
    "load_acquire": "caller",
    "publish": "state_passing.store",
    "place_of": "caller",
    "leave": "state_passing.store",
    "sum_before": "state_passing.load",
}


@gluon.constexpr_function
def in_fours(part):
    """Layout of a row of `part` numbers per lane, four consecutive numbers per thread."""
    registers = [[1], [2], *([512 << k] for k in range((part // 512).bit_length() - 1))]
    threads = [[4 << k] for k in range(5)]
    return gl.DistributedLinearLayout(registers, threads, [[128], [256], [part]], [], [LANES * part])


@gluon.jit
def part_of(states):
    """States (lane p, n) as a row, in an order in which each thread has four and a warp 128 consecutive numbers."""
    N: gl.constexpr = states.shape[1]
    # p: warp, 8 rows, row; n: 8 columns, pair, column
    fragments = states.reshape([LANES, 4, 2, 8, N // 8, 4, 2]).permute((0, 4, 1, 3, 5, 2, 6))
    return gl.convert_layout(fragments.reshape([LANES * SLICE * N]), in_fours(SLICE * N))


@gluon.jit
def state_of(parts, N: gl.constexpr, layout: gl.constexpr):
    """The inverse of `part_of`: a row as states (lane p, n)."""
    fragments = parts.reshape([LANES, N // 8, 4, 8, 4, 2, 2]).permute((0, 2, 5, 3, 1, 4, 6))
    return gl.convert_layout(fragments.reshape([LANES * SLICE, N]), layout)


@gluon.jit
def publish(parts_ptr, flag_ptr, added, decay):
    """Store the state that a segment adds, and its decay, one of each per lane."""
    row = gl.arange(0, LANES * SLICE * added.shape[1], in_fours(SLICE * added.shape[1]))
    gl.store(parts_ptr + row, part_of(added).to(parts_ptr.dtype.element_ty))
    role_barrier()  # all threads have stored their numbers before the flags are set
    flag = gl.cast(decay, gl.int32, bitcast=True) | SIGN
    none = gl.full([LANES], 0, gl.int32, of_lanes)  # one element per lane, otherwise lane 0 would store for both
    gl.atomic_xchg(flag_ptr + none, flag + none, sem="release")


@gluon.jit
def load_acquire(ptr):
    code: gl.constexpr = "ld.acquire.gpu.global.b32 $0, [$1];"
    return gl.inline_asm_elementwise(code, "=r,l", [ptr], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def published(flag_ptr, wanted):
    """Wait for a segment's flag and return its decay.  Returns 0 at once if not `wanted`."""
    flag = 0
    while (flag == 0) & wanted:
        flag = load_acquire(flag_ptr)
    return gl.cast(flag & ~SIGN, gl.float32, bitcast=True)


@gluon.jit
def place_of(segment, begin, lane, states_ptr, sync_ptr, ALL_LANES: gl.constexpr, N: gl.constexpr):
    """Pointers to the lanes' parts and to the lane's flag in slot 0, and the offset of the segment's slot, in lanes.

    begin: lanes before those of the program, among the ALL_LANES of a slot
    """
    return (
        states_ptr + (begin + first_of(lane)).to(gl.int64) * (SLICE * N),
        sync_ptr + (begin + lane) * FLAG_STRIDE,
        segment.slot.to(gl.int64) * ALL_LANES,
    )


@gluon.jit
def leave(segment, place, added, decay):
    """Publish the segment's parts (lane p, n), or its states, and its decay, unless it is the last of its sequence."""
    parts_ptr, flags_ptr, mine = place
    if not segment.last:
        PART: gl.constexpr = SLICE * added.shape[1]
        publish(parts_ptr + mine * PART, flags_ptr + mine * FLAG_STRIDE, added, decay)


@gluon.jit
def sum_before(segment, place, ALL_LANES: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
    """The decayed sum of the parts of all earlier segments, and the decay of all of them together."""
    PART: gl.constexpr = SLICE * N
    parts_ptr, flags_ptr, mine = place
    row = gl.arange(0, LANES * PART, in_fours(PART))
    sum_of_parts = gl.full([LANES * PART], 0.0, gl.float32, in_fours(PART))
    # assembly, because LLVM turns gl.fma into one operation on vectors of all numbers of a thread, and takes long
    multiply_add: gl.constexpr = "fma.rn.f32 $0, $1, $2, $3;"
    step = segment.slot_step.to(gl.int64) * ALL_LANES
    theirs = mine - step  # offset of the preceding segment's slot
    left = segment.index
    passed = 1.0
    go = left > 0
    decay = published(flags_ptr + theirs * FLAG_STRIDE, go)
    while go:
        part = gl.load(parts_ptr + theirs * PART + row, cache_modifier=".cg")
        weight, passed = passed, passed * decay
        theirs, left = theirs - step, left - 1
        go = (left > 0) & (passed != 0.0)
        decay = published(flags_ptr + theirs * FLAG_STRIDE, go)  # overlaps the load of the part
        args = [part.to(gl.float32), weight, sum_of_parts]
        sum_of_parts = gl.inline_asm_elementwise(multiply_add, "=f,f,f,f", args, dtype=gl.float32, is_pure=True, pack=1)
    return state_of(sum_of_parts, N, layout), passed
