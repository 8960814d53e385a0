"""Computes for each chunk what does not depend on the state: inverses, decays and norms, for
`hopper_kernel.py`.

With e_i = 1 / |k_i| if the call normalises keys, else 1, and log2 decays G_i since the chunk's
start, a chunk of 64 tokens has the following.  If the call normalises, 1e-6 is added to the squares
of |k_i| and of |q_i| here.

    L_ij = beta_i e_i e_j k_i . k_j  for j < i,    A = (I + L)^-1,
    stored: e_i A_ij beta_j, transposed, rounded so that errors do not add up (`round_with_carry`)

A is free of decays.  The kernels that read it multiply by them: between tokens j < i of a chunk
they are 2^(G_i - G_j).

In:   k and, if the call normalises, q (b, l, h, K) through TMA | g, beta (b, l, hv)
      cu_seqlens (sequences + 1)
Out:  inverse (slots, hv, j, i), k's dtype
      decays (slots, hv, 64) fp32: G_i, not increasing
      bounds (hv, slots) fp32: log2 of an upper bound of the norm of the chunk's transition
          (`assignment.py`)
      norms (slots, h, 2, 64) fp32: 1 / |k_i| and 1 / |q_i|, if the call normalises q and k
Grid: slots * hv / AT_ONCE, heads fastest; a slot is a chunk of a sequence (`assignment.py`), and a
      program owns AT_ONCE value heads of a key head, one to three

The kernel is limited by latency.  So the heads of a program share k and its products, two heads
also share the instructions of the substitution (`inverse.py`), and g and beta are loaded before k.
"""

from triton import next_power_of_2
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from ssdprof.kernels._gluon import (
    async_load,
    async_store,
    begin_product,
    product_layout,
    reinterpret,
    role_barrier,
    tile_indices,
)
from ssdprof.kernels.gdn.hopper.assignment import packed_sequence, sequence_at
from ssdprof.kernels.gdn.hopper.inverse import (
    BLOCK,
    BLOCKS,
    allocate_scratch,
    block_row,
    diagonal_blocks,
    invert_blocks,
    narrow,
    of_block,
    side_by_side,
    store_lower,
)
from ssdprof.kernels.gdn.hopper.rings import DIM
from ssdprof.kernels.gdn.hopper.role_gates import log2_decays, sums
from ssdprof.kernels.hopper.ring import CHUNK

EPSILON = gl.constexpr(1e-6)  # added to squared norms
# Layout (head, i).  A warp holds all positions of a head, so that sums over a chunk need no other
# warp.
by_head = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))

# stages of functions: `stalls/attribute.py`
STAGES = {
    "begin_load": "setup",
    "diagonal_of": "scaled_dot_kkt",
    "begin_inverses": "solve_tril",
    "load_gates": "gate_cumsum",
    "store_decays": "gate_cumsum",
    "store_bounds": "gate_cumsum",
    "overlaps_of": "scaled_dot_kkt",
    "in_fours": "solve_tril",
    "round_with_carry": "solve_tril",
    "inverses_of": "solve_tril",
    "_prep_kernel": "setup",
}


@gluon.jit
def begin_load(desc, where):
    """Start to load a tile (CHUNK, DIM) of q or k at the TMA coordinates `where`.  Returns the tile
    and the mbarrier of the load.
    """
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, DIM], desc.dtype)
    tile = gl.allocate_shared_memory(desc.dtype, [CHUNK, DIM], layout)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(full, count=1)
    role_barrier()  # all threads see the initialised barrier before they wait at it
    mbarrier.expect(full, 2 * CHUNK * DIM)  # bytes
    async_load(desc, where, full, tile.reshape([1, 1, CHUNK, DIM]))
    return tile, full


@gluon.jit
def diagonal_of(product):
    """The diagonal of `product`, in the layout of its rows."""
    layout: gl.constexpr = product_layout(CHUNK, 4)
    o_i, o_j = tile_indices(CHUNK, CHUNK, layout)
    return gl.sum(gl.where(o_i[:, None] == o_j[None, :], product, 0.0), 1)


