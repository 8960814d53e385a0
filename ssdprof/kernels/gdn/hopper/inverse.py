"""Inverts the unit lower triangular matrices I + L of a chunk, for one or two heads: A = (I +
L)^-1, as 4 x 4 blocks of 16 x 16.

The diagonal blocks are inverted by substitution in fp32.  Each thread computes one column, so that
a block uses half a warp, and two heads need as many instructions as one.  The rest is computed by
rows of blocks, transposed, with fp16 operands and fp32 sums:

    A_i^T = (E_i^T - sum_{j < i} A_j^T L_ij^T) D_i^T,
    D_i = (I + L_ii)^-1,  E_i the block row i of the identity

fp16 has three more bits of precision than bf16, and entries of A are at most 2 for unit keys and
beta from 0 to 2.  Powers of L, which may be large, are never formed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from ssdprof.kernels._gluon import aggregate, role_barrier, tile_indices
from ssdprof.kernels.hopper.ring import CHUNK

BLOCK = gl.constexpr(16)  # rows of a block
BLOCKS = gl.constexpr(4)  # blocks per chunk
# Layout (block row, row, block column, column) of a 64 x 64 product of four warps: what a register,
# a thread of a warp, and a warp add to the indices
in_blocks = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 8, 0, 0], [0, 0, 0, 8], [0, 0, 1, 0], [0, 0, 2, 0]],
        [[0, 0, 0, 2], [0, 0, 0, 4], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0]],
        [],
        [4, 16, 4, 16],
    )
)
# layout (block, row, column) of the diagonal blocks
of_block = gl.constexpr(gl.SliceLayout(2, in_blocks))

# stages of functions: `stalls/attribute.py`
STAGES = {
    "allocate_scratch": "solve_tril",
    "diagonal_blocks": "solve_tril",
    "store_lower": "solve_tril",
    "inverse_of_blocks": "solve_tril",
    "block_row": "solve_tril",
    "invert_blocks": "solve_tril",
    "side_by_side": "solve_tril",
}


@gluon.constexpr_function
def narrow(warps):
    """Layout of the products of this file, whose operands are in registers: 16 rows per warp, 8
    columns.
    """
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@gluon.constexpr_function
def by_column(heads):
    """Layout (head, block, column, row) for one or two heads and four warps: a thread holds a
    column, half a warp holds a block.  With one head, both halves of a warp hold the same block.
    """
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 0, 8]],
        [[0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0], [0, 0, 8, 0], [heads - 1, 0, 0, 0]],
        [[0, 1, 0, 0], [0, 2, 0, 0]],
        [],
        [heads, 4, 16, 16],
    )


@aggregate
class Scratch:
    """Shared memory for the inverses of one or two heads."""

    lower: gl.shared_memory_descriptor  # (head, i, j) fp16: L
    # (head, column * BLOCKS + block, row) fp32: the diagonal blocks of L, transposed
    diagonal: gl.shared_memory_descriptor
    # (head * CHUNK + block * BLOCK + column, row) fp16: D, the inverses of I + these blocks,
    # transposed
    inverted: gl.shared_memory_descriptor


@gluon.jit
def allocate_scratch(HEADS: gl.constexpr):
    """Allocate scratch memory for the inverses of one or two heads."""
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
    """The diagonal blocks (block, row, column) of a matrix (i, j): sums over the block column, each
    with one term that is not masked.
    """
    i_b = gl.arange(0, BLOCKS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, in_blocks))))
    j_b = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, in_blocks))))
    matrix = gl.convert_layout(matrix.reshape([BLOCKS, BLOCK, BLOCKS, BLOCK]), in_blocks)
    return gl.sum(gl.where(i_b[:, None, None, None] == j_b[None, None, :, None], matrix, 0.0), 2)


@gluon.jit
def store_lower(product, blocks, beta, lower, diagonal):
    """Store L_ij = beta_i product_ij of a head in `lower`, and its diagonal blocks in `diagonal`.

    product: (i, j).  blocks: its diagonal blocks (block, row, column).  Entries on and above the
    diagonal are not masked, because no result depends on them.
    lower: (i, j).  diagonal: (1, column * BLOCKS + block, row).  A barrier of the caller orders the
    stores, once for all heads.
    """
    lower.store((product * beta[:, None]).to(gl.float16))
    beta_b = gl.convert_layout(beta.reshape([BLOCKS, BLOCK]), gl.SliceLayout(2, of_block))
    transposed = (blocks * beta_b[:, :, None]).permute((2, 0, 1))
    diagonal.store(transposed.reshape([1, CHUNK, BLOCK]))


@gluon.jit
def inverse_of_blocks(diagonal, HEADS: gl.constexpr):
    """The inverses D (head, block, column, row) of I + the diagonal blocks of L, by forward
    substitution: column j of D is e_j minus, row by row, the contributions of the rows above.

    diagonal: diagonal blocks of L, which `store_lower` of the same threads has stored.
    """
    layout: gl.constexpr = by_column(HEADS)
    o_j = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))[
        None, None, :, None
    ]
    o_i = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))[
        None, None, None, :
    ]
    zero = gl.full([HEADS, BLOCKS, BLOCK, BLOCK], 0.0, gl.float32, layout)
    D, _ = gl.broadcast(gl.where(o_j == o_i, 1.0, 0.0), zero)
    for m in gl.static_range(BLOCK - 1):
        # row m of D is final; subtract its contribution, by column m of L, from the rows below
        column = diagonal.slice(BLOCKS * m, BLOCKS, dim=1).load(gl.SliceLayout(2, layout))
        known = gl.sum(gl.where(o_i == m, D, 0.0), 3)
        D = gl.where(o_i > m, D - column[:, :, None, :] * known[:, :, :, None], D)
    return D


@gluon.jit
def block_row(i: gl.constexpr, head: gl.constexpr, HEADS: gl.constexpr, rows, lower, inverted):
    """Block row i of the inverse of a head, transposed: A_i^T (column of 64, row of 16) in fp32.

    rows: block rows 0 to i - 1 of all heads, as 16-bit operands, heads fastest
    lower: L of the head
    inverted: D of all heads; the barrier at the end of `invert_blocks` orders its stores
    """
    layout: gl.constexpr = narrow(gl.num_warps())
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    o_j, o_i = tile_indices(CHUNK, BLOCK, layout)
    zero = gl.full([CHUNK, BLOCK], 0.0, gl.float32, layout)
    known = zero  # sum of A_j^T L_ij^T over j < i
    for j in gl.static_range(i):
        L_ij = lower.slice(BLOCK * i, BLOCK).slice(BLOCK * j, BLOCK, dim=1)
        known = mma_v2(rows[j * HEADS + head], L_ij.permute((1, 0)).load(right), known)
    identity = gl.where(o_j[:, None] - BLOCK * i == o_i[None, :], 1.0, 0.0)
    D_i = inverted.slice(CHUNK * head + BLOCK * i, BLOCK).load(right)
    return mma_v2(gl.convert_layout((identity - known).to(gl.float16), left), D_i, zero)


@gluon.jit
def invert_blocks(diagonal, inverted, HEADS: gl.constexpr):
    """Read the diagonal blocks of L, which `store_lower` has stored in `diagonal`, and store the
    inverses of I + these blocks in `inverted`.  Both arguments are fields of `Scratch`.
    """
    inverses = inverse_of_blocks(diagonal, HEADS).to(gl.float16)
    inverted.store(inverses.reshape([HEADS * CHUNK, BLOCK]))
    role_barrier()  # all warps read the inverses that each of them has stored


@gluon.jit
def side_by_side(head: gl.constexpr, HEADS: gl.constexpr, blocks):
    """Join the four blocks (row, column of 16) of a head into one tile (row, column of 64), so that
    one store suffices: each of four stores would wait for the one before it.

    blocks: of all heads, heads fastest
    """
    first = gl.join(blocks[head], blocks[HEADS + head])
    second = gl.join(blocks[2 * HEADS + head], blocks[3 * HEADS + head])
    return gl.join(first, second).permute((0, 3, 2, 1)).reshape([first.shape[0], CHUNK])
