# mypy: ignore-errors
"""Role `inverses`: inverts each chunk's triangular matrix, in calls without a launch of `prep_kernel.py`.

`role_scores.py` computes L of the next chunk.  This role computes A = (I + L)^-1, as `prep_kernel.py` stores it, with
`inverse.py`.  `Inversion` is the shared memory of these two roles, `rings.py` that of all roles.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ssdprof.kernels._gluon import place_in
from ssdprof.kernels.gdn.hopper.inverse import BLOCK, BLOCKS, block_row, invert_blocks, narrow, side_by_side
from ssdprof.kernels.gdn.hopper.rings import BETA
from ssdprof.kernels.hopper.ring import CHUNK, Ring, allocate_ring, begin_ring
from ssdprof.kernels.hopper.work import aggregate

HALF = gl.constexpr(32)  # columns of the inverse per step: 16 for each of two warps

STAGES = {"begin_inversion": "setup", "diagonal": "caller", "inverses": "solve_tril"}
WAITS = {"lowers": "waiting.inverse", "inverses": "ahead"}


@aggregate
class Inversion:
    """Shared memory for the inversion."""

    lowers: Ring  # (i, j) fp16: L
    diagonals: gl.shared_memory_descriptor  # (slots of lowers, 1, j * BLOCKS + block, i) fp32: L_ii, transposed
    inverted: gl.shared_memory_descriptor  # (block * BLOCK + j, i) fp16: D_i, transposed

    @gluon.jit
    def diagonal(self, n):
        return self.diagonals.index(place_in(n, self.lowers.DEPTH))


@gluon.jit
def begin_inversion(DEPTH: gl.constexpr):
    """Allocate that memory and initialise its barriers."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    plain_3d: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    inversion = Inversion(
        allocate_ring(gl.float16, DEPTH, CHUNK),
        gl.allocate_shared_memory(gl.float32, [DEPTH, 1, CHUNK, BLOCK], plain_3d),
        gl.allocate_shared_memory(gl.float16, [CHUNK, BLOCK], plain),
    )
    begin_ring(inversion.lowers, 1, 1)  # full: scores; empty: inverses
    return inversion


@gluon.jit
def inverses(env):
    """Compute A_ij beta_j (j, i) of each chunk."""
    rings, inversion = env.rings, env.inversion
    dtype: gl.constexpr = rings.keys.tiles.dtype
    layout: gl.constexpr = narrow(gl.num_warps())
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    for n in range(env.work.chunks()):
        inversion.lowers.wait_full(n)
        invert_blocks(inversion.diagonal(n), inversion.inverted, 1)
        rings.inverses.wait_empty(n)
        for half in gl.static_range(2):
            betas = rings.vector(n, BETA).slice(HALF * half, HALF).load(gl.SliceLayout(1, layout))
            rows, scaled = (), ()
            for _ in gl.static_range(2 * half):  # above the diagonal
                scaled += (gl.full([HALF, BLOCK], 0.0, dtype, layout),)
            for i in gl.static_range(2 * half, BLOCKS):
                row = block_row(i, 0, 1, rows, inversion.lowers.tile(n), inversion.inverted, 2 * half, HALF)
                rows += (gl.convert_layout(row.to(gl.float16), left),)
                scaled += ((row * betas[:, None]).to(dtype),)
            rings.inverses.tile(n).slice(HALF * half, HALF).store(side_by_side(0, 1, scaled))
        mbarrier.arrive(inversion.lowers.empty_at(n), count=1)
        fence_async_shared()
        mbarrier.arrive(rings.inverses.full_at(n), count=1)
