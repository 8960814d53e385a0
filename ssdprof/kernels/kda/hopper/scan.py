"""Passes the state through the chunks of a slab, for 64 columns of V, and computes the outputs.

State and outputs are transposed, (V, K) and (V, i), so that the state can be a matrix operand in
registers.  S is the state that enters a chunk:

    Y  = V - keys S
    S' = diag(ends) S + X^T Y
    O  = queries S + W Y

From one state to the next, two products depend on each other: keys S and X^T Y.  The tensor cores
compute products in the order in which they begin, and the order here keeps them busy.  W Y runs
while the state is rounded for the next chunk.  keys S of the next chunk begins before this chunk's
output is stored.  queries S runs while Y is computed.  No product runs across the end of an
iteration, because the compiler would then wait after each instruction.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ssdprof.kernels._gluon import aggregate, arrive, role_barrier
from ssdprof.kernels.gdn.hopper.assignment import Sequence
from ssdprof.kernels.gdn.hopper.role_states import (
    FINAL,
    INITIAL,
    ROWS,
    by_i,
    by_k,
    i_operand,
    k_operand,
    state_tile,
)
from ssdprof.kernels.hopper.ring import CHUNK
from ssdprof.kernels.kda.hopper.tiles import DIM, KEYS, QUERIES, UPDATE, VALUES, halves_of

by_thread = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # (K): one number for each thread

# stages of functions (`stalls/attribute.py`); others belong to the stage that calls them
STAGES = {
    "store_output": "chunk_output", "residual": "chunk_state.residual",
    "begin_chunk": "chunk_state", "scan_chunk": "chunk_state", "entering_state": "setup",
    "scan_segment": "setup",
}  # fmt: skip


@aggregate
class KDASegment:
    """Consecutive chunks of a sequence, and 64 columns of V of one value head.

    first_v: first column of V.  first: index in the sequence of the first chunk.  nchunks: number
    of chunks.
    """

    sequence: Sequence
    head: gl.tensor
    first_v: gl.tensor
    first: gl.tensor
    nchunks: gl.tensor

    @gluon.jit
    def head_slot(self, j, HEADS: gl.constexpr):
        """The index of the segment's j-th chunk and its head among the heads of all slots: slot *
        HEADS + head.
        """
        return (self.sequence.slot + self.first + j) * HEADS + self.head


@gluon.jit
def decays_at(env, segment, j):
    """The decays (K) over the segment's j-th chunk, one in each thread."""
    head_slot = segment.head_slot(j, env.S.HEADS).to(gl.int64)
    return gl.load(env.ends_ptr + head_slot * DIM + gl.arange(0, DIM, by_thread))


@gluon.jit
def product_with(ring, entered, n, WHICH: gl.constexpr):
    """Begin the product (V, i) of a state, as an operand, with the keys or the queries of the
    program's n-th chunk.  The caller waits for it.
    """
    ring.wait_full(4 * n + WHICH)
    rows = ring.tile(4 * n + WHICH).permute((1, 0))
    zero = gl.full([ROWS, CHUNK], 0.0, gl.float32, by_i)
    return warpgroup_mma(entered, rows, zero, use_acc=False, is_async=True)


@gluon.jit
def as_operand(ring, state):
    """The state (V, K), rounded as an operand of products."""
    return gl.convert_layout(state.to(ring.tiles.dtype), i_operand)


@gluon.jit
def store_output(ring, written, out, n):
    """Write the output (V, i) of the program's n-th chunk in the place of v, and announce it to the
    role `stores`.  The fence makes it visible to TMA.
    """
    halves_of(ring.tile(4 * n + VALUES)).index(0).permute((1, 0)).store(out.to(ring.tiles.dtype))
    fence_async_shared()
    arrive(written.index(n % 2))


@gluon.jit
def residual(ring, entered, KS, n):
    """Y (V, i) of the program's n-th chunk as an operand, and the product queries S (V, i), which
    runs while Y is computed and is complete at the end.

    entered: the state that enters the chunk, as an operand.  KS: keys S, which has begun.
    """
    QS = product_with(ring, entered, n, QUERIES)
    ring.wait_full(4 * n + VALUES)
    v = halves_of(ring.tile(4 * n + VALUES)).index(0).permute((1, 0)).load(i_operand)
    KS = warpgroup_mma_wait(1, deps=[KS])
    arrive(ring.empty_at(4 * n + KEYS))
    Y = (v.to(gl.float32) - gl.convert_layout(KS, i_operand)).to(ring.tiles.dtype)
    QS = warpgroup_mma_wait(0, deps=[QS])
    arrive(ring.empty_at(4 * n + QUERIES))
    return Y, QS


