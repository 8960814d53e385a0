"""Role `states`: holds the state in registers and computes the outputs.

State and outputs are transposed, (V, K) and (V, i), so that the state is a matrix operand directly
from registers.  From the state S that enters a chunk, its keys K, and X and W of `role_scores.py`,
the role computes

    Y  = V - 2^G (K S) / |k|      the values minus those that the state already returns
    S' = 2^G_end S + X^T Y        the state after the chunk
    O  = scale 2^G / |q| (Q S) + W Y

with log2 decays G since the chunk's start.  |k| and |q| are 1 if the call does not normalise.

From one state to the next, two products depend on each other: K S and X^T Y.  Two lanes of four
warps share this role: each has half of the rows of V.  They take turns in issuing products, so that
the products of one lane run beside the sums and conversions of the other.  Shared memory:
`rings.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ssdprof.kernels._gluon import (
    arrive,
    begin_product,
    product_layout,
    role_barrier,
    scalar,
    tile_indices,
)
from ssdprof.kernels.gdn.hopper.rings import DECAY, DIM, FROM_STATE, TO_OUTPUT

# stages of functions and of waits: `stalls/attribute.py`
STAGES = {
    "residual": "chunk_state.residual",
    "pass_chunk": "warm_up",
    "scan_chunk": "chunk_output",
    "scan_segment": "setup",
    "states": "setup",
}
WAITS = {
    "keys": "waiting.chunk",
    "values": "waiting.chunk",
    "queries": "waiting.chunk",
    "updates": "waiting.update",
    "weights": "waiting.weights",
    "outputs": "chunk_output",
}
# where the four strides of initial states (sequences, HV, K, V), and those of final states, begin
# in STATE_STRIDES
INITIAL, FINAL = gl.constexpr(0), gl.constexpr(4)
ROWS = gl.constexpr(64)  # rows of V of a lane
# Layouts in registers: of a state (V, K) and of a tile (V, i), which are results of products; and
# of left operands of the products that give a state, and of those that give such a tile.
by_k = gl.constexpr(product_layout(128, 4))
by_i = gl.constexpr(product_layout(64, 4))
k_operand = gl.constexpr(gl.DotOperandLayout(0, product_layout(128, 4), 2))
i_operand = gl.constexpr(gl.DotOperandLayout(0, product_layout(64, 4), 2))


@gluon.jit
def own_rows(tile, LANE: gl.constexpr):
    """The lane's rows of V of a tile (i, V), transposed: (ROWS, i)."""
    return tile.slice(LANE * ROWS, ROWS, dim=1).permute((1, 0))


@gluon.jit
def take_turn(rings, TURN: gl.constexpr, LANE: gl.constexpr):
    """Wait until the other lane has issued the products of the turn before this one.  Turns of lane
    0 and of lane 1 alternate.

    TURN: 0 or 1, the lane's turn in a chunk.  Because a chunk has two turns, the phase of the
    barrier is the same in every chunk.  Lane 0 does not wait in its first turn of the first chunk.
    """
    mbarrier.wait(rings.turns.index(LANE), (TURN + 1 - LANE) % 2)


@gluon.jit
def end_turn(rings, LANE: gl.constexpr):
    """Let the other lane issue the products of its next turn."""
    arrive(rings.turns.index(1 - LANE))


@gluon.jit
def residual(rings, state, n, LANE: gl.constexpr):
    """The lane's rows of Y (V, i) of the program's n-th chunk, and of the state (V, K) that enters
    it, both as operands, and the chunk's decay.
    """
    dtype: gl.constexpr = rings.keys.tiles.dtype
    rings.keys.wait_full(n)  # for k from `loads` and all vectors from `gates`
    decay = scalar(rings.vector(n, DECAY).slice(0, 1))
    # K S
    entered = gl.convert_layout(state.to(dtype), i_operand)
    take_turn(rings, 0, LANE)
    KS = begin_product(entered, rings.keys.tile(n).permute((1, 0)), by_i)
    end_turn(rings, LANE)
    # Y
    rings.values.wait_full(n)
    v = own_rows(rings.values.tile(n), LANE).load(i_operand)
    from_state = rings.vector(n, FROM_STATE).load(gl.SliceLayout(0, i_operand))
    KS = warpgroup_mma_wait(0, deps=[KS])
    Y = (v.to(gl.float32) - gl.convert_layout(KS, i_operand) * from_state[None, :]).to(dtype)
    return Y, entered, decay


@gluon.jit
def pass_chunk(rings, state, n, LANE: gl.constexpr):
    """The lane's rows of the state after the program's n-th chunk, one of the first pass."""
    Y, _, decay = residual(rings, state, n, LANE)
    rings.updates.wait_full(n)
    take_turn(rings, 1, LANE)
    begun = warpgroup_mma(
        gl.convert_layout(Y, k_operand), rings.updates.tile(n), state * decay, is_async=True
    )
    end_turn(rings, LANE)
    # a loop that waits at an mbarrier needs one barrier of its threads per iteration; here it costs
    # least
    role_barrier()
    state = warpgroup_mma_wait(0, deps=[begun])
    arrive(rings.keys.empty_at(n))
    arrive(rings.values.empty_at(n))
    arrive(rings.updates.empty_at(n))
    return state


