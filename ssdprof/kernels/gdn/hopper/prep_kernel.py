"""Computes the parts of each chunk that do not depend on the state, for `hopper_kernel.py`.

With e_i = 1 / |k_i| if the call normalises keys, else 1, and log2 decays G_i since the chunk's
start, a chunk of 64 tokens has

    L_ij = beta_i e_i e_j k_i . k_j  for j < i,    A = (I + L)^-1,
    stored: e_i A_ij beta_j, transposed

A is free of decays.  The other kernel multiplies by them: between tokens j < i of a chunk they are
2^(G_i - G_j).

In:   k, q (b, l, h, K) through TMA | g, beta (b, l, hv) | cu_seqlens (sequences + 1)
Out:  inverse (slots, hv, j, i), k's dtype
      decays (slots, hv, 64) fp32: G_i, not increasing
      bounds (hv, slots) fp32: log2 of an upper bound of the norm of the chunk's transition
      (`assignment.py`)
      norms (slots, h, 2, 64) fp32: 1 / |k_i| and 1 / |q_i|, if the call normalises q and k
Grid: slots * hv / AT_ONCE, heads fastest; a slot is a chunk of a sequence (`assignment.py`), and a
program owns one to three value heads of a key head.  The kernel is limited by latency.  So the
heads of a program share k and its products, two heads also share the instructions of the
substitution (`inverse.py`), and g and beta are loaded before k.
"""

from triton import next_power_of_2
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ssdprof.kernels._gluon import (
    async_load,
    async_store,
    product_layout,
    reinterpret,
    role_barrier,
)
from ssdprof.kernels.gdn.hopper.assignment import packed_slot, sequence_at
from ssdprof.kernels.gdn.hopper.inverse import (
    BLOCK,
    BLOCKS,
    allocate_scratch,
    block_row,
    diagonal_blocks,
    invert_blocks,
    narrow,
    side_by_side,
    store_lower,
)
from ssdprof.kernels.gdn.hopper.rings import DIM
from ssdprof.kernels.gdn.hopper.role_gates import log2_decays, sums
from ssdprof.kernels.hopper.ring import CHUNK

EPSILON = gl.constexpr(1e-6)  # added to squared norms
# Layout (head, i).  A warp holds whole heads, so that it computes sums over a chunk alone.
by_head = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))

STAGES = {
    "begin_times_transposed": "scaled_dot_kkt",
    "diagonal_of": "scaled_dot_kkt",
    "begin_inverses": "solve_tril",
    "load_gates": "gate_cumsum",
    "store_decays": "gate_cumsum",
    "store_bounds": "gate_cumsum",
    "inverses_of": "solve_tril",
    "_prep_kernel": "setup",
}


