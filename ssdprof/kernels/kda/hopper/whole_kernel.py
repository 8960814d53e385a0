"""Kimi Delta Attention for Hopper where sequences and heads fill the multiprocessors.  A program
has all of a sequence and head, so that each of its inputs is read once, and nothing but outputs and
final states is written.

In:    q, k (B, T, H, K) | v (B, T, HV, V) | g (B, T, HV, K) | beta (B, T, HV) | initial_state
       (sequences, HV, K, V) | cu_seqlens (sequences + 1)
       for raw gates A_log (HV), dt_bias (HV, K)
Out:   out (B, T, HV, V) | final_states (sequences, HV, K, V) fp32, any strides
Grid:  (sequences * HV), heads fastest
Roles: `rings.py`.  Equations: `../fused.py`.  Oracle: `../reference.py`.

Every role runs code of its own, and all of it goes through one instruction cache, which holds about
33 KB.  Instructions a cycle that a multiprocessor of an H200 issues from loops of FFMA:

    1 loop of 28, 32, 40 KB                     3.89, 3.36, 1.64
    3 roles with loops of 11, 12, 14 KB each    3.80, 2.51, 1.89

If each role computed a whole chunk at once, the loops would have 52 KB, and roles would wait for
instructions.  `scores` counts twice, because its two roles have a copy of the code each.
Therefore `decays`, and the products and vectors of `scores`, go over one half of the channels after
the other: 41 KB.  Alone, `decays` then takes 2,238 cycles for a chunk instead of 1,823, and yet
eight sequences of 4,096 tokens with 32 heads take 640 us instead of 718.  Rows 17 and 18 of
benchmarks/log/kda.md have these measurements, except for the 2,238 cycles.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ssdprof.kernels._gluon import aggregate, async_load, async_store, phase, role_barrier
from ssdprof.kernels.gdn.hopper.assignment import Sequence, sequence_at
from ssdprof.kernels.kda.hopper.decays import decays
from ssdprof.kernels.kda.hopper.rings import DIM, SIZE, KDARings, allocate, begin_barriers
from ssdprof.kernels.kda.hopper.scores import scores
from ssdprof.kernels.kda.hopper.states import states

# stages of functions: `stalls/attribute.py`
STAGES = {
    "load_tile": "loads", "fill": "loads", "loads": "loads", "stores": "chunk_output",
    "_kda_whole_kernel": "setup",
}  # fmt: skip


@aggregate
class KDAWhole:
    """The arguments that all roles share."""

    descs: gl.tuple  # of q, k, g, v and out
    rings: KDARings
    beta_ptr: gl.tensor  # of the head, and in a batch of the sequence
    initial_ptr: gl.tensor | gl.constexpr
    final_ptr: gl.tensor
    A_log_ptr: gl.tensor | gl.constexpr
    dt_bias_ptr: gl.tensor | gl.constexpr
    beta_stride: gl.tensor | gl.constexpr
    sequence: Sequence
    head: gl.tensor
    nchunks: gl.tensor
    scale: gl.tensor
    S: gl.constexpr  # compile-time arguments


@gluon.jit
def load_tile(env, desc, head, tile, full, n):
    """Start to load a tile (SIZE, DIM) of the program's n-th chunk through TMA, which reads zeros
    beyond the sequence's end.

    head: that of the tensor.  tile: where the numbers go.  full: the mbarrier that completes.
    """
    where = [env.sequence.tile, head, env.sequence.tile_row + n * SIZE, 0]
    async_load(desc, where, full, tile.reshape([1, 1, SIZE, DIM]))


@gluon.jit
def fill(env, desc, ring, BYTES: gl.constexpr, n):
    """Start to load the program's n-th tile of a ring, when its slot is free.

    BYTES: those of a number.
    """
    ring.wait_empty(n)
    mbarrier.expect(ring.full_at(n), BYTES * SIZE * DIM)
    load_tile(env, desc, env.head, ring.tile(n), ring.full_at(n), n)


@gluon.jit
def loads(env):
    """Role: loads the inputs of every chunk through TMA."""
    rings, key_head = env.rings, env.head // env.S.VALUES_PER_KEY
    q_desc, k_desc, g_desc, v_desc, _ = env.descs
    for n in range(env.nchunks):
        rings.keys.wait_empty(n)
        full = rings.keys.full_at(n)
        mbarrier.expect(full, 4 * SIZE * DIM)  # bytes of q and k
        load_tile(env, q_desc, key_head, rings.query_tile(n), full, n)
        load_tile(env, k_desc, key_head, rings.keys.tile(n), full, n)
        fill(env, g_desc, rings.gates, env.S.GATE_BYTES, n)
        fill(env, v_desc, rings.values, 2, n)


@gluon.jit
def stores(env):
    """Role: stores the output of every chunk through TMA, and then releases its memory, that of
    v.
    """
    rings = env.rings
    _, _, _, _, out_desc = env.descs
    for n in range(env.nchunks):
        mbarrier.wait(rings.written.index(rings.slot(n)), phase(n, rings.keys.DEPTH))
        where = [env.sequence.tile, env.head, env.sequence.tile_row + n * SIZE, 0]
        async_store(out_desc, where, rings.values.tile(n).reshape([1, 1, SIZE, DIM]))
        tma.store_wait(0)
        mbarrier.arrive(rings.values.empty_at(n), count=1)


@gluon.jit(do_not_specialize=["seqlen"])
def _kda_whole_kernel(
    q_desc, k_desc, g_desc, v_desc, out_desc, tensors, strides, seqlen, scale, S: gl.constexpr
):
    """All chunks of one sequence and head."""
    beta_ptr, cu_seqlens_ptr, A_log_ptr, dt_bias_ptr, initial_ptr, final_ptr = tensors
    beta_strides, cu_strides = strides
    head = gl.program_id(0) % S.HEADS
    sequence = sequence_at(gl.program_id(0) // S.HEADS, seqlen, cu_seqlens_ptr, cu_strides[0])
    batch = gl.where(S.PACKED, 0, sequence.index).to(gl.int64)
    rings = allocate(q_desc.dtype, g_desc.dtype, S)
    begin_barriers(rings)
    role_barrier()  # the mbarriers are initialised before any role uses them
    env = KDAWhole(
        (q_desc, k_desc, g_desc, v_desc, out_desc),
        rings,
        beta_ptr + batch * beta_strides[0] + head.to(gl.int64) * beta_strides[2],
        initial_ptr,
        final_ptr,
        A_log_ptr,
        dt_bias_ptr,
        beta_strides[1],
        sequence,
        head,
        gl.cdiv(sequence.length, SIZE),
        scale,
        S,
    )
    # the last two lists: warps, and registers of a thread, of the roles after the first
    gl.warp_specialize(
        [
            (states, (env,)),
            (decays, (env,)),
            (scores, (env, 0)),
            (scores, (env, 1)),
            (loads, (env,)),
            (stores, (env,)),
        ],
        [4, 2, 2, 1, 1],
        [
            S.DECAY_REGISTERS,
            S.SCORE_REGISTERS,
            S.SCORE_REGISTERS,
            S.COPY_REGISTERS,
            S.COPY_REGISTERS,
        ],
    )
