# mypy: ignore-errors
"""Both lanes in one role, of eight warps: four for each lane.

Tensors of the role have the rows of both lanes, lane 0's first.  A scalar is each lane's own, for Triton takes
`lane_number` for one number.  So what is loaded from a place that depends on it is what the rows of this lane need, a
product takes its operand for them from there, and a lane goes on when its own barrier lets it.  So a lane's number is
in no condition around anything at which all threads meet: a barrier, or what Triton makes one of.

In two roles the same code would be compiled twice, which takes half as long again, and is not faster.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ssdprof.kernels.ssd.hopper.rings import SLICE, product_layout, reinterpret

LANES = gl.constexpr(2)  # of a role; tests without a GPU run each for itself, with 1
THREADS = gl.constexpr(128)  # of a lane
of_lanes = gl.constexpr(gl.DistributedLinearLayout([], [[0]] * 5, [[0], [0], [1]], [], [2]))  # (lane)

STAGES = {
    "lane_number": "setup",
    "first_of": "caller",
    "unit_of": "caller",
    "half_of": "caller",
    "load_tiles": "caller",
    "load_transposed": "caller",
    "tiles_of": "caller",
    "store_tiles": "caller",
    "arrive": "caller",
}


@gluon.jit
def lane_number():
    """The lane that a thread works for, in the role that begins with the program's first thread.

    Not pure, or it would be found out anew wherever it is needed, which takes long.
    """
    code: gl.constexpr = """{
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        shr.u32 $0, thread, 7;
    }"""
    return gl.inline_asm_elementwise(code, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def first_of(lane):
    """The lane whose rows come first in tensors."""
    return gl.to_tensor(0) if LANES == 2 else lane


@gluon.jit
def unit_of(shared, lane):
    """Which of the program's units a lane works on."""
    return lane if shared.UNITS == 2 else 0


@gluon.jit
def half_of(shared, lane):
    """Which half of N a lane has; the first, if N has no halves."""
    return lane if shared.HALVES == 2 else 0


@gluon.constexpr_function
def lanes_layout(columns):
    """How products (lane row, column) lie in registers."""
    return product_layout(columns, 4 * LANES)


@gluon.constexpr_function
def apart(layout):
    """A layout of (lane row, column) as one of (lane, row, column)."""
    rows = layout.shape[0] // 2

    def split(bases):
        return [[row // rows, row % rows, column] for row, column in bases]

    return gl.DistributedLinearLayout(
        split(layout.reg_bases), split(layout.lane_bases), split(layout.warp_bases), split(layout.block_bases),
        [2, rows, layout.shape[1]],
    )  # fmt: skip


@gluon.jit
def load_tiles(tile, layout: gl.constexpr):
    """(lane row, column): each lane's own `tile` (row, column)."""
    columns: gl.constexpr = tile.shape[1]
    rows: gl.constexpr = LANES * SLICE
    lanes: gl.constexpr = apart(gl.to_linear_layout(layout, [rows, columns]))
    own = tile.load(gl.SliceLayout(0, lanes))[None, :, :]
    both, _ = gl.broadcast(own, gl.full([LANES, SLICE, columns], 0, tile.dtype, lanes))
    return gl.convert_layout(both.reshape([rows, columns]), layout)


@gluon.jit
def load_transposed(shared, place, lane, layout: gl.constexpr):
    """x^T (lane p, q) of the lanes' units."""
    return load_tiles(shared.x.index(place * shared.UNITS + unit_of(shared, lane)).permute((1, 0)), layout)


@gluon.constexpr_function
def in_lanes(shape):
    return [shape[0] // LANES, LANES, *shape[1:]]


@gluon.jit
def tiles_of(tiles, lane, layout: gl.constexpr):
    """Two tiles, one for each lane, as (lane, row, column)."""
    return reinterpret(tiles, tiles.dtype, in_lanes(tiles.shape), layout).index(first_of(lane))


@gluon.jit
def store_tiles(tiles, value):
    """value (lane row, column) into `tiles` (lane, row, column)."""
    tiles.store(value.reshape([LANES, value.shape[0] // LANES, value.shape[1]]))


@gluon.jit
def arrive(barrier):
    """By each thread of a lane for itself, so that no warp waits for others.

    A warp's accesses to shared memory happen in order, products that read it have been waited for, and between stores
    and the arrival that tells of them is a fence.
    """
    async_copy.mbarrier_arrive(barrier, increment_count=False)