@gluon.jit
def begin_times_transposed(tile):
    """Start tile tile^T (i, j) asynchronously.  The caller waits for it."""
    layout: gl.constexpr = product_layout(CHUNK, 4)
    zero = gl.full([CHUNK, CHUNK], 0.0, gl.float32, layout)
    return warpgroup_mma(tile, tile.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def diagonal_of(product):
    """The diagonal of `product`, in the layout of its rows."""
    layout: gl.constexpr = product_layout(CHUNK, 4)
    o_i, o_j = (
        gl.arange(0, CHUNK, gl.SliceLayout(1, layout)),
        gl.arange(0, CHUNK, gl.SliceLayout(0, layout)),
    )
    return gl.sum(gl.where(o_i[:, None] == o_j[None, :], product, 0.0), 1)


@gluon.jit
def load_gates(first_head, left, first, gates, AT_ONCE: gl.constexpr):
    """g and beta (head, i) of a program's heads.  Three heads are padded with a row of zeros."""
    g_ptr, beta_ptr, g_strides, beta_strides = gates
    o_h = gl.arange(0, next_power_of_2(AT_ONCE), gl.SliceLayout(1, by_head))
    o_i = gl.arange(0, CHUNK, gl.SliceLayout(0, by_head))
    inside = (o_h < AT_ONCE)[:, None] & (o_i < left)[None, :]
    o_h, o_i = (first_head + o_h).to(gl.int64)[:, None], o_i.to(gl.int64)[None, :]
    g = gl.load(g_ptr + first[0] + o_h * g_strides[2] + o_i * g_strides[1], mask=inside, other=0.0)
    beta = gl.load(
        beta_ptr + first[1] + o_h * beta_strides[2] + o_i * beta_strides[1], mask=inside, other=0.0
    )
    return g, beta


@gluon.jit
def store_decays(g, first_head, slot, decays_ptr, AT_ONCE: gl.constexpr, HEADS: gl.constexpr):
    """Store the sums of g (head, i) since the chunk's start."""
    o_h = gl.arange(0, next_power_of_2(AT_ONCE), gl.SliceLayout(1, by_head))[:, None]
    o_i = gl.arange(0, CHUNK, gl.SliceLayout(0, by_head))[None, :]
    tile = decays_ptr + (slot.to(gl.int64) * HEADS + first_head) * CHUNK
    gl.store(tile + o_h * CHUNK + o_i, sums(g, 1), mask=o_h < AT_ONCE)


@gluon.jit
def store_bounds(g, beta, squares, first_head, slot, slots, bounds_ptr, AT_ONCE: gl.constexpr):
    """Store the bounds of a chunk's heads.  squares: |k_i|^2, of normalised keys if the call
    normalises them.
    """
    o_h = gl.arange(0, next_power_of_2(AT_ONCE), gl.SliceLayout(1, by_head))
    grows = gl.log2(gl.maximum(gl.abs(1.0 - beta * squares[None, :]), 1.0))
    bound = gl.sum(g + grows, 1)
    gl.store(bounds_ptr + (first_head + o_h).to(gl.int64) * slots + slot, bound, mask=o_h < AT_ONCE)


@gluon.jit
def begin_inverses(KK, blocks, betas, FIRST: gl.constexpr, HEADS: gl.constexpr):
    """Scratch memory with L of HEADS heads of a program, one or two, beginning with head FIRST.

    blocks: diagonal blocks of KK
    """
    layout: gl.constexpr = product_layout(CHUNK, 4)
    scratch = allocate_scratch(HEADS)
    for head in gl.static_range(HEADS):
        beta = betas.index(FIRST + head).load(gl.SliceLayout(1, layout))
        store_lower(KK, blocks, beta, scratch.lower.index(head), scratch.diagonal.slice(head, 1))
    return scratch


@gluon.jit
def inverses_of(
    scratch, betas, factors, dtype: gl.constexpr, FIRST: gl.constexpr, HEADS: gl.constexpr,
    NORMALISE: gl.constexpr,
):  # fmt: skip
    """Compute e_i A_ij beta_j (j, i) of these heads, in shared memory."""
    layout: gl.constexpr = narrow(gl.num_warps())
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    square_tiles: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], dtype)
    invert_blocks(scratch.diagonal, scratch.inverted, HEADS)
    rows, scaled = (), ()
    for i in gl.static_range(BLOCKS):
        for head in gl.static_range(HEADS):
            row = block_row(
                i, head, HEADS, rows, scratch.lower.index(head), scratch.inverted, 0, CHUNK
            )
            rows += (gl.convert_layout(row.to(gl.float16), left),)
            row *= betas.index(FIRST + head).load(gl.SliceLayout(1, layout))[:, None]
            if NORMALISE:
                row *= factors.slice(BLOCK * i, BLOCK).load(gl.SliceLayout(0, layout))[None, :]
            scaled += (row.to(dtype),)
    results = ()
    for head in gl.static_range(HEADS):
        results += (gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], square_tiles),)
        results[head].store(side_by_side(head, HEADS, scaled))
    return results


