"""The gated delta rule token by token, for decoding and short sequences.  All arithmetic is in
fp32.

recurrent      one launch, with the state in registers.  A call with a few tokens moves little more
               than the states.  T tokens take T dependent steps on any GPU, but the inputs of
               several tokens are loaded together.  Any T works; for long T, the chunked kernels are
               faster (`fused.py` has the limit)
unfused_step   one token in three launches: the written value, the state, the output.  It moves two
               states more.  If the call normalises q and k, two small launches do so first.  The
               six launches of `unfused` would be a slow baseline for one token, because they
               process chunks

    S     = exp(g_t) S
    S     = S + k_t (beta_t (v_t - S^T k_t))^T
    out_t = S^T (scale q_t)

Kimi Delta Attention is the same with g (B, T, HV, K): a decay for every row of S.

In:   q, k (B, T, H, K) | v (B, T, HV, V) | g, beta (B, T, HV)
      initial_state (sequences, HV, K, V), or, with state_indices (sequences), a pool (slots, HV, K,
      V) | cu_seqlens (sequences + 1); in place also accepted and write_indices
      (`kernels/inputs.py`)
Out:  out (B, T, HV, V), v's dtype
      final states (sequences, HV, K, V) fp32; or the states after every token (B * T, HV, K, V)
      fp32; or, in place, initial_state itself.  New states have V before K in memory if the call
      reads a pool that has V before K, or if `fused` asks for it
Grid: (sequences * HV * slices of V), slices fastest, then heads.
Oracle: `reference.py`, `gdn_recurrence`.  Source: Yang, Kautz and Hatamizadeh 2024
(arXiv:2412.06464), equation 10.
"""

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from ssdprof.kernels.device import INTERPRETED, refuse_device, refuse_gradient
from ssdprof.kernels.functions import (
    LOG2_E,
    decay_exp,
    decay_exp2,
    load_at,
    ptr_offset,
    sequence_bounds,
    slot_to_read,
    store_at,
    sum_of_products,
)
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput, state_strides
from ssdprof.kernels.gdn.unfused.stages import L2NORM_EPS, qk_l2norm
from ssdprof.kernels.inputs import PreparedLaunch
from ssdprof.kernels.launch import Launcher, kept, launch
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import (
    Implementation,
    Plan,
    UnsupportedError,
    keeps_every_state,
    register,
)
from ssdprof.kernels.stored_states import (
    NOT_STEPPING,
    Stepping,
    hashed_head,
    refuse_unwritable,
    stepped,
    stored_after,
    stored_state,
)
from ssdprof.kernels.tensors import strides_of, strides_of_each

_STEP = "unfused_step"
# most tokens that are loaded together: with eight, the additional registers cost more than the
# loads
MOST_TOKENS = 4
# From this many heads of all sequences on, a call that writes every state has wider programs.  On
# an H100, 16 sequences of 32 heads were faster with them, and one was slower.
MANY_HEADS = 512

# stages of functions: `stalls/attribute.py`
STAGES = {
    "_load_tokens": "recurrence",
    "_gdn_recurrent_kernel": "setup",
    "_gdn_step_write_kernel": "step_write",
    "_gdn_step_state_kernel": "step_state",
    "_gdn_step_output_kernel": "step_output",
}


