# mypy: ignore-errors
"""state_passing: what a segment leaves for those after it, and how they sum it.

A segment leaves its part: the state that it adds to a zero state.  With it goes a flag, which is zero until the part is
there, and then holds the segment's decay.  The state that enters segment k is the sum over the segments j before it of
part_j times the decays of j + 1 .. k - 1, and the initial state times all decays.  Parts are summed from the nearest
on, always in that order, and no further than where the decays have multiplied to zero: what is not finite there is
not seen.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssdprof.kernels.ssd.hopper_shared import FLAG_STRIDE, SLICE, role_barrier

SIGN = gl.constexpr(-(1 << 31))  # set in a flag that holds a decay, which is not negative

STAGES = {
    "part_tile": "caller",
    "published": "state_passing.wait",
    "load_acquire": "caller",
    "publish": "state_passing.store",
    "entering_state": "state_passing.load",
}


@gluon.jit
def part_tile(WIDTH: gl.constexpr, layout: gl.constexpr):
    """Offsets of a part (p, n): tiles of 8 x 8, which a warp has at once in the layout of a product."""
    o_p = gl.arange(0, SLICE, gl.SliceLayout(1, layout))
    o_n = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    return (o_p // 8 * 64 + o_p % 8 * 8)[:, None] + (o_n // 8 * (8 * SLICE) + o_n % 8)[None, :]


@gluon.jit
def publish(part_ptr, flag_ptr, part, decay, layout: gl.constexpr):
    """What a segment adds to a state, and its decay."""
    gl.store(part_ptr + part_tile(part.shape[1], layout), part.to(part_ptr.dtype.element_ty))
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
def entering_state(state, segment, parts_ptr, flags_ptr, LANES: gl.constexpr, layout: gl.constexpr):
    """`state`, which is zero, plus the parts of all segments before, decayed; and the decay of all of them.

    LANES: parts, and flags, of a slot.
    """
    WIDTH: gl.constexpr = state.shape[1]
    PART: gl.constexpr = SLICE * WIDTH
    tile = part_tile(WIDTH, layout)
    step = segment.slot_step.to(gl.int64) * LANES
    lane = segment.slot.to(gl.int64) * LANES - step  # of the segment before
    left = segment.index
    passed = 1.0
    go = left > 0
    decay = published(flags_ptr + lane * FLAG_STRIDE, go)
    while go:
        part = gl.load(parts_ptr + lane * PART + tile, cache_modifier=".cg")
        weight, passed = passed, passed * decay
        lane, left = lane - step, left - 1
        go = (left > 0) & (passed != 0.0)
        decay = published(flags_ptr + lane * FLAG_STRIDE, go)  # while the part is on its way
        state = gl.fma(part.to(gl.float32), weight, state)
    return state, passed
