# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""SSD, all five stages in one launch, for Hopper: warp roles, the copy engine, states in registers.  In Gluon.

The algorithm is that of `fused_portable.py`: a program goes over its segment backwards for the state that the segment
adds, and forwards for the output.  In between it publishes what it adds, and sums what those before it have published,
so that no segment waits for more than the first passes of others.  Where there are more pairs of units than SMs, there
are no first passes: programs have equal shares of all sequences, one after the other (`hopper_work.py`).  A program
works on two units at once (heads, or slices of 64 of a head's P) that share B and C, or on one where N is 256, and its
warps have roles (`hopper_shared.py`).  States and outputs are held transposed, so that the state is a matrix operand
straight from registers and x, loaded once, serves all three products.  Why so, and what was tried:
docs/ssd-performance.md.

In:   x (b, l, h, p) | dt (b, l, h) | A, dt_bias (h) | B, C (b, l, g, n) | D (h) or (h, p)
      initial_states (sequences, h, p, n) | cu_seqlens (sequences + 1)
Out:  out (b, l, h, p), x's dtype | final_states (sequences, h, p, n) fp32
Work: states (slots, lanes, 64 * n) state_dtype: what each segment but a sequence's last adds to a state; or fp32
      (programs, 2, 64 * n / halves): the state after the beginning of a sequence that the next program goes on with
      sync int32, zeroed: the ticket counter, and for each slot and lane the segment's decay, once the state is there
Grid: (segments * lanes / 2), units fastest, then sequences, segments; an upper bound if packed; or one program for each
      SM.  A program waits only for lower tickets, which have started, so that progress needs no two programs at once.
Oracle: `reference.py`.  Source: Dao and Gu 2024 (arXiv:2405.21060), section 6; docs/ssd-mathematics.md for segments.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ssdprof.kernels.ssd.hopper_gates import gates
from ssdprof.kernels.ssd.hopper_halves import MAX_WIDTH, allocate_exchange
from ssdprof.kernels.ssd.hopper_lanes import THREADS, lane_number
from ssdprof.kernels.ssd.hopper_roles import loads, scores, stores
from ssdprof.kernels.ssd.hopper_shared import CHUNK, SLICE, FirstPass, Shared, role_barrier, weight_places
from ssdprof.kernels.ssd.hopper_unit import unit_states
from ssdprof.kernels.ssd.hopper_work import packed_segment_of, segment_of, share_of

FLAGS = gl.constexpr(8)  # where the flags begin in sync; each has a 32-byte sector
STAGES = {"units": "caller", "_fused_hopper_kernel": "setup"}


@gluon.jit
def units(
    shared, work, tensors, INITIAL_STRIDES: gl.constexpr,
    HEADS: gl.constexpr, HEADDIM: gl.constexpr, DSTATE: gl.constexpr, SLICES: gl.constexpr, RELAXED: gl.constexpr,
    PASSING: gl.constexpr,
):  # fmt: skip
    """The role that begins with the program's first thread."""
    unit_states(
        lane_number(), shared, work, tensors, INITIAL_STRIDES, HEADS, HEADDIM, DSTATE, SLICES, RELAXED, PASSING
    )  # fmt: skip


def _metadata(_grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    x, B, final_states = args["x_desc"].base.tensor, args["B_desc"].base.tensor, args["final_ptr"]
    batch, seqlen, nheads, headdim = x.shape
    dstate, chunk = B.shape[3], CHUNK.value
    tensors = (x, x, args["dt_ptr"], B, B, args["initial_ptr"], final_states)  # x and out, B and C
    return {
        "name": f"{kernel.name} b{batch} l{seqlen} h{nheads} p{headdim} n{dstate}",
        "flops": 2 * batch * seqlen * nheads * (chunk * (dstate + headdim) + 3 * headdim * dstate),
        "bytes": sum(t.numel() * t.element_size() for t in tensors if t is not None),
    }


# a constant 1 among the arguments of warp_specialize does not compile in Triton 3.6
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
    dtype: gl.constexpr = x_desc.dtype
    HALVES: gl.constexpr = 1 if DSTATE <= MAX_WIDTH else 2
    UNITS: gl.constexpr = 2 // HALVES
    WIDTH: gl.constexpr = DSTATE // HALVES
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], dtype)
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, WIDTH], dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK // HALVES, SLICE], dtype)
    FIRST_RING: gl.constexpr = RING * HALVES  # without C there is room for as many halves
    WEIGHTS: gl.constexpr = weight_places(FIRST_RING, HALVES)
    WORDS: gl.constexpr = RING + 2
    first_pass = FirstPass(
        gl.allocate_shared_memory(gl.float32, [WEIGHTS, 2 * CHUNK], vector),
        gl.allocate_shared_memory(gl.float32, [WEIGHTS, 2], vector),
        gl.allocate_shared_memory(gl.int32, [WORDS, 1], vector),
        gl.allocate_shared_memory(gl.int64, [FIRST_RING, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [FIRST_RING, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [WORDS, 1], barrier),
        FIRST_RING, HALVES,
    )  # fmt: skip
    shared = Shared(
        first_pass,
        gl.allocate_shared_memory(dtype, [2 * RING * HALVES, CHUNK, WIDTH], wide),
        gl.allocate_shared_memory(dtype, [FIRST_RING * UNITS, CHUNK, SLICE], square),
        gl.allocate_shared_memory(dtype, [SCORE_RING * UNITS, CHUNK, CHUNK], square),
        gl.allocate_shared_memory(dtype, [2, CHUNK // HALVES, SLICE], narrow),
        gl.allocate_shared_memory(gl.float32, [RING * 4, 2 * CHUNK], vector),
        gl.allocate_shared_memory(gl.float32, [RING, 2], vector),
        gl.allocate_shared_memory(gl.int64, [RING, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [RING, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [SCORE_RING, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [SCORE_RING, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [2, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [2, 1], barrier),
        RING, SCORE_RING, HALVES,
    )  # fmt: skip
    for i in gl.static_range(2):
        mbarrier.init(shared.written.index(i), count=THREADS)
        mbarrier.init(shared.unwritten.index(i), count=1)
    exchange = ()
    if HALVES == 2:
        exchange = allocate_exchange(SLICE, CHUNK)
    for i in gl.static_range(RING):
        mbarrier.init(shared.full.index(i), count=2)  # gates, loads
        mbarrier.init(shared.empty.index(i), count=1 + 2 * THREADS)  # scores, both lanes
    for i in gl.static_range(SCORE_RING):
        mbarrier.init(shared.scored.index(i), count=1)
        mbarrier.init(shared.unscored.index(i), count=2 * THREADS)
    if PASSING == "look back" or PASSING == "recompute":  # else Triton has something else in their place
        for i in gl.static_range(FIRST_RING):
            # by loads; in a turn's first by scores, too
            mbarrier.init(first_pass.full.index(i), count=1 if i % HALVES > 0 else 2)
            mbarrier.init(first_pass.empty.index(i), count=2 * THREADS)  # both lanes
        for i in gl.static_range(WORDS):
            mbarrier.init(first_pass.told.index(i), count=1)

    # stage ticket: what is mine
    SLICES: gl.constexpr = (HEADDIM + SLICE - 1) // SLICE
    PROGRAMS: gl.constexpr = HEADS * SLICES // UNITS  # of a segment
    ticket = gl.program_id(0)
    if PASSING == "look back" or PASSING == "hand on":
        ticket = gl.atomic_add(sync_ptr, 1, sem="relaxed")
        role_barrier()  # the ticket reaches its threads through memory that warp_specialize writes next
    exists = True
    if PASSING == "hand on":
        work = share_of(ticket, seqlen, sequences, dt_strides, PROGRAMS, UNITS)
    elif cu_seqlens_ptr is None:
        work = segment_of(
            ticket, seqlen, sequences, dt_strides, K, LONG_COUNT, K_LONG, PASSING, PROGRAMS, UNITS
        )  # fmt: skip
    else:
        work, exists = packed_segment_of(
            ticket, seqlen, sequences, cu_seqlens_ptr, cu_seqlens_strides[0], dt_strides, K, PASSING, PROGRAMS, UNITS,
        )  # fmt: skip
    # stage setup
    if exists:
        sync = sync_ptr + FLAGS
        tensors = (D_ptr, D_strides, initial_ptr, states_ptr, final_ptr, sync, exchange)
        rates = (dt_ptr, A_ptr, dt_bias_ptr, dt_strides, A_strides, dt_bias_strides)
        # of four times 128 threads; the first role has what is left
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
