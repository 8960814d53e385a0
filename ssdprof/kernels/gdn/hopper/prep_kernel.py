# mypy: ignore-errors
"""What of a chunk does not depend on any state, for `hopper_kernel.py`.

With e_i = 1 / |k_i| if keys are to be normalised, else 1, and log2 decays G_i since the chunk's start, a chunk of 64
tokens has

    L_ij = beta_i e_i e_j k_i . k_j  for j < i,     A = (I + L)^-1,     stored: e_i A_ij beta_j, transposed

free of decays, which multiply it in the other kernel: between tokens j < i of a chunk they are 2^(G_i - G_j).

In:   k, q (b, l, h, K) through the copy engine | g, beta (b, l, hv) | cu_seqlens (sequences + 1)
Out:  inverse (slots, hv, j, i), k's dtype
      decays (slots, hv, 64) fp32: G_i, not increasing
      bounds (hv, slots) fp32: log2 of how much of a state that enters the chunk is left after it, at most
      norms (slots, h, 2, 64) fp32: 1 / |k_i| and 1 / |q_i|, if they are to be normalised
Grid: slots * h, key heads fastest; a slot is a chunk of a sequence (`assignment.py`)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ssdprof.kernels._gluon import add, async_load, async_store, product_layout, role_barrier
from ssdprof.kernels.gdn.hopper.assignment import packed_slot, sequence_at
from ssdprof.kernels.gdn.hopper.inverse import BLOCK, allocate_scratch, invert, narrow
from ssdprof.kernels.gdn.hopper.rings import CHUNK, DIM

LOG2_E = gl.constexpr(1.4426950408889634)
LEAST = gl.constexpr(-150.0)  # 2^LEAST is 0 in fp32, as is whatever is smaller
EPSILON = gl.constexpr(1e-6)  # of norms

STAGES = {
    "less": "caller",
    "log2_decays": "gates",
    "times_transposed": "kkt",
    "diagonal_of": "kkt",
    "store_inverse": "inverse",
    "prepare_head": "inverse",
    "_prep_kernel": "setup",
}


@gluon.jit
def less(a, b):
    """The smaller one; NaN if b is."""
    return gl.where(b > a, a, b)


@gluon.jit
def log2_decays(g):
    """Of natural logarithms, in log2 units and at most 0; NaN stays NaN."""
    g = gl.where(g > 0.0, 0.0, g.to(gl.float32) * LOG2_E)
    return gl.where(g < LEAST, LEAST, g)


@gluon.jit
def times_transposed(tile):
    """tile tile^T (i, j)."""
    layout: gl.constexpr = product_layout(CHUNK, 4)
    zero = gl.full([CHUNK, CHUNK], 0.0, gl.float32, layout)
    begun = warpgroup_mma(tile, tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[begun])


@gluon.jit
def diagonal_of(product):
    """Its entries (i, i), by rows."""
    layout: gl.constexpr = product_layout(CHUNK, 4)
    o_i, o_j = gl.arange(0, CHUNK, gl.SliceLayout(1, layout)), gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    return gl.sum(gl.where(o_i[:, None] == o_j[None, :], product, 0.0), 1)


@gluon.jit
def store_inverse(block: gl.constexpr, row, beta, factors, tile):
    """A block of 16 columns (j, i) of e_i A_ij beta_j."""
    e = factors.slice(BLOCK * block, BLOCK).load(gl.SliceLayout(0, narrow))
    tile.slice(BLOCK * block, BLOCK, dim=1).store((row * beta[:, None] * e[None, :]).to(tile.dtype))


@gluon.jit
def prepare_head(head, slot, slots, KK, squares, factor, positions, gates, outs, A_desc, tile, factors, scratch,
                 HEADS: gl.constexpr):  # fmt: skip
    """Everything about a value head's chunk.  squares: |k_i|^2, normalised if asked for; factor: e_i."""
    layout: gl.constexpr = product_layout(CHUNK, 4)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    g_ptr, beta_ptr, g_strides, beta_strides = gates
    decays_ptr, bounds_ptr = outs
    first, left = positions  # of the chunk, as element counts of g and of beta; and how many of it there are
    g_first, beta_first = first
    o_i = gl.arange(0, CHUNK, vector)
    g_tile = g_ptr + g_first + head.to(gl.int64) * g_strides[2] + o_i.to(gl.int64) * g_strides[1]
    beta_head = beta_ptr + beta_first + head.to(gl.int64) * beta_strides[2]
    g = log2_decays(gl.load(g_tile, mask=o_i < left, other=0.0))
    sums = gl.associative_scan(gl.associative_scan(g, 0, add), 0, less)  # sums in another order may increase
    gl.store(decays_ptr + (slot.to(gl.int64) * HEADS + head) * CHUNK + o_i, sums)
    o_r = gl.arange(0, CHUNK, rows)
    beta = gl.load(beta_head + o_r.to(gl.int64) * beta_strides[1], mask=o_r < left, other=0.0).to(gl.float32)
    grows = gl.log2(gl.maximum(gl.abs(1.0 - beta * squares), 1.0))
    bound = gl.sum(g, 0) + gl.sum(grows, 0)
    gl.store(bounds_ptr + head.to(gl.int64) * slots + slot, bound)
    o_c = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    L = gl.where(o_r[:, None] > o_c[None, :], KK * (beta * factor)[:, None], 0.0)
    row_0, row_1, row_2, row_3 = invert(L * gl.convert_layout(factor, gl.SliceLayout(0, layout))[None, :], scratch)
    o_j = gl.arange(0, CHUNK, gl.SliceLayout(1, narrow))
    beta_j = gl.load(beta_head + o_j.to(gl.int64) * beta_strides[1], mask=o_j < left, other=0.0).to(gl.float32)
    tma.store_wait(0)  # the head before's has been read
    role_barrier()
    store_inverse(0, row_0, beta_j, factors, tile)
    store_inverse(1, row_1, beta_j, factors, tile)
    store_inverse(2, row_2, beta_j, factors, tile)
    store_inverse(3, row_3, beta_j, factors, tile)
    fence_async_shared()
    role_barrier()
    async_store(A_desc, [(slot * HEADS + head) * CHUNK, 0], tile)


