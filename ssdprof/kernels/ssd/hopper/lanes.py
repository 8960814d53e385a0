# mypy: ignore-errors
"""Both lanes in one role of eight warps, four warps per lane.

Tensors of the role hold the rows of both lanes, lane 0 first.  Triton takes `lane_number` for a uniform scalar, but its
value differs between the lanes.  So a load from an address that depends on it reads the data of this lane's rows, a
product reads the operand for these rows, and a lane continues when its own mbarrier completes.  Therefore no condition
around a barrier of all threads, or around an operation that Triton compiles to one, may depend on the lane number.

With one role per lane, the same code would be compiled twice.  Compiling would take half as long again, and the kernel
would not be faster.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ssdprof.kernels.ssd.hopper.rings import SLICE, product_layout, reinterpret

LANES = gl.constexpr(2)  # lanes per role; tests without a GPU set 1 and run each lane by itself
THREADS = gl.constexpr(128)  # threads per lane
of_lanes = gl.constexpr(gl.DistributedLinearLayout([], [[0]] * 5, [[0], [0], [1]], [], [2]))  # layout (lane)

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
    """The lane of a thread, in the role of the program's first threads.

    The assembly is marked as not pure, otherwise the compiler recomputes it at every use, which takes long.
    """
    code: gl.constexpr = """{
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        shr.u32 $0, thread, 7;
    }"""
    return gl.inline_asm_elementwise(code, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def first_of(lane):
    """The lane whose rows are first in tensors."""
    return gl.to_tensor(0) if LANES == 2 else lane


@gluon.jit
def unit_of(shared, lane):
    """Index of the lane's unit among the program's units."""
    return lane if shared.UNITS == 2 else 0


@gluon.jit
def half_of(shared, lane):
    """Index of the lane's half of N; 0 if N is not halved."""
    return lane if shared.HALVES == 2 else 0


@gluon.constexpr_function
def lanes_layout(columns):
    """Register layout of products (lane row, column)."""
    return product_layout(columns, 4 * LANES)


@gluon.constexpr_function
def apart(layout):
    """Convert a layout of (lane row, column) to one of (lane, row, column)."""
    rows = layout.shape[0] // 2

    def split(bases):
        return [[row // rows, row % rows, column] for row, column in bases]

    return gl.DistributedLinearLayout(
        split(layout.reg_bases), split(layout.lane_bases), split(layout.warp_bases), split(layout.block_bases),
        [2, rows, layout.shape[1]],
    )  # fmt: skip


@gluon.jit
def load_tiles(tile, layout: gl.constexpr):
    """Load each lane's own `tile` (row, column) as (lane row, column)."""
    columns: gl.constexpr = tile.shape[1]
    rows: gl.constexpr = LANES * SLICE
    lanes: gl.constexpr = apart(gl.to_linear_layout(layout, [rows, columns]))
    own = tile.load(gl.SliceLayout(0, lanes))[None, :, :]
    both, _ = gl.broadcast(own, gl.full([LANES, SLICE, columns], 0, tile.dtype, lanes))
    return gl.convert_layout(both.reshape([rows, columns]), layout)


@gluon.jit
def load_transposed(shared, place, lane, layout: gl.constexpr):
    """Load x^T (lane p, q) of the lanes' units."""
    return load_tiles(shared.x.index(place * shared.UNITS + unit_of(shared, lane)).permute((1, 0)), layout)


@gluon.constexpr_function
def in_lanes(shape):
    return [shape[0] // LANES, LANES, *shape[1:]]


@gluon.jit
def tiles_of(tiles, lane, layout: gl.constexpr):
    """View two tiles, one per lane, as (lane, row, column)."""
    return reinterpret(tiles, tiles.dtype, in_lanes(tiles.shape), layout).index(first_of(lane))


@gluon.jit
def store_tiles(tiles, value):
    """Store value (lane row, column) into `tiles` (lane, row, column)."""
    tiles.store(value.reshape([LANES, value.shape[0] // LANES, value.shape[1]]))


@gluon.jit
def arrive(barrier):
    """Every thread of a lane arrives by itself, so that no warp waits for others.

    This is safe: a warp's accesses to shared memory happen in order, the caller has waited for products that read it,
    and a fence separates stores from the arrival that announces them.
    """
    async_copy.mbarrier_arrive(barrier, increment_count=False)