@gluon.jit(do_not_specialize=["seqlen", "sequences", "slots"])
def _prep_kernel(
    k_desc, q_desc, A_desc, tensors, g_strides, beta_strides, cu_strides, seqlen, sequences, slots,
    S: gl.constexpr,
):  # fmt: skip
    g_ptr, beta_ptr, cu_seqlens_ptr, decays_ptr, bounds_ptr, norms_ptr = tensors
    HEADS: gl.constexpr = S.HEADS
    KEY_HEADS: gl.constexpr = S.KEY_HEADS
    AT_ONCE: gl.constexpr = S.AT_ONCE
    NORMALISE: gl.constexpr = S.NORMALISE
    layout: gl.constexpr = product_layout(CHUNK, 4)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, DIM], k_desc.dtype)
    ROWS: gl.constexpr = next_power_of_2(AT_ONCE)
    PAIR: gl.constexpr = min(AT_ONCE, 2)
    PROGRAMS: gl.constexpr = HEADS // AT_ONCE  # programs per slot
    GROUP: gl.constexpr = HEADS // KEY_HEADS
    first_head, slot = gl.program_id(0) % PROGRAMS * AT_ONCE, gl.program_id(0) // PROGRAMS
    key_head = first_head // GROUP
    if cu_seqlens_ptr is None:
        i = slot // gl.cdiv(seqlen, CHUNK)
    else:
        i = packed_slot(slot, sequences, cu_seqlens_ptr, cu_strides[0])
    sequence = sequence_at(i, seqlen, cu_seqlens_ptr, cu_strides[0])
    t = (slot - sequence.slot) * CHUNK
    if t < sequence.length:
        batch = gl.where(cu_seqlens_ptr is None, sequence.index, 0).to(gl.int64)
        position = (sequence.begin + t).to(gl.int64)
        first = (
            batch * g_strides[0] + position * g_strides[1],
            batch * beta_strides[0] + position * beta_strides[1],
        )
        gates = (g_ptr, beta_ptr, g_strides, beta_strides)
        # overlaps the load of k
        g, beta = load_gates(first_head, sequence.length - t, first, gates, AT_ONCE)
        k = gl.allocate_shared_memory(k_desc.dtype, [CHUNK, DIM], wide)
        full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
        mbarrier.init(full, count=1)
        role_barrier()
        mbarrier.expect(full, 2 * CHUNK * DIM)
        where = [sequence.tile, key_head, sequence.row + t, 0]
        async_load(k_desc, where, full, k.reshape([1, 1, CHUNK, DIM]))
        if NORMALISE:
            q = gl.allocate_shared_memory(k_desc.dtype, [CHUNK, DIM], wide)
            q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
            mbarrier.init(q_full, count=1)
            role_barrier()
            mbarrier.expect(q_full, 2 * CHUNK * DIM)
            async_load(q_desc, where, q_full, q.reshape([1, 1, CHUNK, DIM]))
        all_betas = gl.allocate_shared_memory(gl.float32, [ROWS * CHUNK], vector)
        betas = reinterpret(all_betas, gl.float32, [ROWS, CHUNK], vector)
        squares = gl.allocate_shared_memory(gl.float32, [CHUNK], vector)
        factors = gl.allocate_shared_memory(gl.float32, [CHUNK], vector)
        mbarrier.wait(full, 0)
        begun = begin_times_transposed(k)
        g = log2_decays(g)
        store_decays(g, first_head, slot, decays_ptr, AT_ONCE, HEADS)
        beta = beta.to(gl.float32)
        all_betas.store(beta.reshape([ROWS * CHUNK]))
        KK = warpgroup_mma_wait(0, deps=[begun])
        square = diagonal_of(KK)
        o_r = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
        if NORMALISE:
            factor = gl.rsqrt(square + EPSILON)
            square *= factor * factor
            norms = norms_ptr + (slot.to(gl.int64) * KEY_HEADS + key_head) * (2 * CHUNK) + o_r
            gl.store(norms, factor)
            mbarrier.wait(q_full, 0)
            QQ = warpgroup_mma_wait(0, deps=[begin_times_transposed(q)])
            gl.store(norms + CHUNK, gl.rsqrt(diagonal_of(QQ) + EPSILON))
            factors.store(factor)
            KK *= factor[:, None] * gl.convert_layout(factor, gl.SliceLayout(0, layout))[None, :]
        squares.store(square)
        role_barrier()
        mbarrier.invalidate(full)  # the allocations below reuse its memory and that of k
        if NORMALISE:
            mbarrier.invalidate(q_full)
        store_bounds(
            g,
            beta,
            squares.load(gl.SliceLayout(0, by_head)),
            first_head,
            slot,
            slots,
            bounds_ptr,
            AT_ONCE,
        )
        blocks = diagonal_blocks(KK)
        pair = begin_inverses(KK, blocks, betas, 0, PAIR)
        if AT_ONCE == 3:
            third = begin_inverses(KK, blocks, betas, 2, 1)
        role_barrier()
        results = inverses_of(pair, betas, factors, k_desc.dtype, 0, PAIR, NORMALISE)
        if AT_ONCE == 3:
            results += inverses_of(third, betas, factors, k_desc.dtype, 2, 1, NORMALISE)
        fence_async_shared()
        role_barrier()
        for head in gl.static_range(AT_ONCE):
            async_store(A_desc, [(slot * HEADS + first_head + head) * CHUNK, 0], results[head])
        tma.store_wait(0)
