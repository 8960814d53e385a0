# mypy: ignore-errors
"""state_passing: what a segment leaves for those after it, and how they sum it.

A segment leaves its part: the state that it adds to a zero state.  With it goes a flag, which is zero until the part is
there, and then holds the segment's decay.  The state that enters segment k is the sum over the segments j before it of
part_j times the decays of j + 1 .. k - 1, and the initial state times all decays.  Parts are summed from the nearest
on, always in that order, and no further than where the decays have multiplied to zero: what is not finite there is
not seen.

A share (`hopper_work.py`) leaves the state itself, in fp32, with a decay of zero: nothing before it counts any more.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssdprof.kernels.ssd.hopper_shared import FLAG_STRIDE, SLICE, role_barrier

in_fours = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))  # of a row: four numbers a thread
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


@gluon.jit
def part_of(state):
    """A state (p, n) as a row of numbers, in an order in which each thread has four at once, and a warp 128."""
    N: gl.constexpr = state.shape[1]
    fragments = state.reshape([4, 2, 8, N // 8, 4, 2])  # p: warp, 8 rows, row; n: 8 columns, pair, column
    return gl.convert_layout(fragments.permute((3, 0, 2, 4, 1, 5)).reshape([SLICE * N]), in_fours)


@gluon.jit
def state_of(part, N: gl.constexpr, layout: gl.constexpr):
    """What `part_of` made a row."""
    fragments = part.reshape([N // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))
    return gl.convert_layout(fragments.reshape([SLICE, N]), layout)


@gluon.jit
def publish(part_ptr, flag_ptr, row, added, decay):
    """What a segment adds to a state, and its decay."""
    gl.store(part_ptr + row, part_of(added).to(part_ptr.dtype.element_ty))
    role_barrier()  # every thread's numbers are stored before the flag says so
    gl.atomic_xchg(flag_ptr, gl.cast(decay, gl.int32, bitcast=True) | SIGN, sem="release")


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
def place_of(segment, lane, states_ptr, sync_ptr, LANES: gl.constexpr, N: gl.constexpr):
    """Where a lane's part and flag are in slot 0, and how many lanes further those of the segment are."""
    return (
        states_ptr + lane.to(gl.int64) * (SLICE * N),
        sync_ptr + lane * FLAG_STRIDE,
        segment.slot.to(gl.int64) * LANES,
    )


@gluon.jit
def leave(segment, place, added, decay):
    """For the segments after it: the part (p, n) that the segment has `added`, or its state, and its decay."""
    parts_ptr, flags_ptr, mine = place
    PART: gl.constexpr = SLICE * added.shape[1]
    if not segment.last:
        row = gl.arange(0, PART, in_fours)
        publish(parts_ptr + mine * PART, flags_ptr + mine * FLAG_STRIDE, row, added, decay)


@gluon.jit
def sum_before(segment, place, LANES: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
    """The sum of the parts of all segments before, decayed, and the decay of all of them."""
    PART: gl.constexpr = SLICE * N
    parts_ptr, flags_ptr, mine = place
    row = gl.arange(0, PART, in_fours)
    sum_of_parts = gl.full([PART], 0.0, gl.float32, in_fours)
    # in assembly: of gl.fma LLVM makes one of vectors of all that a thread has, and takes long over it
    multiply_add: gl.constexpr = "fma.rn.f32 $0, $1, $2, $3;"
    step = segment.slot_step.to(gl.int64) * LANES
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