@gluon.jit(do_not_specialize=["seqlen", "sequences", "slots"])
def _prep_kernel(
    k_desc, q_desc, A_desc, g_ptr, beta_ptr, cu_seqlens_ptr, decays_ptr, bounds_ptr, norms_ptr,
    g_strides, beta_strides, cu_strides, seqlen, sequences, slots,
    KEY_HEADS: gl.constexpr, HEADS: gl.constexpr, NORMALISE: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = product_layout(CHUNK, 4)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, DIM], k_desc.dtype)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], k_desc.dtype)
    key_head, slot = gl.program_id(0) % KEY_HEADS, gl.program_id(0) // KEY_HEADS
    if cu_seqlens_ptr is None:
        i = slot // gl.cdiv(seqlen, CHUNK)
    else:
        i = packed_slot(slot, sequences, cu_seqlens_ptr, cu_strides[0])
    sequence = sequence_at(i, seqlen, cu_seqlens_ptr, cu_strides[0])
    t = (slot - sequence.slot) * CHUNK
    if t < sequence.length:
        k = gl.allocate_shared_memory(k_desc.dtype, [CHUNK, DIM], tiles)
        full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
        mbarrier.init(full, count=1)
        role_barrier()
        mbarrier.expect(full, 2 * CHUNK * DIM)
        where = [sequence.tile, key_head, sequence.row + t, 0]
        async_load(k_desc, where, full, k.reshape([1, 1, CHUNK, DIM]))
        scratch = allocate_scratch()
        tile = gl.allocate_shared_memory(k_desc.dtype, [CHUNK, CHUNK], square)
        factors = gl.allocate_shared_memory(gl.float32, [CHUNK], vector)
        if NORMALISE:
            q = gl.allocate_shared_memory(k_desc.dtype, [CHUNK, DIM], tiles)
            q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
            mbarrier.init(q_full, count=1)
            role_barrier()
            mbarrier.expect(q_full, 2 * CHUNK * DIM)
            async_load(q_desc, where, q_full, q.reshape([1, 1, CHUNK, DIM]))
        mbarrier.wait(full, 0)
        KK = times_transposed(k)
        squares = diagonal_of(KK)
        o_r = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
        factor = gl.full([CHUNK], 1.0, gl.float32, gl.SliceLayout(1, layout))
        if NORMALISE:
            factor = gl.rsqrt(squares + EPSILON)
            squares *= factor * factor
            norms = norms_ptr + (slot.to(gl.int64) * KEY_HEADS + key_head) * (2 * CHUNK) + o_r
            gl.store(norms, factor)
            mbarrier.wait(q_full, 0)
            gl.store(norms + CHUNK, gl.rsqrt(diagonal_of(times_transposed(q)) + EPSILON))
        factors.store(factor)
        batch = gl.where(cu_seqlens_ptr is None, sequence.index, 0).to(gl.int64)
        position = (sequence.begin + t).to(gl.int64)
        first = (
            batch * g_strides[0] + position * g_strides[1],
            batch * beta_strides[0] + position * beta_strides[1],
        )
        GROUP: gl.constexpr = HEADS // KEY_HEADS
        for h in range(GROUP):
            prepare_head(
                key_head * GROUP + h, slot, slots, KK, squares, factor, (first, sequence.length - t),
                (g_ptr, beta_ptr, g_strides, beta_strides), (decays_ptr, bounds_ptr), A_desc, tile, factors, scratch,
                HEADS,
            )  # fmt: skip
        tma.store_wait(0)
