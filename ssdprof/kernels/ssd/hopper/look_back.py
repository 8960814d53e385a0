# mypy: ignore-errors
"""state_passing: what a segment leaves for those after it, and how they sum it.

A segment leaves its part: the state that it adds to a zero state.  With it goes a flag, which is zero until the part is
there, and then holds the segment's decay.  The state that enters segment k is the sum over the segments j before it of
part_j times the decays of j + 1 .. k - 1, and the initial state times all decays.  Parts are summed from the nearest
on, always in that order, and no further than where the decays have multiplied to zero: what is not finite there is
not seen.

A share (`assignment.py`) leaves the state itself, in fp32, with a decay of zero: nothing before it counts any more.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssdprof.kernels.ssd.hopper.lanes import LANES, first_of, of_lanes
from ssdprof.kernels.ssd.hopper.rings import FLAG_STRIDE, SLICE, role_barrier

SIGN = gl.constexpr(-(1 << 31))  # set in a flag that holds a decay, which is not negative

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
    """Layout of a row of `part` numbers for each lane, four numbers a thread."""
    registers = [[1], [2], *([512 << k] for k in range((part // 512).bit_length() - 1))]
    threads = [[4 << k] for k in range(5)]
    return gl.DistributedLinearLayout(registers, threads, [[128], [256], [part]], [], [LANES * part])


@gluon.jit
def part_of(states):
    """States (lane p, n) as a row of numbers, in an order in which each thread has four at once, and a warp 128."""
    N: gl.constexpr = states.shape[1]
    # p: warp, 8 rows, row; n: 8 columns, pair, column
    fragments = states.reshape([LANES, 4, 2, 8, N // 8, 4, 2]).permute((0, 4, 1, 3, 5, 2, 6))
    return gl.convert_layout(fragments.reshape([LANES * SLICE * N]), in_fours(SLICE * N))


@gluon.jit
def state_of(parts, N: gl.constexpr, layout: gl.constexpr):
    """What `part_of` made a row."""
    fragments = parts.reshape([LANES, N // 8, 4, 8, 4, 2, 2]).permute((0, 2, 5, 3, 1, 4, 6))
    return gl.convert_layout(fragments.reshape([LANES * SLICE, N]), layout)


@gluon.jit
def publish(parts_ptr, flag_ptr, added, decay):
    """What a segment adds to states, and its decay: one of each for each lane."""
    row = gl.arange(0, LANES * SLICE * added.shape[1], in_fours(SLICE * added.shape[1]))
    gl.store(parts_ptr + row, part_of(added).to(parts_ptr.dtype.element_ty))
    role_barrier()  # every thread's numbers are stored before the flags say so
    flag = gl.cast(decay, gl.int32, bitcast=True) | SIGN
    none = gl.full([LANES], 0, gl.int32, of_lanes)  # a number for each lane, or lane 0 would do it for both
    gl.atomic_xchg(flag_ptr + none, flag + none, sem="release")


@gluon.jit
def load_acquire(ptr):
    code: gl.constexpr = "ld.acquire.gpu.global.b32 $0, [$1];"
    return gl.inline_asm_elementwise(code, "=r,l", [ptr], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def published(flag_ptr, wanted):
    """A segment's decay, once its part is there too; 0, at once, if it is not wanted."""
    flag = 0
    while (flag == 0) & wanted:
        flag = load_acquire(flag_ptr)
    return gl.cast(flag & ~SIGN, gl.float32, bitcast=True)


@gluon.jit
def place_of(segment, begin, lane, states_ptr, sync_ptr, ALL_LANES: gl.constexpr, N: gl.constexpr):
    """Where in slot 0 the lanes' parts and a lane's flag are, and how many lanes further those of the segment are.

    begin: how many lanes there are before the program's, of ALL_LANES in a slot.
    """
    return (
        states_ptr + (begin + first_of(lane)).to(gl.int64) * (SLICE * N),
        sync_ptr + (begin + lane) * FLAG_STRIDE,
        segment.slot.to(gl.int64) * ALL_LANES,
    )


@gluon.jit
def leave(segment, place, added, decay):
    """For the segments after it: the parts (lane p, n) that the segment has `added`, or its states, and the decay."""
    parts_ptr, flags_ptr, mine = place
    if not segment.last:
        PART: gl.constexpr = SLICE * added.shape[1]
        publish(parts_ptr + mine * PART, flags_ptr + mine * FLAG_STRIDE, added, decay)


@gluon.jit
def sum_before(segment, place, ALL_LANES: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
    """The sum of the parts of all segments before, decayed, and the decay of all of them."""
    PART: gl.constexpr = SLICE * N
    parts_ptr, flags_ptr, mine = place
    row = gl.arange(0, LANES * PART, in_fours(PART))
    sum_of_parts = gl.full([LANES * PART], 0.0, gl.float32, in_fours(PART))
    # in assembly: of gl.fma LLVM makes one of vectors of all that a thread has, and takes long over it
    multiply_add: gl.constexpr = "fma.rn.f32 $0, $1, $2, $3;"
    step = segment.slot_step.to(gl.int64) * ALL_LANES
    theirs = mine - step  # of the segment before
    left = segment.index
    passed = 1.0
    go = left > 0
    decay = published(flags_ptr + theirs * FLAG_STRIDE, go)
    while go:
        part = gl.load(parts_ptr + theirs * PART + row, cache_modifier=".cg")
        weight, passed = passed, passed * decay
        theirs, left = theirs - step, left - 1
        go = (left > 0) & (passed != 0.0)
        decay = published(flags_ptr + theirs * FLAG_STRIDE, go)  # while the part is on its way
        args = [part.to(gl.float32), weight, sum_of_parts]
        sum_of_parts = gl.inline_asm_elementwise(multiply_add, "=f,f,f,f", args, dtype=gl.float32, is_pure=True, pack=1)
    return state_of(sum_of_parts, N, layout), passed
