# mypy: ignore-errors
"""N = 256: what the two lanes that hold half of N each, of one unit, tell each other.

Every position's output is a sum over N, so that both halves have a part in it.  Half k finishes the positions of the
k-th half of a chunk: it takes over the other's part for them and hands over its own for the rest, in fp32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssdprof.kernels.ssd.hopper.lanes import load_tiles, store_tiles, tiles_of
from ssdprof.kernels.ssd.hopper.rings import role_barrier

MAX_WIDTH = gl.constexpr(128)  # of N, in one lane: 64 x 128 numbers of state fill a third of its registers

STAGES = {
    "allocate_exchange": "setup",
    "halves_of": "caller",
    "own_positions": "caller",
    "give_part": "caller",
    "take_part": "caller",
}

# of (p, half of q), what is one further in the order of the product's fragments: a thread's four numbers, then a warp's
FRAGMENTS = ([0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16])
of_one = gl.constexpr(gl.SharedLinearLayout([*FRAGMENTS]))
of_both = gl.constexpr(gl.SharedLinearLayout([*([0, *one] for one in FRAGMENTS), [1, 0, 0]]))  # (half, p, half of q)


@gluon.jit
def allocate_exchange(P: gl.constexpr, Q: gl.constexpr):
    """(half, p, q / 2): what each half hands over."""
    return gl.allocate_shared_memory(gl.float32, [2, P, Q // 2], of_one)


@gluon.jit
def halves_of(v, layout: gl.constexpr):
    """The positions (half p, q / 2) of v (half p, q) that half 0 finishes, and those that half 1 does."""
    P: gl.constexpr = v.shape[0]
    Q: gl.constexpr = v.shape[1]
    first, second = gl.split(v.reshape([P, 2, Q // 2]).permute((0, 2, 1)))
    return gl.convert_layout(first, layout), gl.convert_layout(second, layout)


@gluon.jit
def own_positions(x, half, layout: gl.constexpr):
    """The positions of x^T (half p, q), 16-bit numbers, that each half finishes.  Two at a time, or ptxas takes them
    apart."""
    code: gl.constexpr = """{
        .reg .pred second;
        setp.ne.b32 second, $3, 0;
        selp.b32 $0, $2, $1, second;
    }"""
    first, second = halves_of(x, layout)
    return gl.inline_asm_elementwise(code, "=r,r,r,r,r", [first, second, half], dtype=x.dtype, is_pure=True, pack=2)


@gluon.jit
def give_part(exchange, part, half, layout: gl.constexpr):
    """Each half's `part` (half p, q) of a sum over N -> that for its own positions (half p, q / 2); gives the rest."""
    first, second = halves_of(part, layout)
    tiles = tiles_of(exchange, half, of_both)
    store_tiles(tiles, gl.where(half == 1, first, second))
    return gl.where(half == 1, second, first)


@gluon.jit
def take_part(exchange, half, layout: gl.constexpr):
    """What the other half gives for the positions of each: (half p, q / 2)."""
    role_barrier()
    part = load_tiles(exchange.index(1 - half), layout)
    role_barrier()  # the next may be given
    return part