@gluon.jit
def load_gates(first_head, remaining, offsets, gates, AT_ONCE: gl.constexpr):
    """g and beta (head, i) of a program's heads, in the layout `by_head`, zeros past the sequence's
    end.  Three heads are padded with a row of zeros.

    first_head: the first of the program's AT_ONCE heads
    remaining: positions from the chunk's start to the sequence's end
    offsets: of the chunk's first position in g, and in beta, in elements
    gates: pointers to g and to beta, and the strides of both between rows of the batch, positions
        and heads
    """
    g_ptr, beta_ptr, g_strides, beta_strides = gates
    o_h, o_i = tile_indices(next_power_of_2(AT_ONCE), CHUNK, by_head)
    inside = (o_h < AT_ONCE)[:, None] & (o_i < remaining)[None, :]
    o_h, o_i = (first_head + o_h).to(gl.int64)[:, None], o_i.to(gl.int64)[None, :]
    g = gl.load(
        g_ptr + offsets[0] + o_h * g_strides[2] + o_i * g_strides[1], mask=inside, other=0.0
    )
    beta = gl.load(
        beta_ptr + offsets[1] + o_h * beta_strides[2] + o_i * beta_strides[1],
        mask=inside,
        other=0.0,
    )
    return g, beta


@gluon.jit
def store_decays(g, first_head, slot, decays_ptr, AT_ONCE: gl.constexpr, HEADS: gl.constexpr):
    """Store the decays G (head, i) of a chunk's heads: the sums of g since the chunk's start.

    g: (head, i), log2 decays of AT_ONCE heads from `first_head` on.  slot: of the chunk
    decays_ptr: (slots, HEADS, 64) fp32
    """
    o_h, o_i = tile_indices(next_power_of_2(AT_ONCE), CHUNK, by_head)
    tile = decays_ptr + (slot.to(gl.int64) * HEADS + first_head) * CHUNK
    o_h, o_i = o_h[:, None], o_i[None, :]
    gl.store(tile + o_h * CHUNK + o_i, sums(g, 1), mask=o_h < AT_ONCE)


@gluon.jit
def store_bounds(g, beta, squares, first_head, slot, slots, bounds_ptr, AT_ONCE: gl.constexpr):
    """Store the bounds of a chunk's heads: the sum over positions of g, and of log2 of the norm of
    I - beta k k^T where that is above 1.  A NaN in g makes the bound NaN.  On a GPU, one in beta or
    in a key does not, because `maximum` ignores it.

    g, beta: (head, i) of AT_ONCE heads from `first_head` on; g are log2 decays
    squares: |k_i|^2, of normalised keys if the call normalises them
    slot, slots: number of the chunk among the chunks of all sequences, and their number
    """
    o_h = gl.arange(0, next_power_of_2(AT_ONCE), gl.SliceLayout(1, by_head))
    stretch_log2 = gl.log2(gl.maximum(gl.abs(1.0 - beta * squares[None, :]), 1.0))
    bound = gl.sum(g + stretch_log2, 1)
    gl.store(bounds_ptr + (first_head + o_h).to(gl.int64) * slots + slot, bound, mask=o_h < AT_ONCE)


@gluon.jit
def begin_inverses(KK, blocks, betas, FIRST: gl.constexpr, HEADS: gl.constexpr):
    """Store L of HEADS heads of a program, one or two, beginning with head FIRST, in new scratch
    memory, and return it.

    KK: K K^T (i, j), with the norms' factors.  blocks: its diagonal blocks.  betas: (head, i) of
    all heads of the program, in shared memory
    """
    layout: gl.constexpr = product_layout(CHUNK, 4)
    scratch = allocate_scratch(HEADS)
    for head in gl.static_range(HEADS):
        beta = betas.index(FIRST + head).load(gl.SliceLayout(1, layout))
        store_lower(KK, blocks, beta, scratch.lower.index(head), scratch.diagonal.slice(head, 1))
    return scratch


