# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
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
Work: states (slots, lanes, 64 * n / halves) state_dtype: the state that each segment except a sequence's last adds;
      or fp32 (programs, 2, 64 * n / halves): the state after the lead of each program; two halves if n is 256, else one
      sync int32, zeroed: the ticket counter, and a flag per slot and lane: the segment's decay once its state is stored
Grid: (segments * lanes / 2), units fastest, then sequences, then segments; for packed sequences, segments before
      sequences, and an upper bound; or one program per SM.  A program waits only for lower tickets, whose programs have
      started, so that progress does not require two programs to run at the same time.
Oracle: `reference.py`.  Source: Dao and Gu 2024 (arXiv:2405.21060), section 6; docs/ssd-mathematics.md for segments.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssdprof.kernels.ssd.hopper.assignment import packed_segment_of, segment_of, share_of
from ssdprof.kernels.ssd.hopper.halves import MAX_WIDTH, allocate_exchange
from ssdprof.kernels.ssd.hopper.lanes import THREADS, lane_number
from ssdprof.kernels.ssd.hopper.rings import CHUNK, SLICE, allocate, begin_barriers, role_barrier
from ssdprof.kernels.ssd.hopper.role_gates import gates
from ssdprof.kernels.ssd.hopper.role_loads import loads
from ssdprof.kernels.ssd.hopper.role_scores import scores
from ssdprof.kernels.ssd.hopper.role_states import unit_states
from ssdprof.kernels.ssd.hopper.role_stores import stores
from ssdprof.kernels.tensors import tensor_of

FLAGS = gl.constexpr(8)  # offset of the flags in sync; each has a 32-byte sector
STAGES = {"units": "caller", "_fused_hopper_kernel": "setup"}


@gluon.jit
def units(
    shared, work, tensors, INITIAL_STRIDES: gl.constexpr,
    HEADS: gl.constexpr, HEADDIM: gl.constexpr, DSTATE: gl.constexpr, SLICES: gl.constexpr, RELAXED: gl.constexpr,
    PASSING: gl.constexpr,
):  # fmt: skip
    """The role of the program's first threads."""
    unit_states(
        lane_number(), shared, work, tensors, INITIAL_STRIDES, HEADS, HEADDIM, DSTATE, SLICES, RELAXED, PASSING
    )  # fmt: skip


def _metadata(_grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    x, B, final_states = tensor_of(args["x_desc"]), tensor_of(args["B_desc"]), args["final_ptr"]
    batch, seqlen, nheads, headdim = x.shape
    dstate, chunk = B.shape[3], CHUNK.value
    tensors = (x, x, args["dt_ptr"], B, B, args["initial_ptr"], final_states)  # x and out, B and C
    return {
        "name": f"{kernel.name} b{batch} l{seqlen} h{nheads} p{headdim} n{dstate}",
        "flops": 2 * batch * seqlen * nheads * (chunk * (dstate + headdim) + 3 * headdim * dstate),
        "bytes": sum(t.numel() * t.element_size() for t in tensors if t is not None),
    }


# Triton 3.6 does not compile warp_specialize with a constant 1 among its arguments.
@gluon.jit(launch_metadata=_metadata, do_not_specialize=["seqlen", "sequences", "K", "LONG_COUNT", "K_LONG"])
def _fused_hopper_kernel(
    x_desc, B_desc, C_desc, out_desc, dt_ptr, A_ptr, dt_bias_ptr, D_ptr, initial_ptr,
    cu_seqlens_ptr, final_ptr, states_ptr, sync_ptr,
    dt_strides, A_strides, dt_bias_strides, D_strides, INITIAL_STRIDES: gl.constexpr,
    cu_seqlens_strides, dt_low, dt_high, seqlen, sequences, K, LONG_COUNT, K_LONG,
    HEADS: gl.constexpr, HEADS_PER_GROUP: gl.constexpr, HEADDIM: gl.constexpr, DSTATE: gl.constexpr,
    DT_SOFTPLUS: gl.constexpr, RELAXED: gl.constexpr, PASSING: gl.constexpr,
    RING: gl.constexpr, SCORE_RING: gl.constexpr, UNIT_REGISTERS: gl.constexpr, OTHER_REGISTERS: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = 1 if DSTATE <= MAX_WIDTH else 2
    UNITS: gl.constexpr = 2 // HALVES
    shared = allocate(x_desc.dtype, DSTATE // HALVES, HALVES, RING, SCORE_RING)
    exchange = ()
    if HALVES == 2:
        exchange = allocate_exchange(SLICE, CHUNK)
    begin_barriers(shared, THREADS, PASSING == "look back" or PASSING == "recompute")

    # stage ticket: what is mine
    SLICES: gl.constexpr = (HEADDIM + SLICE - 1) // SLICE
    PAIRS: gl.constexpr = HEADS * SLICES // UNITS  # pairs of units, or of halves of one, per sequence
    ticket = gl.program_id(0)
    if PASSING == "look back" or PASSING == "hand on":
        ticket = gl.atomic_add(sync_ptr, 1, sem="relaxed")
        role_barrier()  # threads read the ticket from memory that warp_specialize overwrites next
    exists = True
    if PASSING == "hand on":
        work = share_of(ticket, seqlen, sequences, dt_strides, PAIRS, UNITS)
    elif cu_seqlens_ptr is None:
        work = segment_of(
            ticket, seqlen, sequences, dt_strides, K, LONG_COUNT, K_LONG, PASSING, PAIRS, UNITS
        )  # fmt: skip
    else:
        work, exists = packed_segment_of(
            ticket, seqlen, sequences, cu_seqlens_ptr, cu_seqlens_strides[0], dt_strides, K, PASSING, PAIRS, UNITS,
        )  # fmt: skip
    # stage setup
    if exists:
        sync = sync_ptr + FLAGS
        tensors = (D_ptr, D_strides, initial_ptr, states_ptr, final_ptr, sync, exchange)
        rates = (dt_ptr, A_ptr, dt_bias_ptr, dt_strides, A_strides, dt_bias_strides)
        # 512 registers for four groups of 128 threads, of which the first role, `units`, has two
        SCORE_REGISTERS: gl.constexpr = 512 - 2 * UNIT_REGISTERS - OTHER_REGISTERS
        gl.warp_specialize(
            [
                (
                    units,
                    (
                        shared, work, tensors, INITIAL_STRIDES, HEADS, HEADDIM, DSTATE, SLICES, RELAXED, PASSING,
                    ),
                ),
                (scores, (shared, work, rates, dt_low, dt_high, SLICES, DT_SOFTPLUS, RELAXED)),
                (gates, (shared, work, rates, dt_low, dt_high, SLICES, DT_SOFTPLUS)),
                (loads, (shared, work, x_desc, B_desc, C_desc, DSTATE, SLICES, HEADS_PER_GROUP)),
                (stores, (shared, work, out_desc, SLICES)),
            ],
            [4, 2, 1, 1],
            [SCORE_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS],
        )  # fmt: skip