def blocks_of(
    inputs: GDNInputs, *, wide: bool = False, stepping: Stepping = NOT_STEPPING
) -> dict[str, int]:
    """block_v: slice of V per program, a power of two.  block_t: tokens that are loaded together.
    num_warps: warps per program.

    For several tokens, a program has narrow slices and, for K up to 128, one warp, which sums over
    K without barriers.  For one token, and for packed sequences, slices are wider.
    On an H200 with K = V = 128, 64 sequences of four tokens take 79 us with slices of 16, and 128
    to 138 us with slices of 32; 64 sequences of one token take 71 and 68 us.  A thread has at
    most 64 numbers of the state in registers, or 128 if `wide`.  Apart from `wide`, the choice does
    not depend on the number of sequences, so that a sequence's result does not depend on it either.

    wide: for calls that write every state, in rows of 256 bytes, instead of 64 for several tokens
        and 128 for others.  On an H100, 64 sequences of eight tokens take 437 us instead of 497,
        but one sequence 21 us instead of 12.
    stepping: in a simulation of stored states, a program has a whole state if a head has one scale,
        or if Triton's interpreter runs it.  If states are rounded, tokens are loaded one by one,
        because roundings of four would spill.
    """
    # the host does not know packed lengths
    tokens = inputs.length if inputs.cu_seqlens is None else 1
    block_v, numbers_per_thread = 32, 32
    if wide:
        block_v, numbers_per_thread = 64, 128
    elif tokens > 1:
        block_v, numbers_per_thread = 16, 64
    value_dim = triton.next_power_of_2(inputs.v.shape[3])
    block_v = value_dim if stepping.whole_state else min(block_v, value_dim)
    numbers = triton.next_power_of_2(inputs.q.shape[3]) * block_v
    loads = triton.cdiv(tokens, 1 if stepping.rounds else MOST_TOKENS)
    # 32 is the most that a GPU allows; for one token, a whole state with K = V = 256 would have 64
    num_warps = min(max(1, numbers // (numbers_per_thread * 32)), 32)
    return {"block_v": block_v, "block_t": triton.cdiv(tokens, loads), "num_warps": num_warps}


@triton.jit
def _inverse_norm(x, NORM: tl.constexpr):
    """The factor that normalises x (K); 1 without NORM."""
    return tl.rsqrt(sum_of_products(x * x, 0) + L2NORM_EPS) if NORM else 1.0


@triton.jit
def _state_offsets(o_k, o_v, STRIDES: tl.constexpr):
    """Offsets of a tile (K, V) of a state.  STRIDES: along K and V"""
    return o_k.to(tl.int64)[:, None] * STRIDES[0] + o_v.to(tl.int64)[None, :] * STRIDES[1]


@triton.jit
def _load_tokens(pointers, token_strides, first, length, m_k, m_v, S: tl.constexpr):
    """q, k, v, g and beta of BLOCK_T tokens from `first` on: a tuple of each, with zeros past the
    sequence's end.

    All loads are issued before any of their results is used, so that the program waits only once.

    token_strides: between tokens, of each pointer.  m_k, m_v: masks of K and V
    """
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr = pointers
    qs, ks, vs, gs, betas = (), (), (), (), ()
    for i in tl.static_range(S.BLOCK_T):
        here = first + i < length
        position = tl.cast(first + i, tl.int64)
        m_row = tl.where(here, m_k, False)  # the interpreter makes int32 of m_k & here
        qs = qs + (tl.load(q_ptr + position * token_strides[0], mask=m_row, other=0.0),)
        ks = ks + (tl.load(k_ptr + position * token_strides[1], mask=m_row, other=0.0),)
        m_value = tl.where(here, m_v, False)
        vs = vs + (tl.load(v_ptr + position * token_strides[2], mask=m_value, other=0.0),)
        m_gate = m_row if S.PER_CHANNEL else here
        gs = gs + (tl.load(g_ptr + position * token_strides[3], mask=m_gate, other=0.0),)
        betas = betas + (tl.load(beta_ptr + position * token_strides[4], mask=here, other=0.0),)
    return qs, ks, vs, gs, betas


@triton.jit(do_not_specialize=["seqlen", "seed"])
def _gdn_recurrent_kernel(tensors, strides, seqlen, scale, seed, S: tl.constexpr):
    """One slice of V of one head of one sequence of `gdn_recurrent`, token after token, with the
    state (K, V) in registers.

    FORMAT: in a simulation of stored states (`stored_states.py`), their format; the table of slots
        then begins with a column for the initial state.  None: states are not rounded
    """
    (
        q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, initial_state_ptr, cu_seqlens_ptr, slots_ptr,
        accepted_ptr, writes_ptr, out_ptr, states_ptr,
    ) = tensors  # fmt: skip
    (
        q_strides, k_strides, v_strides, g_strides, beta_strides, initial_state_strides,
        cu_seqlens_strides, slots_strides, accepted_strides, writes_strides, out_strides,
        states_strides,
    ) = strides  # fmt: skip
    # stage setup: the program's sequence, head and slice, and where its tensors lie
    sequence, i_h, o_k, o_v, m_k, m_v = _slice_of_program(S)
    i_b, begin, length = sequence, tl.zeros((), tl.int64), seqlen
    if cu_seqlens_ptr is not None:
        begin, length = sequence_bounds(sequence, cu_seqlens_ptr, cu_seqlens_strides[0])
        i_b = 0
    m_state = m_k[:, None] & m_v[None, :]
    i_k = i_h // S.VALUES_PER_KEY
    q_ptr += ptr_offset((i_b, begin, i_k), q_strides[:3]) + o_k.to(tl.int64) * q_strides[3]
    k_ptr += ptr_offset((i_b, begin, i_k), k_strides[:3]) + o_k.to(tl.int64) * k_strides[3]
    v_ptr += ptr_offset((i_b, begin, i_h), v_strides[:3]) + o_v.to(tl.int64) * v_strides[3]
    out_ptr += ptr_offset((i_b, begin, i_h), out_strides[:3]) + o_v.to(tl.int64) * out_strides[3]
    g_ptr += ptr_offset((i_b, begin, i_h), g_strides[:3])
    beta_ptr += ptr_offset((i_b, begin, i_h), beta_strides)
    if S.PER_CHANNEL:
        g_ptr += o_k.to(tl.int64) * g_strides[3]

    o_states = _state_offsets(o_k, o_v, S.STATES_STRIDES)

    # stage setup.load: the state with which the sequence begins, and where its final state goes
    # row of the final state in `states`, which is a slot if that is a pool, and its mask
    row, m_final = sequence, m_state
    if initial_state_ptr is None:
        # reads nothing, and gives zeros the layout of states that are loaded: so all sums over K
        # have one order
        state = tl.load(states_ptr + o_states, mask=tl.where(length < 0, m_state, False), other=0.0)
    else:
        slot, m_read = sequence, m_state
        if slots_ptr is not None:
            slot = slot_to_read(sequence, slots_ptr, slots_strides, accepted_ptr, accepted_strides)
            if S.IN_PLACE:
                m_read = tl.where(slot >= 0, m_state, False)
        initial_state_ptr += ptr_offset((slot, i_h), initial_state_strides[:2])
        offset = _state_offsets(o_k, o_v, S.INITIAL_STRIDES)
        state = tl.load(initial_state_ptr + offset, mask=m_read, other=0.0).to(tl.float32)
        if S.IN_PLACE and slots_ptr is not None:
            row = slot
            if writes_ptr is not None:
                writes_ptr += tl.cast(sequence, tl.int64) * writes_strides[0]
                row = tl.load(writes_ptr)
            m_final = tl.where((row >= 0) & (length > 0), m_state, False)
    if S.FORMAT is not None:
        # round the initial state: step 0, rows along axis 0; store it in the first column's slot
        key, elements = hashed_head(seed, sequence, i_h), o_k[:, None] * S.VALUE_DIM + o_v[None, :]
        state = stored_state(state, key, 0, elements, 0, S.FORMAT)
        p_initial = states_ptr + ptr_offset((row, i_h), states_strides[:2]) + o_states
        tl.store(p_initial, state, mask=m_state)
        writes_ptr += writes_strides[1]

    # stage recurrence: BLOCK_T tokens are loaded, and then processed one by one
    token_strides = (q_strides[1], k_strides[1], v_strides[1], g_strides[1], beta_strides[1])
    for first in range(0, length, S.BLOCK_T):
        qs, ks, vs, gs, betas = _load_tokens(
            (q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr), token_strides, first, length, m_k, m_v, S
        )
        for i in tl.static_range(S.BLOCK_T):
            q, k, v = qs[i].to(tl.float32), ks[i].to(tl.float32), vs[i].to(tl.float32)
            decay = decay_exp(gs[i].to(tl.float32))
            k_factor = _inverse_norm(k, S.L2NORM)
            if S.PER_CHANNEL:  # each row of the state has its decay: apply it here, and 1 below
                state = state * decay[:, None]
                decay = 1.0
            read = sum_of_products(state * k[:, None], 0)
            # the corrected value, times the norm's factor of the key with which it is written
            u = betas[i].to(tl.float32) * k_factor * (v - decay * k_factor * read)
            state = tl.fma(state, decay, k[:, None] * u[None, :])
            out = scale * _inverse_norm(q, S.L2NORM) * sum_of_products(state * q[:, None], 0)
            here = first + i < length
            position = tl.cast(first + i, tl.int64)
            tl.store(
                out_ptr + position * out_strides[1],
                out.to(out_ptr.dtype.element_ty),
                mask=tl.where(here, m_v, False),
            )
            if S.EVERY_STATE:
                p_states = states_ptr + ptr_offset((i_b, begin + position, i_h), states_strides[:3])
                tl.store(p_states + o_states, state, mask=tl.where(here, m_state, False))
            if S.FORMAT is not None:
                state = stored_after(state, first + i + 1, length, key, elements, 0, S)
            if len(writes_strides) == 2:  # the table of slots has a column for each token
                new_slot = tl.load(writes_ptr + position * writes_strides[1], mask=here, other=-1)
                p_states = states_ptr + ptr_offset((new_slot, i_h), states_strides[:2]) + o_states
                stored = state.to(states_ptr.dtype.element_ty)
                tl.store(p_states, stored, mask=tl.where(new_slot >= 0, m_state, False))

    # stage setup.store: the final state, unless every state has been stored
    if not S.EVERY_STATE and len(writes_strides) != 2:
        states_ptr += ptr_offset((row, i_h), states_strides[:2])
        tl.store(states_ptr + o_states, state.to(states_ptr.dtype.element_ty), mask=m_final)


def recurrent_launch(
    inputs: GDNInputs,
    blocks: dict[str, int],
    *,
    in_place: bool = False,
    state_v_first: bool = False,
    stepping: Stepping = NOT_STEPPING,
) -> PreparedLaunch:
    """The launch of a call, for all inputs of one signature.

    blocks: see `blocks_of`.  in_place: see `gdn_recurrent`.
    state_v_first: new final states are (sequences, HV, V, K) in memory; they also are if the call
        reads a pool with V before K.
    stepping: how a simulation of stored states rounds them (`stored_states.py`)
    """
    initial_strides = strides_of(inputs.initial_state)
    v_first = state_v_first or (inputs.state_indices is not None and initial_strides[-2] == 1)
    index = inputs.q.get_device()
    new_strides = state_strides(*inputs.states_shape[1:], v_first=v_first)
    slices = triton.cdiv(inputs.v.shape[3], blocks["block_v"])
    programs = inputs.sequences * inputs.v.shape[2] * slices
    new_out = torch.empty(inputs.v.shape, device="meta")  # for its strides
    states_strides = initial_strides if in_place else new_strides
    if inputs.state_every:  # (B, T, HV, K, V)
        states_strides = (inputs.length * new_strides[0], *new_strides)
    launcher = Launcher(
        _gdn_recurrent_kernel,
        (
            (*map(strides_of, (*inputs.kernel_tensors, new_out)), states_strides),
            inputs.length,
            inputs.scale_or_default,
            stepping.seed,
        ),
        dict(
            VALUE_HEADS=inputs.v.shape[2],
            VALUES_PER_KEY=inputs.values_per_key,
            KEY_DIM=inputs.q.shape[3],
            VALUE_DIM=inputs.v.shape[3],
            BLOCK_K=triton.next_power_of_2(inputs.q.shape[3]),
            BLOCK_V=blocks["block_v"],
            BLOCK_T=blocks["block_t"],
            INITIAL_STRIDES=initial_strides[-2:],
            STATES_STRIDES=states_strides[-2:],
            PER_CHANNEL=inputs.g.ndim == 4,
            EVERY_STATE=bool(inputs.state_every),
            IN_PLACE=in_place,
            L2NORM=bool(inputs.use_qk_l2norm),
            FORMAT=stepping.constants,
            STEP=stepping.step,
            num_warps=blocks["num_warps"],
        ),
    )

    def call(call_inputs: GDNInputs) -> GDNOutput:
        """Allocate the outputs and launch."""
        with torch.cuda.device(index):  # no effect for -1, the CPU
            out = torch.empty_like(
                call_inputs.v, dtype=stepping.out_dtype, memory_format=torch.contiguous_format
            )
            states = call_inputs.initial_state
            if not in_place or states is None:
                states = torch.empty_strided(
                    call_inputs.final_shape,
                    new_strides,
                    dtype=torch.float32,
                    device=call_inputs.q.device,
                )
            launcher(programs, *call_inputs.kernel_tensors, out, states)
        return GDNOutput(out, states)

    return call


_launches: dict[Hashable, PreparedLaunch] = {}


def gdn_recurrent(
    inputs: GDNInputs,
    _precision: Precision = Precision(),  # noqa: B008
    *,
    in_place: bool = False,
    batch_invariant: bool = False,
) -> GDNOutput:
    """Output in v's dtype, final states in fp32, whatever the precision; if inputs.state_every is
    1, the states after every token instead of the final ones.  The call takes T dependent steps,
    and so is meant for short T.

    in_place: the final states overwrite inputs.initial_state, in its dtype, and the call returns
        that tensor.  For a pool, `kernels/inputs.py` says which slots are read and written.
    batch_invariant: matters only if inputs.state_every is 1.  Without it, a call in which all
        sequences together have at least MANY_HEADS heads has other programs, whose results may
        differ in the last bits.

    Raises ValueError for inputs that do not fit together, if in_place has no initial_state to write
    to, an expanded one, or inputs.state_every, and if a call that is not in place has write_indices
    or accepted; UnsupportedError for a larger state_every, inputs that require a gradient, and a
    device on which the kernel does not run.
    """
    refuse_gradient("recurrent", vars(inputs).values())
    wide = _is_wide(inputs) and not batch_invariant
    key = inputs.signature, in_place, wide
    return kept(_launches, key, _prepare, inputs, in_place, wide)(inputs)


def _is_wide(inputs: GDNInputs) -> bool:
    """Whether a call that is not batch invariant has the wide programs of `blocks_of`."""
    return inputs.state_every == 1 and inputs.sequences * inputs.v.shape[2] >= MANY_HEADS


def _prepare_steps(inputs: GDNInputs, stepping: Stepping) -> PreparedLaunch:
    """The launch of a simulation of stored states (`stored_states.py`)."""
    refuse_device("recurrent", inputs.q)
    blocks = blocks_of(inputs, stepping=stepping)
    return recurrent_launch(inputs, blocks, in_place=True, stepping=stepping)


def _prepare(inputs: GDNInputs, in_place: bool, wide: bool) -> PreparedLaunch:
    """The launch of `gdn_recurrent`, which keeps it, after all checks."""
    inputs.check()
    refuse_unwritable(inputs, in_place=in_place)
    refuse_device("recurrent", inputs.q)
    return recurrent_launch(inputs, blocks_of(inputs, wide=wide), in_place=in_place)


@triton.jit
def _slice_of_program(S: tl.constexpr):
    """The program's sequence and head, its rows (K) and columns (V) of the state, and their masks.

    Grid of all kernels in this file: (sequences * HV * slices of V), slices fastest, then heads.
    """
    SLICES: tl.constexpr = (S.VALUE_DIM + S.BLOCK_V - 1) // S.BLOCK_V
    unit = tl.program_id(0) % (S.VALUE_HEADS * SLICES)
    i_b, i_h = tl.program_id(0) // (S.VALUE_HEADS * SLICES), unit // SLICES
    o_k, o_v = tl.arange(0, S.BLOCK_K), (unit % SLICES) * S.BLOCK_V + tl.arange(0, S.BLOCK_V)
    return i_b, i_h, o_k, o_v, o_k < S.KEY_DIM, o_v < S.VALUE_DIM


# --- a step in three launches


@triton.jit
def _gdn_step_write_kernel(tensors, strides, S: tl.constexpr):
    """The value that the token writes, u = beta (v - (exp(g) S)^T k): (B, 1, HV, V) fp32."""
    k_ptr, v_ptr, g_ptr, beta_ptr, initial_state_ptr, u_ptr = tensors
    k_strides, v_strides, g_strides, beta_strides, initial_state_strides, u_strides = strides
    i_b, i_h, o_k, o_v, m_k, m_v = _slice_of_program(S)
    u = load_at(v_ptr, v_strides, (i_b, 0, i_h, o_v), m_v).to(tl.float32)
    if initial_state_ptr is not None:
        index = (i_b, i_h, o_k[:, None], o_v[None, :])
        m_state = m_k[:, None] & m_v[None, :]
        state = load_at(initial_state_ptr, initial_state_strides, index, m_state).to(tl.float32)
        k = load_at(k_ptr, k_strides, (i_b, 0, i_h // S.VALUES_PER_KEY, o_k), m_k)
        if S.PER_CHANNEL:
            g = load_at(g_ptr, g_strides, (i_b, 0, i_h, o_k), m_k).to(tl.float32)
            u -= tl.sum(state * (decay_exp2(g * LOG2_E) * k.to(tl.float32))[:, None], axis=0)
        else:
            g = load_at(g_ptr, g_strides, (i_b, 0, i_h)).to(tl.float32)
            u -= decay_exp2(g * LOG2_E) * tl.sum(state * k.to(tl.float32)[:, None], axis=0)
    u *= load_at(beta_ptr, beta_strides, (i_b, 0, i_h)).to(tl.float32)
    store_at(u_ptr, u_strides, (i_b, 0, i_h, o_v), u, m_v)


@triton.jit
def _gdn_step_state_kernel(tensors, strides, S: tl.constexpr):
    """The state after the token, S = exp(g) S + k u^T: (B, HV, K, V) fp32."""
    k_ptr, u_ptr, g_ptr, initial_state_ptr, final_states_ptr = tensors
    k_strides, u_strides, g_strides, initial_state_strides, final_states_strides = strides
    i_b, i_h, o_k, o_v, m_k, m_v = _slice_of_program(S)
    m_state = m_k[:, None] & m_v[None, :]
    index = (i_b, i_h, o_k[:, None], o_v[None, :])

    k = load_at(k_ptr, k_strides, (i_b, 0, i_h // S.VALUES_PER_KEY, o_k), m_k).to(tl.float32)
    u = load_at(u_ptr, u_strides, (i_b, 0, i_h, o_v), m_v)
    state = k[:, None] * u[None, :]
    if initial_state_ptr is not None:
        initial = load_at(initial_state_ptr, initial_state_strides, index, m_state)
        if S.PER_CHANNEL:
            g = load_at(g_ptr, g_strides, (i_b, 0, i_h, o_k), m_k).to(tl.float32)
            state += initial.to(tl.float32) * decay_exp2(g * LOG2_E)[:, None]
        else:
            g = load_at(g_ptr, g_strides, (i_b, 0, i_h)).to(tl.float32)
            state += initial.to(tl.float32) * decay_exp2(g * LOG2_E)
    store_at(final_states_ptr, final_states_strides, index, state, m_state)


@triton.jit
def _gdn_step_output_kernel(tensors, strides, scale, S: tl.constexpr):
    """The output, read from the state after the token, out = S^T (scale q): (B, 1, HV, V), v's
    dtype.
    """
    states_ptr, q_ptr, out_ptr = tensors
    states_strides, q_strides, out_strides = strides
    i_b, i_h, o_k, o_v, m_k, m_v = _slice_of_program(S)
    index = (i_b, i_h, o_k[:, None], o_v[None, :])
    state = load_at(states_ptr, states_strides, index, m_k[:, None] & m_v[None, :])
    q = load_at(q_ptr, q_strides, (i_b, 0, i_h // S.VALUES_PER_KEY, o_k), m_k).to(tl.float32)
    out = tl.sum(state * (q * scale)[:, None], axis=0)
    store_at(out_ptr, out_strides, (i_b, 0, i_h, o_v), out, m_v)


def three_stages(inputs: GDNInputs) -> GDNOutput:
    """One token of each sequence in three launches, after two that normalise q and k if the call
    asks for it.  Without checks.
    """
    config = _step_config(inputs)
    batch, heads, key_dim, value_dim = inputs.states_shape

    def step(kernel: Any, *tensors: torch.Tensor | None, scalars: tuple[float, ...] = ()) -> None:
        """One of the three launches, on these tensors.  scalars: the kernel's arguments after the
        strides.
        """
        launch(
            kernel,
            batch * heads * triton.cdiv(value_dim, config["block_v"]),
            tensors,
            (strides_of_each(*tensors), *scalars),
            VALUE_HEADS=heads,
            VALUES_PER_KEY=inputs.values_per_key,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            BLOCK_K=triton.next_power_of_2(key_dim),
            BLOCK_V=config["block_v"],
            num_warps=config["num_warps"],
            PER_CHANNEL=inputs.g.ndim == 4,
        )

    q, k, v, g, initial = inputs.q, inputs.k, inputs.v, inputs.g, inputs.initial_state
    with torch.cuda.device(q.get_device()):  # no effect for -1, the CPU
        if inputs.use_qk_l2norm:
            q, k = (qk_l2norm(tensor, dtype=torch.float32) for tensor in (q, k))
        u = torch.empty(v.shape, dtype=torch.float32, device=k.device)
        step(_gdn_step_write_kernel, k, v, g, inputs.beta, initial, u)
        final_states = torch.empty(inputs.states_shape, dtype=torch.float32, device=k.device)
        step(_gdn_step_state_kernel, k, u, g, initial, final_states)
        out = torch.empty(v.shape, dtype=v.dtype, device=q.device)
        step(_gdn_step_output_kernel, final_states, q, out, scalars=(inputs.scale_or_default,))
        return GDNOutput(out, final_states)


def _step_config(inputs: GDNInputs) -> dict[str, int]:
    """block_v: slice of V per program.  num_warps: warps per program, at least two, so that a
    thread has at most 64 numbers of the state.
    """
    block_v = min(32, triton.next_power_of_2(inputs.v.shape[3]))
    numbers = triton.next_power_of_2(inputs.q.shape[3]) * block_v
    return {"block_v": block_v, "num_warps": max(2, numbers // (64 * 32))}


# --- the implementations, for GDN and for Kimi Delta Attention


def _run_step(inputs: GDNInputs, _precision: Precision) -> GDNOutput:
    """`Implementation.run` of `unfused_step`: in fp32 at every precision."""
    _refuse_all_but_steps(inputs)
    refuse_gradient(_STEP, vars(inputs).values())
    return three_stages(inputs)


def _refuse_all_but_steps(inputs: GDNInputs) -> None:
    """Raises UnsupportedError unless each sequence is a row of the batch and has one token, on a
    device that the kernels run on.
    """
    if inputs.q.shape[1] != 1 or inputs.cu_seqlens is not None:
        raise UnsupportedError(f"{_STEP}: one token of each sequence, side by side")
    refuse_device(_STEP, inputs.q)


def _plan_step(inputs: GDNInputs, precision: Precision) -> Plan:
    """The plan of `three_stages`.  The workspace, in fp32, holds u, and q and k if they are
    normalised.
    """
    _refuse_all_but_steps(inputs)
    launches = 3
    workspace_numbers = inputs.v.numel()
    if inputs.use_qk_l2norm:  # two launches normalise q and k first
        launches += 2
        workspace_numbers += inputs.q.numel() + inputs.k.numel()
    reason = "what is written, the state and the output in a launch each; fp32 throughout"
    return Plan(
        variant="interpreter" if INTERPRETED else "portable",
        launches=launches,
        config=_step_config(inputs),
        workspace_bytes=4 * workspace_numbers,
        reason=reason + precision.equals_exact_text,
    )


def _plan(inputs: GDNInputs, precision: Precision) -> Plan:
    """The plan of `gdn_recurrent` without options."""
    refuse_device("recurrent", inputs.q)
    return Plan(
        variant="interpreter" if INTERPRETED else "portable",
        launches=1,
        config=blocks_of(inputs, wide=_is_wide(inputs)),
        reason="one launch, token by token; fp32 throughout" + precision.equals_exact_text,
    )


for _operator in ("gdn", "kda"):
    register(Implementation(operator=_operator, name=_STEP, run=_run_step, plan=_plan_step))
    register(
        Implementation(
            operator=_operator,
            name="recurrent",
            run=gdn_recurrent,
            plan=_plan,
            keeps=keeps_every_state,
            pools=True,
            in_place=partial(gdn_recurrent, in_place=True),
            stepped=partial(stepped, _prepare_steps),
            batch_invariant=True,
        )
    )
