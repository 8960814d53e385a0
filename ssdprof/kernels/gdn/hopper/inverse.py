# mypy: ignore-errors
"""The inverse of a chunk's unit lower triangular matrix I + L, by four warps.

The diagonal blocks of 16 x 16 are inverted by substitution in fp32, a column a thread.  The rest follows by rows of
blocks, transposed, with operands in fp16 and sums in fp32:

    A_i^T = (E_i^T - sum_{j < i} A_j^T L_ij^T) D_i^T,      D_i = (I + L_ii)^-1,  E_i the block row i of the identity

fp16 has three more bits than bf16, and entries of A are at most 2 for unit keys and beta up to 2; powers of L, which
may be large, are nowhere formed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2
from triton.language.core import _aggregate as aggregate

from ssdprof.kernels._gluon import role_barrier
from ssdprof.kernels.gdn.hopper.rings import CHUNK

BLOCK = gl.constexpr(16)
BLOCKS = gl.constexpr(4)  # of a chunk
# products of 16-bit operands with 16 rows for each of four warps, and 8 columns
narrow = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
# (block, column, row): a warp has a block, a thread a column
by_column = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8]],
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [0, 0, 0]],
        [[1, 0, 0], [2, 0, 0]],
        [],
        [4, 16, 16],
    )
)
# (block row, row, block column, column) of a product of 64 x 64 by four warps
in_blocks = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 8, 0, 0], [0, 0, 0, 8], [0, 0, 1, 0], [0, 0, 2, 0]],
        [[0, 0, 0, 2], [0, 0, 0, 4], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0]],
        [],
        [4, 16, 4, 16],
    )
)

STAGES = {
    name: "inverse" for name in ("allocate_scratch", "diagonal_blocks", "inverse_of_blocks", "block_row", "invert")
}


@aggregate
class Scratch:
    lower: gl.shared_memory_descriptor  # (i, j) fp16: L
    diagonal: gl.shared_memory_descriptor  # (j * BLOCKS + block, i) fp32: L_ii, transposed
    inverted: gl.shared_memory_descriptor  # (block * BLOCK + j, i) fp16: D_i, transposed

    @gluon.constexpr_function
    def __init__(self, lower, diagonal, inverted):
        self.lower, self.diagonal, self.inverted = lower, diagonal, inverted


@gluon.jit
def allocate_scratch():
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], gl.float16)
    return Scratch(
        gl.allocate_shared_memory(gl.float16, [CHUNK, CHUNK], square),
        gl.allocate_shared_memory(gl.float32, [CHUNK, BLOCK], plain),
        gl.allocate_shared_memory(gl.float16, [CHUNK, BLOCK], plain),
    )


@gluon.jit
def diagonal_blocks(L):
    """L_ii (j, block, i) of L (i, j)."""
    i_b = gl.arange(0, BLOCKS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, in_blocks))))
    j_b = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, in_blocks))))
    L = gl.convert_layout(L.reshape([BLOCKS, BLOCK, BLOCKS, BLOCK]), in_blocks)
    own = gl.where(i_b[:, None, None, None] == j_b[None, None, :, None], L, 0.0)
    return gl.sum(own, 2).permute((2, 0, 1))


@gluon.jit
def inverse_of_blocks(diagonal):
    """D_i (block, j, i), by forward substitution: column j of D_i is e_j less what the rows above contribute."""
    o_j = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(2, by_column)))[None, :, None]
    o_i = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, by_column)))[None, None, :]
    D, _ = gl.broadcast(
        gl.where(o_j == o_i, 1.0, 0.0), gl.full([BLOCKS, BLOCK, BLOCK], 0.0, gl.float32, by_column)
    )  # fmt: skip
    for m in gl.static_range(BLOCK - 1):
        column = diagonal.slice(BLOCKS * m, BLOCKS).load(gl.SliceLayout(1, by_column))
        known = gl.sum(gl.where(o_i == m, D, 0.0), 2)
        D = D - column[:, None, :] * known[:, :, None]
    return D


@gluon.jit
def block_row(i: gl.constexpr, rows, scratch):
    """A_i^T (j, i), from the block rows before it as 16-bit operands."""
    left: gl.constexpr = gl.DotOperandLayout(0, narrow, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, narrow, 2)
    o_j, o_i = gl.arange(0, CHUNK, gl.SliceLayout(1, narrow)), gl.arange(0, BLOCK, gl.SliceLayout(0, narrow))
    zero = gl.full([CHUNK, BLOCK], 0.0, gl.float32, narrow)
    known = zero
    for j in gl.static_range(i):
        L_ij = scratch.lower.slice(BLOCK * i, BLOCK).slice(BLOCK * j, BLOCK, dim=1)
        known = mma_v2(rows[j], L_ij.permute((1, 0)).load(right), known)
    identity = gl.where(o_j[:, None] - BLOCK * i == o_i[None, :], 1.0, 0.0)
    D_i = scratch.inverted.slice(BLOCK * i, BLOCK).load(right)
    return mma_v2(gl.convert_layout((identity - known).to(gl.float16), left), D_i, zero)


@gluon.jit
def invert(L, scratch):
    """(I + L)^-1, transposed, as four blocks of 16 columns (j, i); L (i, j) fp32, strictly lower triangular."""
    left: gl.constexpr = gl.DotOperandLayout(0, narrow, 2)
    scratch.lower.store(L.to(gl.float16))
    scratch.diagonal.store(diagonal_blocks(L).reshape([CHUNK, BLOCK]))
    role_barrier()
    scratch.inverted.store(inverse_of_blocks(scratch.diagonal).to(gl.float16).reshape([CHUNK, BLOCK]))
    role_barrier()
    row_0 = block_row(0, (), scratch)
    operand_0 = gl.convert_layout(row_0.to(gl.float16), left)
    row_1 = block_row(1, (operand_0,), scratch)
    operand_1 = gl.convert_layout(row_1.to(gl.float16), left)
    row_2 = block_row(2, (operand_0, operand_1), scratch)
    operand_2 = gl.convert_layout(row_2.to(gl.float16), left)
    row_3 = block_row(3, (operand_0, operand_1, operand_2), scratch)
    return row_0, row_1, row_2, row_3
