"""The gated delta rule for Hopper, after the launch of `prep_kernel.py`, with warp roles, TMA
copies and states in registers.

A program owns a segment of a sequence and one value head, or whole sequences one after the other
(`assignment.py`).  If the segment does not begin its sequence, a first pass over the chunks that
precede the segment computes the state that enters it.  For a head that forgets slowly, two earlier
launches, of `_parts_kernel` below and of `_combine_kernel`, compute that state instead
(`parts.py`).  No program waits for another.  The warps of a program have roles (`rings.py`):
`states` updates the state chunk by chunk, and `scores` computes X and W of a chunk from its inverse
(`role_scores.py`).

Inputs, outputs and grid of `_hopper_kernel`:

In:   q, k (b, l, h, K) | v (b, l, hv, V) | initial_state (sequences, hv, K, V)
      cu_seqlens (sequences + 1)
      from `prep_kernel.py`: inverse, decays, bounds, norms
      from `parts.py`, if segments have parts: warmup_lengths, entering
Out:  out (b, l, hv, V), v's dtype | final_states (sequences, hv, K, V) fp32, any strides
Grid: (segments * sequences * hv), heads fastest, then sequences, then segments; or at most one
      program per SM, which processes several whole sequences
Oracle: `reference.py`.  Source: Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464), section 3.3.
docs/gdn-mathematics.md, section 4, derives this form of the products, and docs/kernels.md has the
reasons for it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssdprof.kernels._gluon import aggregate, role_barrier
from ssdprof.kernels.gdn.hopper.assignment import GDNSegment, Persistent, segment_of
from ssdprof.kernels.gdn.hopper.parts import Parts, part_gates, part_loads, part_states, parts_of
from ssdprof.kernels.gdn.hopper.rings import Rings, allocate, begin_barriers
from ssdprof.kernels.gdn.hopper.role_copies import loads, stores
from ssdprof.kernels.gdn.hopper.role_gates import gates
from ssdprof.kernels.gdn.hopper.role_scores import scores
from ssdprof.kernels.gdn.hopper.role_states import states
from ssdprof.kernels.hopper.ring import CHUNK

# stages of functions: `stalls/attribute.py`
STAGES = {"_hopper_kernel": "setup", "_parts_kernel": "setup"}


@aggregate
class GDNEnv:
    """All that the roles of `_hopper_kernel`, or of `_parts_kernel`, share."""

    rings: Rings
    work: GDNSegment | Persistent | Parts
    initial_ptr: gl.tensor | gl.constexpr
    entering_ptr: gl.tensor | gl.constexpr
    destinations: gl.tuple  # the pointer to final states; or those to N and M of parts
    decays_ptr: gl.tensor
    norms_ptr: gl.tensor | gl.constexpr
    scale: gl.tensor
    descs: gl.tuple  # of q, k, v, the inverse, out; of k, v and the inverse for parts
    S: gl.constexpr  # compile-time arguments


# Triton 3.6 does not compile warp_specialize with a constant 1 among its arguments, so integers are
# not specialised.
INTEGERS = ["seqlen", "sequences", "slots", "segment_chunks"]


@gluon.jit(do_not_specialize=INTEGERS)
def _hopper_kernel(
    q_desc, k_desc, v_desc, A_desc, out_desc, tensors, cu_strides, scale, truncation_log2, seqlen,
    sequences, slots, segment_chunks, S: gl.constexpr,
):  # fmt: skip
    """Compute outputs and final states of a segment, or of whole sequences if PERSISTENT: five
    roles, of which `states` has two lanes, pass tiles through rings in shared memory (`rings.py`).

    descriptors: of q, k and v, of the inverses (A) and of the output
    cu_strides: of cu_seqlens.  truncation_log2: see `segment_of`.  seqlen: positions of a row
    sequences, slots, segment_chunks: numbers of sequences, slots of chunks, chunks of a segment
    """
    (
        initial_ptr, cu_seqlens_ptr, entering_ptr, warmup_lengths_ptr, final_ptr, decays_ptr,
        bounds_ptr, norms_ptr,
    ) = tensors  # fmt: skip
    # An SM has 512 registers for each of 128 threads.  Four groups of 128 threads share them: two
    # are the lanes of `states`, one is `scores`, and one has the other roles.
    STATES: gl.constexpr = S.STATE_REGISTERS
    OTHERS: gl.constexpr = S.OTHER_REGISTERS
    SCORES: gl.constexpr = 512 - 2 * STATES - OTHERS
    rings = allocate(k_desc.dtype, S.DEPTH)
    begin_barriers(rings, True)
    # the program's segments
    exists = True
    if S.PERSISTENT:
        pairs = sequences * S.HEADS
        work = Persistent(
            gl.program_id(0), gl.num_programs(0), pairs, seqlen, gl.cdiv(seqlen, CHUNK), S.HEADS
        )
    else:
        work, exists = segment_of(
            (seqlen, cu_seqlens_ptr, cu_strides[0]), sequences, (bounds_ptr, slots),
            segment_chunks, truncation_log2, warmup_lengths_ptr, S,
        )  # fmt: skip
    role_barrier()  # threads read sums from memory that warp_specialize overwrites next
    if exists:
        env = GDNEnv(
            rings,
            work,
            initial_ptr,
            entering_ptr,
            (final_ptr,),
            decays_ptr,
            norms_ptr,
            scale,
            (q_desc, k_desc, v_desc, A_desc, out_desc),
            S,
        )
        gl.warp_specialize(
            [
                (states, (env, 0)),
                (states, (env, 1)),
                (scores, (env,)),
                (gates, (env,)),
                (loads, (env,)),
                (stores, (env,)),
            ],
            [4, 4, 2, 1, 1],
            [STATES, SCORES, OTHERS, OTHERS, OTHERS],
        )


@gluon.jit(do_not_specialize=[*INTEGERS, "rows", "longest_first_pass", "least_first_pass"])
def _parts_kernel(
    k_desc, v_desc, A_desc, tensors, cu_strides, scale, truncation_log2, seqlen, sequences, slots,
    segment_chunks, rows, longest_first_pass, least_first_pass, S: gl.constexpr,
):  # fmt: skip
    """Compute the parts of segments, and the lengths of first passes (rows): see `parts.py`.  A
    program may compute several parts, or none.

    rows: number of rows, as `parts.py` defines them.  longest_first_pass, least_first_pass: see
    `first_passes`.  Others: see `_hopper_kernel`
    """
    (
        cu_seqlens_ptr,
        finals_ptr,
        transitions_ptr,
        warmup_lengths_ptr,
        decays_ptr,
        bounds_ptr,
        norms_ptr,
    ) = tensors
    rings = allocate(k_desc.dtype, S.DEPTH)
    begin_barriers(rings, False)
    work = parts_of(
        rows, (seqlen, cu_seqlens_ptr, cu_strides[0]), sequences, (bounds_ptr, slots),
        segment_chunks, (longest_first_pass, least_first_pass), truncation_log2,
        warmup_lengths_ptr, S,
    )  # fmt: skip
    if work.count > 0:
        env = GDNEnv(
            rings,
            work,
            None,  # no initial state
            None,  # no entering states
            (finals_ptr, transitions_ptr),
            decays_ptr,
            norms_ptr,
            scale,
            (k_desc, v_desc, A_desc),
            S,
        )
        gl.warp_specialize(
            [
                (part_states, (env, 0)),
                (part_states, (env, 1)),
                (part_gates, (env,)),
                (part_loads, (env,)),
            ],
            [4, 2, 1],
            [S.STATE_REGISTERS, S.OTHER_REGISTERS, S.OTHER_REGISTERS],
        )