@gluon.jit
def overlaps_of(blocks, NORMALISE: gl.constexpr):
    """(k_p . k_i) / |k_i|^2 for each position i of a chunk, where p is the position of the number
    that a thread rounds before number i of a row of the inverse (`round_with_carry`): i - 1 for odd
    i, else i - 7.  The overlap is 0 if p is in another block of 16.

    blocks: the diagonal blocks of K K^T, whose keys have length 1 if NORMALISE
    """
    o_i = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(2, of_block)))[None, :, None]
    o_j = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, of_block)))[None, None, :]
    previous = o_i - gl.where(o_i % 2 == 1, 1, 7)
    overlaps = gl.sum(gl.where(previous == o_j, blocks, 0.0), 2)
    if not NORMALISE:
        overlaps /= gl.sum(gl.where(o_i == o_j, blocks, 0.0), 2) + EPSILON
    return overlaps.reshape([CHUNK])


@gluon.jit
def in_fours(block):
    """Split a block of 16 columns (j, i) into four tensors: the first, second, third and fourth of
    the numbers that a thread has of each j.  Each is (j, i // 2 % 4).
    """
    even, odd = gl.split(block.reshape([CHUNK, 2, BLOCK // 4, 2]).permute((0, 2, 1, 3)))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def round_with_carry(block, overlap, factor, length, error, dtype: gl.constexpr):
    """Round a block of 16 columns (j, i) of the inverse, times `factor`, to `dtype`.  Returns the
    rounded block, and the rounding error that is carried to the next block, (j, i // 2 % 4).

    X_j is sum_i B_ij k_i times a decay, and W has products of q with parts of that sum.  For equal
    keys, roundings of the entries B_ij of a row j of this block add up in them, while the entries
    themselves nearly cancel each other.  So the error of an entry is added to the next entry of the
    same thread, in the proportion in which their keys overlap.  Only the errors of the last entries
    remain.  For keys that do not overlap, nothing is carried.

    overlap: of the block's columns (`overlaps_of`)
    factor, length: 1 / |k_i| and |k_i|; None if the call does not normalise keys
    error: that of the block before; 0 for the first block of a head
    """
    # all by the place of a number among the four of a thread
    overlaps, _ = gl.broadcast(overlap[None, :], block)
    numbers, shares = in_fours(block), in_fours(overlaps)
    if factor is not None:
        factors, _ = gl.broadcast(factor[None, :], block)
        lengths, _ = gl.broadcast(length[None, :], block)
        factors, lengths = in_fours(factors), in_fours(lengths)
    rounded = ()
    for k in gl.static_range(4):
        # The number before the first one is in another block, whose overlap is not known.  The
        # third number's overlap with the second takes its place: share 2 for k = 0, else share k.
        number = numbers[k] + error * shares[max(k, 2 - k)]
        if factor is None:
            rounded += (number.to(dtype),)
            error = number - rounded[k].to(gl.float32)
        else:
            rounded += ((number * factors[k]).to(dtype),)
            error = number - rounded[k].to(gl.float32) * lengths[k]
    # the inverse of `in_fours`
    pairs = gl.join(gl.join(rounded[0], rounded[1]), gl.join(rounded[2], rounded[3]))
    joined = pairs.permute((0, 3, 1, 2)).reshape([CHUNK, BLOCK])
    return gl.convert_layout(joined, narrow(gl.num_warps())), error


@gluon.jit
def inverses_of(
    scratch, betas, factors, lengths, overlaps, dtype: gl.constexpr, FIRST: gl.constexpr,
    HEADS: gl.constexpr, NORMALISE: gl.constexpr,
):  # fmt: skip
    """Compute e_i A_ij beta_j (j, i) of HEADS heads, beginning with head FIRST: a tile in shared
    memory for each head.

    scratch: of `begin_inverses`.  betas: (head, i).  factors, lengths: 1 / |k_i| and |k_i|, if
        NORMALISE.  overlaps: of `overlaps_of`.  All of them are in shared memory, and a barrier of
        the caller orders their stores.
    """
    layout: gl.constexpr = narrow(gl.num_warps())
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    square_tiles: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], dtype)
    invert_blocks(scratch.diagonal, scratch.inverted, HEADS)
    # Block rows, heads fastest: of A, as operands of the next ones, and of the result.  errors: of
    # each head before the first block, then after each block; so errors[len(scaled)] is that of the
    # same head after the block before
    rows, scaled = (), ()
    errors = (0.0,) * HEADS
    for i in gl.static_range(BLOCKS):
        overlap = overlaps.slice(BLOCK * i, BLOCK).load(gl.SliceLayout(0, layout))
        factor, length = None, None
        if NORMALISE:
            factor = factors.slice(BLOCK * i, BLOCK).load(gl.SliceLayout(0, layout))
            length = lengths.slice(BLOCK * i, BLOCK).load(gl.SliceLayout(0, layout))
        for head in gl.static_range(HEADS):
            row = block_row(i, head, HEADS, rows, scratch.lower.index(head), scratch.inverted)
            rows += (gl.convert_layout(row.to(gl.float16), left),)
            row *= betas.index(FIRST + head).load(gl.SliceLayout(1, layout))[:, None]
            error = errors[len(scaled)]
            rounded, error = round_with_carry(row, overlap, factor, length, error, dtype)
            errors += (error,)
            scaled += (rounded,)
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
    """Compute the inverses of one chunk of AT_ONCE value heads of a key head, their decays and
    bounds, and, with NORMALISE, the norms of the chunk's keys and queries.  Several programs of a
    key head store the same norms.

    descriptors: of k and q, and of the inverses (A)
    tensors: pointers to g, beta, cu_seqlens (None for a batch), decays, bounds and norms (None
        without NORMALISE).  strides: of g and beta between rows of the batch, positions and heads,
        and of cu_seqlens
    seqlen: positions of a row of the batch.  sequences, slots: their numbers
    """
    g_ptr, beta_ptr, cu_seqlens_ptr, decays_ptr, bounds_ptr, norms_ptr = tensors
    HEADS: gl.constexpr = S.HEADS
    KEY_HEADS: gl.constexpr = S.KEY_HEADS
    AT_ONCE: gl.constexpr = S.AT_ONCE
    NORMALISE: gl.constexpr = S.NORMALISE
    layout: gl.constexpr = product_layout(CHUNK, 4)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PADDED_HEADS: gl.constexpr = next_power_of_2(AT_ONCE)  # rows of `load_gates`
    PAIR: gl.constexpr = min(AT_ONCE, 2)  # heads that are inverted at the same time
    PROGRAMS: gl.constexpr = HEADS // AT_ONCE  # programs per slot
    GROUP: gl.constexpr = HEADS // KEY_HEADS
    # the program's heads and chunk
    first_head, slot = gl.program_id(0) % PROGRAMS * AT_ONCE, gl.program_id(0) // PROGRAMS
    key_head = first_head // GROUP
    if cu_seqlens_ptr is None:
        index = slot // gl.cdiv(seqlen, CHUNK)
    else:
        index = packed_sequence(slot, sequences, cu_seqlens_ptr, cu_strides[0])
    sequence = sequence_at(index, seqlen, cu_seqlens_ptr, cu_strides[0])
    t = (slot - sequence.slot) * CHUNK
    if t < sequence.length:
        batch = gl.where(cu_seqlens_ptr is None, sequence.index, 0).to(gl.int64)
        position = (sequence.begin + t).to(gl.int64)
        offsets = (
            batch * g_strides[0] + position * g_strides[1],
            batch * beta_strides[0] + position * beta_strides[1],
        )
        gates = (g_ptr, beta_ptr, g_strides, beta_strides)
        # loads of g and beta, then of k and q, which overlap
        g, beta = load_gates(first_head, sequence.length - t, offsets, gates, AT_ONCE)
        where = [sequence.tile, key_head, sequence.tile_row + t, 0]
        k, full = begin_load(k_desc, where)
        if NORMALISE:
            q, q_full = begin_load(q_desc, where)
        all_betas = gl.allocate_shared_memory(gl.float32, [PADDED_HEADS * CHUNK], vector)
        # the same memory as (head, i)
        betas = reinterpret(all_betas, gl.float32, [PADDED_HEADS, CHUNK], vector)
        squares = gl.allocate_shared_memory(gl.float32, [CHUNK], vector)
        factors = gl.allocate_shared_memory(gl.float32, [CHUNK], vector)
        lengths = gl.allocate_shared_memory(gl.float32, [CHUNK], vector)
        overlaps = gl.allocate_shared_memory(gl.float32, [CHUNK], vector)
        # K K^T (i, j), and beside the product the decays
        mbarrier.wait(full, 0)
        begun = begin_product(k, k.permute((1, 0)), layout)
        g = log2_decays(g)
        store_decays(g, first_head, slot, decays_ptr, AT_ONCE, HEADS)
        beta = beta.to(gl.float32)
        all_betas.store(beta.reshape([PADDED_HEADS * CHUNK]))
        KK = warpgroup_mma_wait(0, deps=[begun])
        # |k_i|^2; if the call normalises, 1 / |k_i| and |k_i|, and 1 / |q_i| from Q Q^T
        square = diagonal_of(KK)
        o_r = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
        if NORMALISE:
            factor = gl.rsqrt(square + EPSILON)
            length = (square + EPSILON) * factor
            square *= factor * factor
            norms = norms_ptr + (slot.to(gl.int64) * KEY_HEADS + key_head) * (2 * CHUNK) + o_r
            gl.store(norms, factor)
            mbarrier.wait(q_full, 0)
            QQ = warpgroup_mma_wait(0, deps=[begin_product(q, q.permute((1, 0)), layout)])
            gl.store(norms + CHUNK, gl.rsqrt(diagonal_of(QQ) + EPSILON))
            factors.store(factor)
            lengths.store(length)
            KK *= factor[:, None] * gl.convert_layout(factor, gl.SliceLayout(0, layout))[None, :]
        squares.store(square)
        role_barrier()  # stores of all warps are visible, and no thread waits at a barrier any more
        mbarrier.invalidate(full)  # the allocations below reuse its memory and that of k
        if NORMALISE:
            mbarrier.invalidate(q_full)
        square = squares.load(gl.SliceLayout(0, by_head))
        store_bounds(g, beta, square, first_head, slot, slots, bounds_ptr, AT_ONCE)
        # L of all heads, and their inverses: two heads at once, and a third one alone
        blocks = diagonal_blocks(KK)
        pair = begin_inverses(KK, blocks, betas, 0, PAIR)
        if AT_ONCE == 3:
            third = begin_inverses(KK, blocks, betas, 2, 1)
        role_barrier()  # warps read what others have stored in the scratch memory
        # runs beside the substitution, whose steps wait for each other
        overlaps.store(overlaps_of(blocks, NORMALISE))
        results = inverses_of(
            pair, betas, factors, lengths, overlaps, k_desc.dtype, 0, PAIR, NORMALISE
        )
        if AT_ONCE == 3:
            results += inverses_of(
                third, betas, factors, lengths, overlaps, k_desc.dtype, 2, 1, NORMALISE
            )
        fence_async_shared()  # makes the stores visible to TMA
        role_barrier()  # of all warps
        for head in gl.static_range(AT_ONCE):
            async_store(A_desc, [(slot * HEADS + first_head + head) * CHUNK, 0], results[head])
        tma.store_wait(0)  # until TMA has read the tiles
