"""Role `states` of `whole_kernel.py`: holds the state in registers and computes the outputs.

State and outputs are transposed, and computed by the equations of `scan.py`, for one half of the
columns of V after the other: both halves of the state are in registers, and the operands of
products of one half at a time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ssdprof.kernels._gluon import arrive, place_in, product_layout, role_barrier
from ssdprof.kernels.gdn.hopper.role_states import (
    FINAL,
    INITIAL,
    ROWS,
    by_k,
    k_operand,
    own_rows,
    state_tile,
)
from ssdprof.kernels.kda.hopper.rings import DIM, SIZE

# register layouts of a product (V, i), and of left operands of such products
by_i = gl.constexpr(product_layout(32, 4))
i_operand = gl.constexpr(gl.DotOperandLayout(0, product_layout(32, 4), 2))

# stages of functions (`stalls/attribute.py`); others belong to the stage that calls them
STAGES = {
    "residual_of": "chunk_state.residual", "pass_half": "chunk_state.update",
    "decayed_state": "chunk_state.update",
    "initial_half": "setup", "states": "setup",
}  # fmt: skip


@gluon.jit
def residual_of(rings, state, n, WHICH: gl.constexpr):
    """Y (V, i) of the program's n-th chunk as an operand, and queries S (V, i), for half WHICH of
    V.  The role has waited at the barriers `decayed`, for keys and queries, and `values`.
    """
    dtype: gl.constexpr = rings.keys.tiles.dtype
    entered = gl.convert_layout(state.to(dtype), i_operand)
    keys, queries = rings.keys.tile(n), rings.query_tile(n)
    zero = gl.full([ROWS, SIZE], 0.0, gl.float32, by_i)
    KS = warpgroup_mma(entered, keys.permute((1, 0)), zero, use_acc=False, is_async=True)
    QS = warpgroup_mma(entered, queries.permute((1, 0)), zero, use_acc=False, is_async=True)
    v = own_rows(rings.values.tile(n), WHICH).load(i_operand)
    KS, QS = warpgroup_mma_wait(0, deps=[KS, QS])
    return (v.to(gl.float32) - gl.convert_layout(KS, i_operand)).to(dtype), QS


@gluon.jit
def decayed_state(rings, state, n):
    """The state times the decays over the program's n-th chunk.  The barrier `decayed` is for these
    decays, too.
    """
    decays = rings.ends.index(rings.slot(n)).load(gl.SliceLayout(0, by_k))
    return state * decays[None, :]


@gluon.jit
def pass_half(rings, decayed, Y, QS, n, WHICH: gl.constexpr):
    """Half WHICH of the state after the program's n-th chunk.  Its output takes the place of v.
    The role has waited at a barrier of `updates`, for X and W.

    decayed: of `decayed_state`.  Y, QS: of `residual_of`.
    """
    state_begun = warpgroup_mma(
        gl.convert_layout(Y, k_operand), rings.updates.tile(n), decayed, is_async=True
    )
    # stage chunk_output
    # `weights` has the two slots of `updates`
    W = rings.weights.index(place_in(n, 2)).permute((1, 0))
    out_begun = warpgroup_mma(Y, W, QS, is_async=True)
    state, out = warpgroup_mma_wait(0, deps=[state_begun, out_begun])
    own_rows(rings.values.tile(n), WHICH).store(out.to(Y.dtype))
    return state


@gluon.jit
def initial_half(env, WHICH: gl.constexpr):
    """Half WHICH of the state (V, K) before the first chunk."""
    state = gl.full([ROWS, DIM], 0.0, gl.float32, by_k)
    if env.initial_ptr is not None:
        initial = state_tile(env.initial_ptr, env, WHICH * ROWS, INITIAL, env.S)
        state = gl.load(initial).to(gl.float32)
    return state


@gluon.jit
def states(env):
    """Role: passes the state through all chunks of the program, and stores the final state."""
    rings = env.rings
    first, second = initial_half(env, 0), initial_half(env, 1)
    for n in range(env.nchunks):
        rings.wait_decayed(n)
        rings.values.wait_full(n)
        Y, QS = residual_of(rings, first, n, 0)
        rings.updates.wait_full(n)
        first = pass_half(rings, decayed_state(rings, first, n), Y, QS, n, 0)
        Y, QS = residual_of(rings, second, n, 1)
        second = decayed_state(rings, second, n)
        arrive(rings.keys.empty_at(n))  # of keys, queries and ends
        second = pass_half(rings, second, Y, QS, n, 1)
        arrive(rings.updates.empty_at(n))
        fence_async_shared()  # makes the output visible to TMA
        arrive(rings.written.index(rings.slot(n)))
        # a loop that waits at an mbarrier needs one barrier of its threads per iteration
        role_barrier()
    gl.store(state_tile(env.final_ptr, env, 0, FINAL, env.S), first)
    gl.store(state_tile(env.final_ptr, env, ROWS, FINAL, env.S), second)
