# mypy: ignore-errors
"""N = 256: what the two roles that hold half of N each, of one unit, tell each other.

Every position's output is a sum over N, so that both halves have a part in it.  Half k finishes the positions of the
k-th half of a chunk: it takes over the other's part for them and hands over its own for the rest, in fp32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

MAX_WIDTH = gl.constexpr(128)  # of N, in one role: 64 x 128 numbers of state fill a third of its registers

STAGES = {"allocate_exchange": "setup", "half_and_rest": "caller", "give_part": "caller", "take_part": "caller"}
WAITS = {"given": "waiting.half"}

# (p, half of q) in the order of the product's fragments: a thread's four numbers, then the threads of a warp
fragments = gl.constexpr(
    gl.SharedLinearLayout([[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16]])
)


@aggregate
class Exchange:
    """Two chunks' parts.  No half can be two chunks ahead of the other, so that nobody says when a place is free."""

    parts: gl.shared_memory_descriptor  # (2 * 2, p, q / 2): of a chunk, what half 0 hands over, then half 1
    given: gl.shared_memory_descriptor  # barriers of `parts`

    @gluon.constexpr_function
    def __init__(self, parts, given):
        self.parts, self.given = parts, given


@gluon.jit
def allocate_exchange(P: gl.constexpr, Q: gl.constexpr):
    parts = gl.allocate_shared_memory(gl.float32, [4, P, Q // 2], fragments)
    given = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(given.index(i), count=1)
    return Exchange(parts, given)


@gluon.jit
def half_and_rest(v, half, layout: gl.constexpr):
    """Of v (p, q), the positions (p, q / 2) of a half, and those of the other."""
    P: gl.constexpr = v.shape[0]
    Q: gl.constexpr = v.shape[1]
    first, second = gl.split(v.reshape([P, 2, Q // 2]).permute((0, 2, 1)))
    first, second = gl.convert_layout(first, layout), gl.convert_layout(second, layout)
    own, rest = first, second
    if half == 1:
        own, rest = second, first
    return own, rest


@gluon.jit
def give_part(exchange, part, i, half, layout: gl.constexpr):
    """A half's `part` (p, q) of chunk i's sum over N -> that for its own positions (p, q / 2); gives the rest."""
    own, other = half_and_rest(part, half, layout)
    place = i % 2 * 2 + half
    exchange.parts.index(place).store(other)
    mbarrier.arrive(exchange.given.index(place), count=1)
    return own


@gluon.jit
def take_part(exchange, i, half, layout: gl.constexpr):
    """What the other half gives of chunk i for the positions of this one: (p, q / 2)."""
    place = i % 2 * 2 + 1 - half
    mbarrier.wait(exchange.given.index(place), (i // 2) & 1)
    return exchange.parts.index(place).load(layout)
