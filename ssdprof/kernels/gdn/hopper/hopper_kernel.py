# mypy: ignore-errors
"""Gated delta rule for Hopper, after `prep_kernel.py`, with warp roles, TMA copies and states in registers.

A program owns a segment of a sequence and one value head.  If the segment does not begin its sequence, a first pass
over chunks before it computes the state that enters it (`assignment.py`).  For a head that forgets slowly, two earlier
launches compute that state instead (`parts.py`).  No program waits for another.  The warps of a program have roles
(`rings.py`): `states` updates the state chunk by chunk, and `scores` computes its factors from the chunk's inverse.

In:   q, k (b, l, h, K) | v (b, l, hv, V) | initial_state (sequences, hv, K, V) | cu_seqlens (sequences + 1)
      inverse, decays, bounds, norms: from `prep_kernel.py` | entering: `combine_kernel.py` | backs: `parts.py`
Out:  out (b, l, hv, V), v's dtype | final_states (sequences, hv, K, V) fp32, any strides
Grid: (segments * sequences * hv), heads fastest, then sequences, then segments; or one program per SM, which processes
      several whole sequences
Oracle: `reference.py`.  Source: Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464), section 3.3.  The reason for this
form of the products: docs/gdn-performance.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssdprof.kernels._gluon import role_barrier
from ssdprof.kernels.gdn.hopper.assignment import Wholes, segment_of
from ssdprof.kernels.gdn.hopper.parts import part_gates, part_loads, part_states, parts_of
from ssdprof.kernels.gdn.hopper.rings import CHUNK, allocate, begin_barriers
from ssdprof.kernels.gdn.hopper.role_copies import copies
from ssdprof.kernels.gdn.hopper.role_gates import gates, gates_of_inputs
from ssdprof.kernels.gdn.hopper.role_inverse import allocate_inversion, begin_inversion, inverses
from ssdprof.kernels.gdn.hopper.role_loads import loads
from ssdprof.kernels.gdn.hopper.role_scores import scores, scores_and_lower
from ssdprof.kernels.gdn.hopper.role_states import states
from ssdprof.kernels.gdn.hopper.role_stores import stores

STAGES = {
    "_hopper_kernel": "setup",
    "_parts_kernel": "setup",
    "run_roles": "setup",
    "run_inverting_roles": "setup",
    "as_tensors": "setup",
}


@gluon.jit
def run_roles(
    rings, work, descs, pointers, scale, STATE_STRIDES: gl.constexpr, KEY_HEADS: gl.constexpr, HEADS: gl.constexpr,
    STATE_REGISTERS: gl.constexpr, OTHER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Run the roles until each has done its part of `work`."""
    q_desc, k_desc, v_desc, A_desc, out_desc = descs
    initial_ptr, entering_ptr, final_ptr, decays_ptr, norms_ptr = pointers
    AHEAD: gl.constexpr = rings.keys.SIZE - rings.queries.SIZE
    # 512 registers for four groups of 128 threads, of which the first role, `states`, has two
    SCORE_REGISTERS: gl.constexpr = 512 - 2 * STATE_REGISTERS - OTHER_REGISTERS
    gl.warp_specialize(
        [
            (states, (rings, work, initial_ptr, entering_ptr, final_ptr, STATE_STRIDES, 0)),
            (states, (rings, work, initial_ptr, entering_ptr, final_ptr, STATE_STRIDES, 1)),
            (scores, (rings, work)),
            (gates, (rings, work, decays_ptr, norms_ptr, scale, HEADS, KEY_HEADS)),
            (loads, (rings, work, (q_desc, k_desc, v_desc, A_desc), AHEAD, HEADS, HEADS // KEY_HEADS)),
            (stores, (rings, work, out_desc)),
        ],
        [4, 4, 2, 1, 1],
        [STATE_REGISTERS, SCORE_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def run_inverting_roles(
    rings, work, descs, pointers, inputs, scale, STATE_STRIDES: gl.constexpr, KEY_HEADS: gl.constexpr,
    HEADS: gl.constexpr, PACKED: gl.constexpr, STATE_REGISTERS: gl.constexpr, OTHER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """As `run_roles`, but without a launch of `prep_kernel.py` before.  Requires that no segment has a first pass."""
    q_desc, k_desc, v_desc, out_desc = descs
    initial_ptr, final_ptr = pointers
    inversion = allocate_inversion(rings.inverses.SIZE)
    begin_inversion(inversion)
    role_barrier()
    SCORE_REGISTERS: gl.constexpr = 512 - 2 * STATE_REGISTERS - OTHER_REGISTERS
    gl.warp_specialize(
        [
            (states, (rings, work, initial_ptr, None, final_ptr, STATE_STRIDES, 0)),
            (states, (rings, work, initial_ptr, None, final_ptr, STATE_STRIDES, 1)),
            (scores_and_lower, (rings, inversion, work)),
            (inverses, (rings, inversion, work)),
            (copies, (rings, work, (q_desc, k_desc, v_desc), out_desc, HEADS // KEY_HEADS)),
            (gates_of_inputs, (rings, work, inputs, scale, PACKED)),
        ],
        [4, 4, 2, 1, 1],
        [STATE_REGISTERS, SCORE_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def as_tensors(strides):
    """Three strides as tensors; one of them may be a compile-time 1."""
    return gl.to_tensor(strides[0]), gl.to_tensor(strides[1]), gl.to_tensor(strides[2])


# Triton 3.6 does not compile warp_specialize with a constant 1 among its arguments.
@gluon.jit(do_not_specialize=["seqlen", "sequences", "slots", "K"])
def _hopper_kernel(
    q_desc, k_desc, v_desc, A_desc, out_desc, initial_ptr, cu_seqlens_ptr, entering_ptr, backs_ptr, final_ptr,
    decays_ptr, bounds_ptr, norms_ptr, g_ptr, beta_ptr, g_strides, beta_strides,
    STATE_STRIDES: gl.constexpr, cu_strides, scale, enough, seqlen, sequences, slots, K,
    KEY_HEADS: gl.constexpr, HEADS: gl.constexpr, STAYS: gl.constexpr, LEADS: gl.constexpr,
    KEY_RING: gl.constexpr, RING: gl.constexpr, STATE_REGISTERS: gl.constexpr, OTHER_REGISTERS: gl.constexpr,
):  # fmt: skip
    rings = allocate(k_desc.dtype, KEY_RING, RING)
    begin_barriers(rings, True)
    exists = True
    if STAYS:
        work = Wholes(
            gl.program_id(0), gl.num_programs(0), sequences * HEADS, seqlen, gl.cdiv(seqlen, CHUNK), HEADS
        )  # fmt: skip
    else:
        work, exists = segment_of(
            gl.program_id(0), seqlen, sequences, cu_seqlens_ptr, cu_strides[0], bounds_ptr, slots, K, enough,
            backs_ptr, HEADS, LEADS,
        )  # fmt: skip
    role_barrier()
    if not exists:
        pass
    elif A_desc is None:
        run_inverting_roles(
            rings, work, (q_desc, k_desc, v_desc, out_desc), (initial_ptr, final_ptr),
            (g_ptr, beta_ptr, as_tensors(g_strides), as_tensors(beta_strides)), scale, STATE_STRIDES, KEY_HEADS,
            HEADS, cu_seqlens_ptr is not None, STATE_REGISTERS, OTHER_REGISTERS,
        )  # fmt: skip
    else:
        run_roles(
            rings, work, (q_desc, k_desc, v_desc, A_desc, out_desc),
            (initial_ptr, entering_ptr, final_ptr, decays_ptr, norms_ptr), scale, STATE_STRIDES, KEY_HEADS, HEADS,
            STATE_REGISTERS, OTHER_REGISTERS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["rows", "limit", "least", "seqlen", "sequences", "slots", "K"])
def _parts_kernel(
    k_desc, v_desc, A_desc, cu_seqlens_ptr, parts_ptr, moves_ptr, backs_ptr,
    decays_ptr, bounds_ptr, norms_ptr,
    cu_strides, scale, enough, seqlen, sequences, slots, K, rows, limit, least,
    KEY_HEADS: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, MOST: gl.constexpr,
    KEY_RING: gl.constexpr, RING: gl.constexpr, STATE_REGISTERS: gl.constexpr, OTHER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Computes the parts of `parts.py` and backs (rows).  A program computes several parts."""
    rings = allocate(k_desc.dtype, KEY_RING, RING)
    begin_barriers(rings, False)
    work = parts_of(
        gl.program_id(0), gl.num_programs(0), rows, seqlen, sequences, cu_seqlens_ptr, cu_strides[0], bounds_ptr,
        slots, K, limit, least, enough, backs_ptr, HEADS, ROWS, PARTS, MOST,
    )  # fmt: skip
    if work.count > 0:
        gl.warp_specialize(
            [
                (part_states, (rings, work, parts_ptr, moves_ptr, 0)),
                (part_states, (rings, work, parts_ptr, moves_ptr, 1)),
                (part_gates, (rings, work, decays_ptr, norms_ptr, scale, HEADS, KEY_HEADS)),
                (part_loads, (rings, work, k_desc, v_desc, A_desc, HEADS, HEADS // KEY_HEADS)),
            ],
            [4, 2, 1],
            [STATE_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS],
        )  # fmt: skip
