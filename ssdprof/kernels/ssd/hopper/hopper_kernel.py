# mypy: ignore-errors
"""SSD, all five stages in one launch, for Hopper, in Gluon: warp roles, TMA copies, states in registers.

The algorithm is that of `portable/`.  A first pass reads the segment backwards and computes the state that it adds.
The program publishes that state, and sums the states that earlier segments have published.  So no segment waits for
more than the first passes of others.  A second pass reads the segment forwards and computes the output.  With more
pairs of units than SMs there are no first passes: programs process equal shares of all sequences (`assignment.py`).

A program owns two units (heads, or slices of 64 of a head's P) that share B and C, or one unit if N is 256.  Its warps
have roles (`rings.py`).  States and outputs are transposed, so that the state is a matrix operand directly from
registers, and x, loaded once, serves all three products.  Reasons and alternatives: docs/ssd-performance.md.

In:   x (b, l, h, p) | dt (b, l, h) | A, dt_bias (h) | B, C (b, l, g, n) | D (h) or (h, p)
      initial_states (sequences, h, p, n) | cu_seqlens (sequences + 1)
Out:  out (b, l, h, p), x's dtype | final_states (sequences, h, p, n) fp32
Work: states (slots, lanes, 64 * n / n_split) state_dtype: the state that each segment except a sequence's last adds;
      or fp32 (programs, 2, 64 * n / n_split): the state after the chunks that each program begins
      sync int32, zeroed: the ticket counter, and a flag per slot and lane: the segment's decay once its state is stored
Grid: (segments * lanes / 2), units fastest, then sequences, then segments; for packed sequences, segments before
      sequences, and an upper bound; or one program per SM.  A program waits only for lower tickets, whose programs have
      started, so that progress does not require two programs to run at the same time.
Oracle: `reference.py`.  Source: Dao and Gu 2024 (arXiv:2405.21060), section 6; docs/ssd-mathematics.md for segments.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssdprof.kernels._gluon import role_barrier
from ssdprof.kernels.hopper.ring import CHUNK
from ssdprof.kernels.hopper.work import aggregate
from ssdprof.kernels.ssd.hopper.assignment import SSDSegment, StreamK, packed_segment_of, segment_of, share_of
from ssdprof.kernels.ssd.hopper.lanes import allocate_exchange
from ssdprof.kernels.ssd.hopper.rings import SLICE, Shared, allocate, begin_barriers
from ssdprof.kernels.ssd.hopper.role_copies import loads, stores
from ssdprof.kernels.ssd.hopper.role_gates import gates
from ssdprof.kernels.ssd.hopper.role_scores import scores
from ssdprof.kernels.ssd.hopper.role_states import units
from ssdprof.kernels.tensors import tensor_of

FLAGS = gl.constexpr(8)  # offset of the flags in sync; each has a 32-byte sector
STAGES = {"_fused_hopper_kernel": "setup"}


@aggregate
class SSDEnv:
    """All that the roles share."""

    shared: Shared
    work: SSDSegment | StreamK
    dt_ptr: gl.tensor
    A_ptr: gl.tensor
    dt_bias_ptr: gl.tensor | gl.constexpr
    strides: gl.tuple  # of dt, A, dt_bias, D, cu_seqlens
    dt_limit: gl.tuple
    descs: gl.tuple  # of x, B, C, out
    D_ptr: gl.tensor | gl.constexpr
    initial_ptr: gl.tensor | gl.constexpr
    states_ptr: gl.tensor
    final_ptr: gl.tensor
    flags_ptr: gl.tensor
    exchange: gl.shared_memory_descriptor | gl.tuple
    S: gl.constexpr  # compile-time arguments


def _metadata(_grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    x, B = tensor_of(args["x_desc"]), tensor_of(args["B_desc"])
    dt, _, _, _, initial_states, _, final_states, *_ = args["tensors"]
    batch, seqlen, nheads, headdim = x.shape
    dstate, chunk = B.shape[3], CHUNK.value
    tensors = (x, x, dt, B, B, initial_states, final_states)  # x and out, B and C
    return {
        "name": f"{kernel.name} b{batch} l{seqlen} h{nheads} p{headdim} n{dstate}",
        "flops": 2 * batch * seqlen * nheads * (chunk * (dstate + headdim) + 3 * headdim * dstate),
        "bytes": sum(t.numel() * t.element_size() for t in tensors if t is not None),
    }


# Triton 3.6 does not compile warp_specialize with a constant 1 among its arguments.  It specialises all in a tuple.
@gluon.jit(launch_metadata=_metadata, do_not_specialize=["seqlen", "sequences", "K", "LONG_COUNT", "K_LONG"])
def _fused_hopper_kernel(
    x_desc, B_desc, C_desc, out_desc, tensors, strides, dt_limit, seqlen, sequences, K, LONG_COUNT, K_LONG,
    S: gl.constexpr,
):  # fmt: skip
    """strides: of dt, A, dt_bias, D, cu_seqlens."""
    dt_ptr, A_ptr, dt_bias_ptr, D_ptr, initial_ptr, cu_seqlens_ptr, final_ptr, states_ptr, sync_ptr = tensors
    shared = allocate(x_desc.dtype, S)
    exchange = ()
    if S.N_SPLIT == 2:
        exchange = allocate_exchange(SLICE, CHUNK)
    begin_barriers(shared, S.PASSING == "look back" or S.PASSING == "recompute")

    # stage ticket: what is mine
    ticket = gl.program_id(0)
    if S.PASSING == "look back" or S.PASSING == "carry":
        ticket = gl.atomic_add(sync_ptr, 1, sem="relaxed")
        role_barrier()  # threads read the ticket from memory that warp_specialize overwrites next
    exists = True
    if S.PASSING == "carry":
        work = share_of(ticket, seqlen, sequences, strides[0], S)
    elif cu_seqlens_ptr is None:
        work = segment_of(ticket, seqlen, sequences, strides[0], K, LONG_COUNT, K_LONG, S)
    else:
        work, exists = packed_segment_of(
            ticket, seqlen, sequences, cu_seqlens_ptr, strides[4][0], strides[0], K, S
        )  # fmt: skip
    # stage setup
    if exists:
        env = SSDEnv(
            shared, work, dt_ptr, A_ptr, dt_bias_ptr, strides, dt_limit, (x_desc, B_desc, C_desc, out_desc), D_ptr,
            initial_ptr, states_ptr, final_ptr, sync_ptr + FLAGS, exchange, S,
        )  # fmt: skip
        # 512 registers for four groups of 128 threads, of which the first role, `units`, has two
        OTHERS: gl.constexpr = S.OTHER_REGISTERS
        gl.warp_specialize(
            [(units, (env,)), (scores, (env,)), (gates, (env,)), (loads, (env,)), (stores, (env,))],
            [4, 2, 1, 1],
            [512 - 2 * S.UNIT_REGISTERS - OTHERS, OTHERS, OTHERS, OTHERS],
        )
