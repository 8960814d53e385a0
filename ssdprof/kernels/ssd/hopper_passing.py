# mypy: ignore-errors
"""state_passing: what a segment leaves for those after it, and how they sum it.

A segment leaves its part: the state that it adds to a zero state.  With it goes a flag, which is zero until the part is
there, and then holds the segment's decay.  The state that enters segment k is the sum over the segments j before it of
part_j times the decays of j + 1 .. k - 1.  It is summed from the nearest on, always in that order, and no further than
where the decays have multiplied to zero.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssdprof.kernels.ssd.hopper_shared import FLAG_STRIDE, SLICE, role_barrier

SIGN = gl.constexpr(-(1 << 31))  # set in a flag that holds a decay, which is not negative

STAGES = {
    "in_fragments": "caller",
    "from_fragments": "caller",
    "published": "state_passing.wait",
    "load_acquire": "caller",
    "publish": "state_passing.store",
    "entering_state": "state_passing.load",
}


@gluon.constexpr_function
def fragments(rows, width):
    """A state (p, n) in the order of the product's fragments: a thread's four numbers, all threads, then n by 8."""
    blocks = [[512 * (1 << bit)] for bit in range((width // 8).bit_length() - 1)]
    lanes, warps = [[4], [8], [16], [32], [64]], [[128], [256]]
    return gl.DistributedLinearLayout([[1], [2], *blocks], lanes, warps, [], [rows * width])


@gluon.jit
def in_fragments(state):
    """So that each thread stores 16 bytes, beside those of the next.  As (p, n) it would take four times as long."""
    WIDTH: gl.constexpr = state.shape[1]
    parts = state.reshape([4, 2, 8, WIDTH // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return gl.convert_layout(parts.reshape([SLICE * WIDTH]), fragments(SLICE, WIDTH))


@gluon.jit
def from_fragments(part, WIDTH: gl.constexpr, layout: gl.constexpr):
    parts = part.reshape([WIDTH // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))
    return gl.convert_layout(parts.reshape([SLICE, WIDTH]), layout)


@gluon.jit
def publish(part_ptr, flag_ptr, part, decay):
    """What a segment adds to a state, and its decay."""
    o = gl.arange(0, SLICE * part.shape[1], fragments(SLICE, part.shape[1]))
    gl.store(part_ptr + o, in_fragments(part).to(part_ptr.dtype.element_ty))
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
    """`state`, which is zero, plus the parts of all segments before, decayed.  LANES: parts, and flags, of a slot."""
    WIDTH: gl.constexpr = state.shape[1]
    PART: gl.constexpr = SLICE * WIDTH
    o = gl.arange(0, PART, fragments(SLICE, WIDTH))
    slot, left = segment.slot - segment.slot_step, segment.index
    passed = 1.0
    go = left > 0
    decay = published(flags_ptr + slot * (LANES * FLAG_STRIDE), go)
    while go:
        part = gl.load(parts_ptr + slot.to(gl.int64) * (LANES * PART) + o, cache_modifier=".cg")
        weight, passed = passed, passed * decay
        slot, left = slot - segment.slot_step, left - 1
        go = (left > 0) & (passed != 0.0)
        decay = published(flags_ptr + slot * (LANES * FLAG_STRIDE), go)  # while the part is on its way
        state += weight * from_fragments(part.to(gl.float32), WIDTH, layout)
    return state
