# mypy: ignore-errors
"""N = 256: the exchange between two lanes that hold half of N each, of one unit.

The output of every position is a sum over N, and each lane has a partial sum.  Lane k finishes the positions of the
k-th half of a chunk.  It receives the other lane's partial sums for them, and passes on its own for the rest, in fp32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssdprof.kernels.ssd.hopper.lanes import load_tiles, store_tiles, tiles_of
from ssdprof.kernels.ssd.hopper.rings import role_barrier

MAX_WIDTH = gl.constexpr(128)  # most of N in one lane: a state of 64 x 128 fills a third of its registers

STAGES = {
    "allocate_exchange": "setup",
    "halves_of": "caller",
    "own_positions": "caller",
    "give_part": "caller",
    "take_part": "caller",
}

# Bases (p, half of q) of a layout in the order of the product's fragments: four numbers of a thread, then of a warp
FRAGMENTS = ([0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16])
of_one = gl.constexpr(gl.SharedLinearLayout([*FRAGMENTS]))
of_both = gl.constexpr(gl.SharedLinearLayout([*([0, *one] for one in FRAGMENTS), [1, 0, 0]]))  # (half, p, half of q)


@gluon.jit
def allocate_exchange(P: gl.constexpr, Q: gl.constexpr):
    """Buffer (half, p, q / 2) of the partial sums that each half passes on."""
    return gl.allocate_shared_memory(gl.float32, [2, P, Q // 2], of_one)


@gluon.jit
def halves_of(v, layout: gl.constexpr):
    """Split v (half p, q) into the positions that half 0 and half 1 finish, each (half p, q / 2)."""
    P: gl.constexpr = v.shape[0]
    Q: gl.constexpr = v.shape[1]
    first, second = gl.split(v.reshape([P, 2, Q // 2]).permute((0, 2, 1)))
    return gl.convert_layout(first, layout), gl.convert_layout(second, layout)


@gluon.jit
def own_positions(x, half, layout: gl.constexpr):
    """The positions of x^T (half p, q), 16-bit numbers, that each half finishes.

    Selects two numbers at a time, otherwise ptxas unpacks them.
    """
    code: gl.constexpr = """{
        .reg .pred second;
        setp.ne.b32 second, $3, 0;
        selp.b32 $0, $2, $1, second;
    }"""
    first, second = halves_of(x, layout)
    return gl.inline_asm_elementwise(code, "=r,r,r,r,r", [first, second, half], dtype=x.dtype, is_pure=True, pack=2)


@gluon.jit
def give_part(exchange, part, half, layout: gl.constexpr):
    """Return each half's partial sums for its own positions (half p, q / 2), and pass on the rest.

    part: each half's partial sums over N (half p, q)
    """
    first, second = halves_of(part, layout)
    tiles = tiles_of(exchange, half, of_both)
    store_tiles(tiles, gl.where(half == 1, first, second))
    return gl.where(half == 1, second, first)


@gluon.jit
def take_part(exchange, half, layout: gl.constexpr):
    """The other half's partial sums for each half's own positions: (half p, q / 2)."""
    role_barrier()
    part = load_tiles(exchange.index(1 - half), layout)
    role_barrier()  # the buffer may be overwritten
    return part