@gluon.jit
def begin_chunk(env, ring, segment, state, Y, QS, ends, j, n):
    """Begin to compute the output of the segment's j-th chunk, the program's n-th, and the state
    after it.  Returns both products, for which the caller waits: (V, K), then (V, i).  `residual`
    has waited for the chunk's tile of v and W.

    ends (2, K), in shared memory: the decays over this chunk in slot n % 2; the decays over the
        next chunk are stored in the other slot.  The compiler puts a barrier between a store there
        and the load for the next chunk, which reads the numbers of all threads.
    """
    next_decays = decays_at(env, segment, gl.minimum(j + 1, segment.nchunks - 1))
    decays = ends.index(n % 2).load(gl.SliceLayout(0, by_k))
    # stage chunk_state.update: S' = diag(ends) S + X^T Y
    ring.wait_full(4 * n + UPDATE)
    X, decayed = ring.tile(4 * n + UPDATE), state * decays[None, :]
    state_begun = warpgroup_mma(gl.convert_layout(Y, k_operand), X, decayed, is_async=True)
    # stage chunk_output: O = queries S + W Y
    W = halves_of(ring.tile(4 * n + VALUES)).index(1).permute((1, 0))
    out_begun = warpgroup_mma(Y, W, QS, is_async=True)
    role_barrier()  # all warps have loaded the previous chunk's decays from the slot stored next
    ends.index((n + 1) % 2).store(next_decays)
    return state_begun, out_begun


@gluon.jit
def scan_chunk(env, ring, written, segment, state, Y, QS, ends, j, n):
    """The state after the segment's j-th chunk, the program's n-th, and Y and queries S of the next
    one.  state, Y, QS: the state that enters the chunk, and its Y and queries S.
    """
    state_begun, out_begun = begin_chunk(env, ring, segment, state, Y, QS, ends, j, n)
    state = warpgroup_mma_wait(1, deps=[state_begun])
    arrive(ring.empty_at(4 * n + UPDATE))
    entered = as_operand(ring, state)
    KS = product_with(ring, entered, n + 1, KEYS)
    out = warpgroup_mma_wait(1, deps=[out_begun])
    store_output(ring, written, out, n)
    Y, QS = residual(ring, entered, KS, n + 1)
    return state, Y, QS


@gluon.jit
def entering_state(env, segment):
    """The state (V, K) that enters a segment: the sequence's initial state, or the state that an
    earlier slab has left in the place of the final state.
    """
    state = gl.full([ROWS, DIM], 0.0, gl.float32, by_k)
    if segment.first > 0:
        state = gl.load(state_tile(env.final_ptr, segment, segment.first_v, FINAL, env.S))
    elif env.initial_ptr is not None:
        initial = state_tile(env.initial_ptr, segment, segment.first_v, INITIAL, env.S)
        state = gl.load(initial).to(gl.float32)
    return state


@gluon.jit
def scan_segment(env, ring, written, segment, ends, n):
    """Compute the outputs of a segment, and store the state after it in the place of the final
    state.

    ends (2, K): shared memory for decays.  n: number of the program's chunks before the segment.
    """
    state = entering_state(env, segment)
    if segment.nchunks > 0:
        ends.index(n % 2).store(decays_at(env, segment, gl.to_tensor(0)))
        role_barrier()  # each thread has stored one decay; `begin_chunk` reads all of them
        entered, last = as_operand(ring, state), segment.nchunks - 1
        Y, QS = residual(ring, entered, product_with(ring, entered, n, KEYS), n)
        for j in range(last):
            state, Y, QS = scan_chunk(env, ring, written, segment, state, Y, QS, ends, j, n + j)
        n_last = n + last
        state_begun, out_begun = begin_chunk(env, ring, segment, state, Y, QS, ends, last, n_last)
        state, out = warpgroup_mma_wait(0, deps=[state_begun, out_begun])
        arrive(ring.empty_at(4 * n_last + UPDATE))
        store_output(ring, written, out, n_last)
    gl.store(state_tile(env.final_ptr, segment, segment.first_v, FINAL, env.S), state)
    role_barrier()  # all threads have stored their part of the state before `scan` sets the flag