@gluon.jit
def scan_chunk(rings, state, n, m, LANE: gl.constexpr):
    """The lane's rows of the state after the program's n-th chunk, the m-th of the second pass.
    Leaves its rows of the chunk's output in the ring `outputs`.
    """
    dtype: gl.constexpr = rings.keys.tiles.dtype
    Y, entered, decay = residual(rings, state, n, LANE)
    rings.updates.wait_full(n)
    rings.queries.wait_full(m)
    # the state after the chunk, and Q S
    take_turn(rings, 1, LANE)
    state_begun = warpgroup_mma(
        gl.convert_layout(Y, k_operand), rings.updates.tile(n), state * decay, is_async=True
    )
    QS = begin_product(entered, rings.queries.tile(m).permute((1, 0)), by_i)
    end_turn(rings, LANE)
    QS = warpgroup_mma_wait(0, deps=[QS])
    # the output, O
    # `residual` has waited for the vectors of the chunk
    to_output = rings.vector(n, TO_OUTPUT).load(gl.SliceLayout(0, by_i))
    rings.weights.wait_full(m)
    out_begun = warpgroup_mma(
        Y, rings.weights.tile(m).permute((1, 0)), QS * to_output[None, :], is_async=True
    )
    role_barrier()  # as in `pass_chunk`
    state, out = warpgroup_mma_wait(0, deps=[state_begun, out_begun])
    arrive(rings.keys.empty_at(n))
    arrive(rings.values.empty_at(n))
    arrive(rings.updates.empty_at(n))
    arrive(rings.queries.empty_at(m))
    arrive(rings.weights.empty_at(m))
    rings.outputs.wait_empty(m)
    own_rows(rings.outputs.tile(m), LANE).store(out.to(dtype))
    fence_async_shared()  # makes the output visible to TMA
    arrive(rings.outputs.full_at(m))
    return state


@gluon.jit
def state_tile(ptr, segment, first_row, WHICH: gl.constexpr, S: gl.constexpr):
    """Pointers (ROWS, K) to a state of the segment's sequence and head among (sequences, HV, K, V).

    first_row: first row of V.  WHICH: INITIAL or FINAL, where the strides of these states begin in
    STATE_STRIDES: between sequences, heads, elements of K and elements of V
    """
    o_v, o_k = tile_indices(ROWS, DIM, by_k)
    STRIDES: gl.constexpr = S.STATE_STRIDES
    of_head = (
        segment.sequence.index.to(gl.int64) * STRIDES[WHICH]
        + segment.head.to(gl.int64) * STRIDES[WHICH + 1]
    )
    rows = ptr + of_head + (first_row + o_v).to(gl.int64) * STRIDES[WHICH + 3]
    return rows[:, None] + (o_k.to(gl.int64) * STRIDES[WHICH + 2])[None, :]


@gluon.jit
def row_tile(ptr, row, first_row, layout: gl.constexpr):
    """Pointers (ROWS, K) to the matrix of a row among (rows, V, K).  first_row: first row of V"""
    o_v, o_k = tile_indices(ROWS, DIM, layout)
    return ptr + row.to(gl.int64) * (DIM * DIM) + ((first_row + o_v) * DIM)[:, None] + o_k[None, :]


@gluon.jit
def scan_segment(env, segment, n, LANE: gl.constexpr):
    """Compute the lane's rows of the outputs of a segment, and store those of the final state if it
    ends its sequence.

    n: the program's chunks before this segment
    """
    # the state where the program begins: zero, a state from `parts.py`, or the initial state
    state = gl.full([ROWS, DIM], 0.0, gl.float32, by_k)
    if env.entering_ptr is not None:  # noqa: SIM102
        if segment.state_row >= 0:
            state = gl.load(row_tile(env.entering_ptr, segment.state_row, LANE * ROWS, by_k))
    if env.initial_ptr is not None:  # noqa: SIM102
        if segment.warmup == segment.first:  # the first pass begins at the sequence's start
            initial_tile = state_tile(env.initial_ptr, segment, LANE * ROWS, INITIAL, env.S)
            state = gl.load(initial_tile).to(gl.float32)
    role_barrier()  # without it, the loops may have one more barrier per chunk, as in SSD's kernel
    for j in range(segment.warmup):
        state = pass_chunk(env.rings, state, n + j, LANE)
    for m in range(n, n + segment.nchunks):
        state = scan_chunk(env.rings, state, m + segment.warmup, m, LANE)
    if segment.last:
        gl.store(state_tile(env.destinations[0], segment, LANE * ROWS, FINAL, env.S), state)


@gluon.jit
def states(env, LANE: gl.constexpr):
    """Role of a lane: its rows of the outputs and final states of all segments of the program."""
    for i_segment in range(env.work.segments()):
        segment, n = env.work.segment_at(i_segment)
        scan_segment(env, segment, n, LANE)
