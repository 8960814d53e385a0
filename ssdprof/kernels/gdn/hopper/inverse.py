# mypy: ignore-errors
"""The inverses of one or two heads' unit lower triangular matrices I + L of a chunk, by four warps.

The diagonal blocks of 16 x 16 are inverted by substitution in fp32, a column a thread: a block takes half a warp, so
that two heads take as many instructions as one.  The rest follows by rows of
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
of_block = gl.constexpr(gl.SliceLayout(2, in_blocks))  # (block, row, column) of the diagonal blocks

STAGES = {
    "allocate_scratch": "solve_tril",
    "diagonal_blocks": "solve_tril",
    "store_lower": "solve_tril",
    "inverse_of_blocks": "solve_tril",
    "block_row": "solve_tril",
    "invert_blocks": "solve_tril",
}


@gluon.constexpr_function
def by_column(heads):
    """(head, block, column, row): a warp has a block of each head, a thread a column."""
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 0, 8]],
        [[0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0], [0, 0, 8, 0], [heads - 1, 0, 0, 0]],
        [[0, 1, 0, 0], [0, 2, 0, 0]],
        [],
        [heads, 4, 16, 16],
    )


@aggregate
class Scratch:
    lower: gl.shared_memory_descriptor  # (head, i, j) fp16: L
    diagonal: gl.shared_memory_descriptor  # (head, j * BLOCKS + block, i) fp32: L_ii, transposed
    inverted: gl.shared_memory_descriptor  # (head * CHUNK + block * BLOCK + j, i) fp16: D_i, transposed

    @gluon.constexpr_function
    def __init__(self, lower, diagonal, inverted):
        self.lower, self.diagonal, self.inverted = lower, diagonal, inverted


@gluon.jit
def allocate_scratch(HEADS: gl.constexpr):
    """Scratch memory for the inverses of one or two heads."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    plain_3d: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], gl.float16)
    return Scratch(
        gl.allocate_shared_memory(gl.float16, [HEADS, CHUNK, CHUNK], square),
        gl.allocate_shared_memory(gl.float32, [HEADS, CHUNK, BLOCK], plain_3d),
        gl.allocate_shared_memory(gl.float16, [HEADS * CHUNK, BLOCK], plain),
    )


@gluon.jit
def diagonal_blocks(matrix):
    """(block, row, column) of a matrix (i, j)."""
    i_b = gl.arange(0, BLOCKS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, in_blocks))))
    j_b = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, in_blocks))))
    matrix = gl.convert_layout(matrix.reshape([BLOCKS, BLOCK, BLOCKS, BLOCK]), in_blocks)
    return gl.sum(gl.where(i_b[:, None, None, None] == j_b[None, None, :, None], matrix, 0.0), 2)


@gluon.jit
def store_lower(head: gl.constexpr, strict, blocks, beta, scratch):
    """L_ij = beta_i strict_ij of a head, and its diagonal blocks, `blocks` being those of `strict`."""
    scratch.lower.index(head).store((strict * beta[:, None]).to(gl.float16))
    beta_b = gl.convert_layout(beta.reshape([BLOCKS, BLOCK]), gl.SliceLayout(2, of_block))
    diagonal = (blocks * beta_b[:, :, None]).permute((2, 0, 1))
    scratch.diagonal.slice(head, 1).store(diagonal.reshape([1, CHUNK, BLOCK]))


@gluon.jit
def inverse_of_blocks(diagonal, HEADS: gl.constexpr):
    """D_i (head, block, j, i), by forward substitution: column j of D_i is e_j less what the rows above contribute."""
    layout: gl.constexpr = by_column(HEADS)
    o_j = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))[None, None, :, None]
    o_i = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))[None, None, None, :]
    zero = gl.full([HEADS, BLOCKS, BLOCK, BLOCK], 0.0, gl.float32, layout)
    D, _ = gl.broadcast(gl.where(o_j == o_i, 1.0, 0.0), zero)
    for m in gl.static_range(BLOCK - 1):
        column = diagonal.slice(BLOCKS * m, BLOCKS, dim=1).load(gl.SliceLayout(2, layout))
        known = gl.sum(gl.where(o_i == m, D, 0.0), 3)
        D = gl.where(o_i > m, D - column[:, :, None, :] * known[:, :, :, None], D)
    return D


@gluon.jit
def block_row(i: gl.constexpr, head: gl.constexpr, HEADS: gl.constexpr, rows, scratch):
    """A_i^T (j, i) of a head, from the block rows before it of all heads, as 16-bit operands."""
    left: gl.constexpr = gl.DotOperandLayout(0, narrow, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, narrow, 2)
    o_j, o_i = gl.arange(0, CHUNK, gl.SliceLayout(1, narrow)), gl.arange(0, BLOCK, gl.SliceLayout(0, narrow))
    zero = gl.full([CHUNK, BLOCK], 0.0, gl.float32, narrow)
    known = zero
    for j in gl.static_range(i):
        L_ij = scratch.lower.index(head).slice(BLOCK * i, BLOCK).slice(BLOCK * j, BLOCK, dim=1)
        known = mma_v2(rows[j * HEADS + head], L_ij.permute((1, 0)).load(right), known)
    identity = gl.where(o_j[:, None] - BLOCK * i == o_i[None, :], 1.0, 0.0)
    D_i = scratch.inverted.slice(CHUNK * head + BLOCK * i, BLOCK).load(right)
    return mma_v2(gl.convert_layout((identity - known).to(gl.float16), left), D_i, zero)


@gluon.jit
def invert_blocks(scratch, HEADS: gl.constexpr):
    """The inverses of the diagonal blocks that `store_lower` has stored."""
    role_barrier()
    inverses = inverse_of_blocks(scratch.diagonal, HEADS).to(gl.float16)
    scratch.inverted.store(inverses.reshape([HEADS * CHUNK, BLOCK]))
    role_barrier()
