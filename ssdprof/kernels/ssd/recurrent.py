"""SSD position by position, with the state in registers, for decoding and short sequences; all
arithmetic in fp32.

recurrent            one launch.  A call with one position moves little more than the states.  With
                     l positions it takes l dependent steps; from a few dozen positions on, the
                     chunked kernels are faster
recurrent_in_place   `recurrent` in place, on a copy of the states that the call makes.  A bench
                     times it only by request
unfused_step         one position in two launches: the first writes the state, the second reads it
                     for the output, so that one state more is moved.  It is the baseline for one
                     token, for which the five launches of `unfused`, which process chunks, would be
                     a slow one

In:   x, z (b, l, h, p) | dt (b, l, h) | A, dt_bias (h) | B, C (b, l, g, n) | D (h) or (h, p)
      initial_states (sequences, h, p, n), or, with state_indices, a pool (slots, h, p, n); the
      tensors of a pool are those of `Inputs` | cu_seqlens (sequences + 1)
Out:  out (b, l, h, p), x's dtype; fp32 if states are rounded to a format
      final_states (sequences, h, p, n) fp32; or, with state_every = 1, the states after every
      position (b * l, h, p, n) fp32; or, in place, initial_states itself
Grid: (sequences * h * slices of p), slices fastest, then heads.
Oracle: `reference.py`.  Source: Dao and Gu 2024 (arXiv:2405.21060), equation 2.
"""

from collections.abc import Hashable
from dataclasses import replace
from functools import partial

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
    softplus,
    store_at,
    sum_of_products,
)
from ssdprof.kernels.inputs import PreparedLaunch
from ssdprof.kernels.launch import Launcher, kept, launch
from ssdprof.kernels.oracle import initial_states
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import (
    Implementation,
    Plan,
    UnsupportedError,
    keeps_every_state,
    register,
)
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.launch import prepared
from ssdprof.kernels.stored_states import (
    NOT_STEPPING,
    Stepping,
    hashed_head,
    refuse_unwritable,
    stepped,
    stored_after,
    stored_state,
)
from ssdprof.kernels.tensors import strides_of_each

MAX_DSTATE = 256
_STEP, _ON_COPY = "unfused_step", "recurrent_in_place"

# stages of functions: `stalls/attribute.py`
STAGES = {
    "_ssd_recurrent_kernel": "setup",
    "_ssd_step_state_kernel": "step_state",
    "_ssd_step_output_kernel": "step_output",
}


def blocks_of(inputs: SSDInputs, *, whole_state: bool = False) -> dict[str, int]:
    """The configuration of all kernels of this file.  block_p: slice of P per program, a power of
    two.  num_warps: warps per program.

    whole_state: a program has all of P (`Stepping.whole_state`); a thread then has at most 64
        numbers of the state
    """
    whole_p = int(triton.next_power_of_2(inputs.x.shape[3]))
    if whole_state:
        numbers = whole_p * int(triton.next_power_of_2(inputs.B.shape[3]))
        return {"block_p": whole_p, "num_warps": max(2, numbers // (64 * 32))}
    return {"block_p": min(16, whole_p), "num_warps": 2}


def _settings(inputs: SSDInputs, *, whole_state: bool = False) -> tuple[int, dict[str, object]]:
    """The number of programs, which is the same for each kernel of this file, and the compile-time
    arguments and launch options that all of them have.
    """
    heads, headdim = inputs.x.shape[2:]
    dstate = inputs.B.shape[3]
    blocks = blocks_of(inputs, whole_state=whole_state)
    return inputs.sequences * heads * triton.cdiv(headdim, blocks["block_p"]), dict(
        HEADS=heads,
        HEADS_PER_GROUP=inputs.heads_per_group,
        HEADDIM=headdim,
        DSTATE=dstate,
        BLOCK_P=blocks["block_p"],
        BLOCK_N=triton.next_power_of_2(dstate),
        DT_SOFTPLUS=bool(inputs.dt_softplus),
        num_warps=blocks["num_warps"],
    )


@triton.jit
def _slice_of_program(S: tl.constexpr):
    """The program's sequence and head, its rows (p) and columns (n) of the state, and the masks of
    these rows and columns.
    """
    SLICES: tl.constexpr = (S.HEADDIM + S.BLOCK_P - 1) // S.BLOCK_P
    unit = tl.program_id(0) % (S.HEADS * SLICES)
    sequence, i_h = tl.program_id(0) // (S.HEADS * SLICES), unit // SLICES
    o_p, o_n = (unit % SLICES) * S.BLOCK_P + tl.arange(0, S.BLOCK_P), tl.arange(0, S.BLOCK_N)
    return sequence, i_h, o_p, o_n, o_p < S.HEADDIM, o_n < S.DSTATE


# Compile-time arguments in S, besides sizes and DT_SOFTPLUS:
#
# EVERY_STATE: final_states gets the state after each position.
# IN_PLACE: final_states is initial_states, a pool if there are `slots`, which are `state_indices`.
#     `writes` are `write_indices`: a slot for each sequence, or a table with a column for each
#     position.
# FORMAT: states are rounded to it after every STEP positions (`stored_states.py`); None: they are
#     not.  With it, the table has one column more, the first one, for the initial state.
@triton.jit(do_not_specialize=["seqlen", "seed"])
def _ssd_recurrent_kernel(tensors, strides, seqlen, dt_low, dt_high, seed, S: tl.constexpr):
    """One slice of P of one head of one sequence of `ssd_recurrent`, position after position, with
    the state (p, n) in registers.  seed: of stochastic rounding
    """
    (
        x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, initial_states_ptr,
        cu_seqlens_ptr, slots_ptr, accepted_ptr, writes_ptr, out_ptr, final_states_ptr,
    ) = tensors  # fmt: skip
    (
        x_strides, dt_strides, A_strides, B_strides, C_strides, D_strides, z_strides,
        dt_bias_strides, initial_states_strides, cu_seqlens_strides, slots_strides,
        accepted_strides, writes_strides, out_strides,
        final_states_strides,
    ) = strides  # fmt: skip
    # stage setup: the program's sequence, head and slice; `_slice_of_program` would be less code
    # here, but ptxas makes other instructions of it
    SLICES: tl.constexpr = (S.HEADDIM + S.BLOCK_P - 1) // S.BLOCK_P
    unit = tl.program_id(0) % (S.HEADS * SLICES)
    sequence, i_h, i_slice = tl.program_id(0) // (S.HEADS * SLICES), unit // SLICES, unit % SLICES
    i_b, begin, length = sequence, tl.zeros((), tl.int64), seqlen
    if cu_seqlens_ptr is not None:
        begin, length = sequence_bounds(sequence, cu_seqlens_ptr, cu_seqlens_strides[0])
        i_b = 0
    o_p, o_n = i_slice * S.BLOCK_P + tl.arange(0, S.BLOCK_P), tl.arange(0, S.BLOCK_N)
    m_p, m_n = o_p < S.HEADDIM, o_n < S.DSTATE
    m_state = m_p[:, None] & m_n[None, :]
    i_g = i_h // S.HEADS_PER_GROUP
    # where the program's rows lie, and the numbers of its head
    x_ptr += ptr_offset((i_b, begin, i_h), x_strides) + o_p.to(tl.int64) * x_strides[3]
    out_ptr += ptr_offset((i_b, begin, i_h), out_strides) + o_p.to(tl.int64) * out_strides[3]
    B_ptr += ptr_offset((i_b, begin, i_g), B_strides) + o_n.to(tl.int64) * B_strides[3]
    C_ptr += ptr_offset((i_b, begin, i_g), C_strides) + o_n.to(tl.int64) * C_strides[3]
    dt_ptr += ptr_offset((i_b, begin, i_h), dt_strides)
    if z_ptr is not None:
        z_ptr += ptr_offset((i_b, begin, i_h), z_strides) + o_p.to(tl.int64) * z_strides[3]
    A = load_at(A_ptr, A_strides, (i_h,)).to(tl.float32)
    dt_bias = 0.0
    if dt_bias_ptr is not None:
        dt_bias = load_at(dt_bias_ptr, dt_bias_strides, (i_h,)).to(tl.float32)
    D = tl.zeros((S.BLOCK_P,), tl.float32)
    if D_ptr is not None:
        if len(D_strides) == 2:
            D = load_at(D_ptr, D_strides, (i_h, o_p), mask=m_p).to(tl.float32)
        else:
            D += load_at(D_ptr, D_strides, (i_h,)).to(tl.float32)

    # stage setup.load: the state with which the sequence begins, and where its final state goes
    final_row, m_final = sequence, m_state
    slot, m_read = sequence, m_state
    if slots_ptr is not None:
        slot = slot_to_read(sequence, slots_ptr, slots_strides, accepted_ptr, accepted_strides)
        if S.IN_PLACE:
            m_read = tl.where(slot >= 0, m_state, False)
    index = (slot, i_h, o_p[:, None], o_n[None, :])
    if initial_states_ptr is None:
        # an empty load gives zeros the layout of states that are loaded, so that sums over N have
        # one order with and without initial states
        m_read = tl.where(length < 0, m_state, False)
        state = load_at(final_states_ptr, final_states_strides, index, mask=m_read)
    else:
        initial = load_at(initial_states_ptr, initial_states_strides, index, mask=m_read)
        state = initial.to(tl.float32)
        if S.IN_PLACE and slots_ptr is not None:
            final_row = slot
            if writes_ptr is not None:
                writes_ptr += tl.cast(sequence, tl.int64) * writes_strides[0]
                final_row = tl.load(writes_ptr)
            m_final = tl.where((final_row >= 0) & (length > 0), m_state, False)
    if S.FORMAT is not None:
        # round the initial state: step 0, rows along axis 1; store it in the first column's slot
        key, elements = hashed_head(seed, sequence, i_h), o_p[:, None] * S.DSTATE + o_n[None, :]
        state = stored_state(state, key, 0, elements, 1, S.FORMAT)
        index = (final_row, i_h, o_p[:, None], o_n[None, :])
        store_at(final_states_ptr, final_states_strides, index, state, mask=m_state)
        writes_ptr += writes_strides[1]

    # stage recurrence: equations of `reference.py`
    for t in range(0, length):
        step = tl.cast(t, tl.int64)
        x = tl.load(x_ptr + step * x_strides[1], mask=m_p, other=0.0).to(tl.float32)
        B = tl.load(B_ptr + step * B_strides[1], mask=m_n, other=0.0).to(tl.float32)
        C = tl.load(C_ptr + step * C_strides[1], mask=m_n, other=0.0).to(tl.float32)
        dt = tl.load(dt_ptr + step * dt_strides[1]).to(tl.float32) + dt_bias
        if S.DT_SOFTPLUS:
            dt = softplus(dt)
        dt = tl.clamp(dt, dt_low, dt_high, propagate_nan=tl.PropagateNan.ALL)
        state = tl.fma((dt * x)[:, None], B[None, :], state * decay_exp(dt * A))
        out = tl.fma(D, x, sum_of_products(state * C[None, :], 1))
        if z_ptr is not None:
            z = tl.load(z_ptr + step * z_strides[1], mask=m_p, other=0.0).to(tl.float32)
            out *= z / (1.0 + tl.exp2(-z * LOG2_E))
        tl.store(out_ptr + step * out_strides[1], out.to(out_ptr.dtype.element_ty), mask=m_p)
        if S.EVERY_STATE:
            row = (i_b * seqlen + begin + step, i_h, o_p[:, None], o_n[None, :])
            store_at(final_states_ptr, final_states_strides, row, state, mask=m_state)
        if S.FORMAT is not None:
            state = stored_after(state, t + 1, length, key, elements, 1, S)
        if len(writes_strides) == 2:  # a table with a column for each position
            new_slot = tl.load(writes_ptr + step * writes_strides[1])
            # with FORMAT few states are stored, and no addresses are computed for others
            if S.FORMAT is None or new_slot >= 0:
                row = (new_slot, i_h, o_p[:, None], o_n[None, :])
                p_new = final_states_ptr + ptr_offset(row, final_states_strides)
                stored = state.to(final_states_ptr.dtype.element_ty)
                tl.store(p_new, stored, mask=tl.where(new_slot >= 0, m_state, False))

    # stage setup.store: the final state, unless states were stored after each position
    if not S.EVERY_STATE and len(writes_strides) != 2:
        row = (final_row, i_h, o_p[:, None], o_n[None, :])
        store_at(final_states_ptr, final_states_strides, row, state, mask=m_final)


def recurrent_launch(
    inputs: SSDInputs, *, in_place: bool = False, stepping: Stepping = NOT_STEPPING
) -> PreparedLaunch:
    """The launch of a call, for all inputs of one signature.  in_place: see `ssd_recurrent`.
    stepping: how states are rounded; by default they are not.
    """
    new_out = torch.empty(inputs.x.shape, device="meta")
    final = inputs.initial_states if in_place else torch.empty(inputs.final_shape, device="meta")
    strides = strides_of_each(*_tensors(inputs, new_out, final))
    scalars = (strides, inputs.x.shape[1], *map(float, inputs.dt_limit), stepping.seed)
    programs, options = _settings(inputs, whole_state=stepping.whole_state)
    options |= dict(
        EVERY_STATE=bool(inputs.state_every),
        IN_PLACE=in_place,
        FORMAT=stepping.constants,
        STEP=stepping.step,
    )
    launcher = Launcher(_ssd_recurrent_kernel, scalars, options)
    return prepared(
        launcher, programs, inputs, _tensors, {}, in_place=in_place, out_dtype=stepping.out_dtype
    )


def _tensors(inputs: SSDInputs, *new: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The tensors of a launch, in the kernel's order.  new: out and final_states, or nothing for
    the tensors of the inputs alone.
    """
    return *inputs.kernel_tensors, *inputs.pool_tensors, *new


_launches: dict[Hashable, PreparedLaunch] = {}


def ssd_recurrent(
    inputs: SSDInputs,
    _precision: Precision = Precision(),  # noqa: B008
    *,
    in_place: bool = False,
) -> SSDOutput:
    """Output in x's dtype, final states in fp32, whatever the precision.  The call takes l
    dependent steps, and so is meant for short l.

    in_place: the final states overwrite inputs.initial_states, in its dtype, and the call returns
        that tensor.  For a pool, `kernels/inputs.py` says which slots are read and written.

    Raises ValueError if in_place is given without initial_states to write to, with expanded ones,
    or with inputs.state_every.  Raises UnsupportedError for N above MAX_DSTATE, for state_every
    above 1, for inputs that require a gradient, for a GPU of compute capability below 8.0, and,
    outside Triton's interpreter, for tensors not on a GPU.
    """
    refuse_gradient("recurrent", _tensors(inputs))
    return kept(_launches, (inputs.signature, in_place), _prepare, inputs, in_place)(inputs)


def _prepare_steps(inputs: SSDInputs, stepping: Stepping) -> PreparedLaunch:
    """The launch of a simulation of stored states (`stored_states.py`)."""
    _refuse_unsupported("recurrent", inputs)
    return recurrent_launch(inputs, in_place=True, stepping=stepping)


def _prepare(inputs: SSDInputs, in_place: bool) -> PreparedLaunch:
    inputs.check()
    _refuse_unsupported("recurrent", inputs)
    refuse_unwritable(inputs, in_place=in_place)
    return recurrent_launch(inputs, in_place=in_place)


def _run_on_copy(inputs: SSDInputs, _precision: Precision) -> SSDOutput:
    """`recurrent` in place, on a copy of the states, as `selective_state_update` of mamba_ssm is
    timed.  Raises UnsupportedError for inputs without initial states, and where `recurrent` does.
    """
    _refuse_unsupported(_ON_COPY, inputs)
    states = initial_states(inputs, torch.float32)
    return ssd_recurrent(replace(inputs, initial_states=states), in_place=True)


@triton.jit
def _ssd_step_state_kernel(tensors, strides, dt_low, dt_high, S: tl.constexpr):
    """The state after the token, exp(dt A) state + dt x B^T, of one slice of P of one head."""
    x_ptr, dt_ptr, A_ptr, B_ptr, dt_bias_ptr, initial_states_ptr, final_states_ptr = tensors
    (
        x_strides, dt_strides, A_strides, B_strides, dt_bias_strides, initial_states_strides,
        final_states_strides,
    ) = strides  # fmt: skip
    i_b, i_h, o_p, o_n, m_p, m_n = _slice_of_program(S)
    m_state = m_p[:, None] & m_n[None, :]
    index = (i_b, i_h, o_p[:, None], o_n[None, :])

    dt = load_at(dt_ptr, dt_strides, (i_b, 0, i_h)).to(tl.float32)
    if dt_bias_ptr is not None:
        dt += load_at(dt_bias_ptr, dt_bias_strides, (i_h,)).to(tl.float32)
    if S.DT_SOFTPLUS:
        dt = softplus(dt)
    dt = tl.clamp(dt, dt_low, dt_high, propagate_nan=tl.PropagateNan.ALL)
    A = load_at(A_ptr, A_strides, (i_h,)).to(tl.float32)
    x = load_at(x_ptr, x_strides, (i_b, 0, i_h, o_p), mask=m_p).to(tl.float32)
    i_g = i_h // S.HEADS_PER_GROUP
    B = load_at(B_ptr, B_strides, (i_b, 0, i_g, o_n), mask=m_n).to(tl.float32)
    state = (dt * x)[:, None] * B[None, :]
    if initial_states_ptr is not None:
        initial = load_at(initial_states_ptr, initial_states_strides, index, mask=m_state)
        state += initial.to(tl.float32) * decay_exp2(dt * A * LOG2_E)
    store_at(final_states_ptr, final_states_strides, index, state, mask=m_state)


@triton.jit
def _ssd_step_output_kernel(tensors, strides, S: tl.constexpr):
    """The output, (state C + D x) * silu(z), from the state after the token, of one slice of P of
    one head.
    """
    states_ptr, C_ptr, x_ptr, D_ptr, z_ptr, out_ptr = tensors
    states_strides, C_strides, x_strides, D_strides, z_strides, out_strides = strides
    i_b, i_h, o_p, o_n, m_p, m_n = _slice_of_program(S)

    index = (i_b, i_h, o_p[:, None], o_n[None, :])
    state = load_at(states_ptr, states_strides, index, mask=m_p[:, None] & m_n[None, :])
    i_g = i_h // S.HEADS_PER_GROUP
    C = load_at(C_ptr, C_strides, (i_b, 0, i_g, o_n), mask=m_n).to(tl.float32)
    out = tl.sum(state * C[None, :], axis=1)
    if D_ptr is not None:
        x = load_at(x_ptr, x_strides, (i_b, 0, i_h, o_p), mask=m_p).to(tl.float32)
        if len(D_strides) == 2:
            D = load_at(D_ptr, D_strides, (i_h, o_p), mask=m_p).to(tl.float32)
        else:
            D = load_at(D_ptr, D_strides, (i_h,)).to(tl.float32)
        out += D * x
    if z_ptr is not None:
        z = load_at(z_ptr, z_strides, (i_b, 0, i_h, o_p), mask=m_p).to(tl.float32)
        out *= z / (1.0 + tl.exp2(-z * LOG2_E))
    store_at(out_ptr, out_strides, (i_b, 0, i_h, o_p), out, mask=m_p)


def two_stages(inputs: SSDInputs) -> SSDOutput:
    """One token of each sequence in two launches, without checks.  Final states are fp32."""
    x = inputs.x
    programs, options = _settings(inputs)
    with torch.cuda.device(x.get_device()):  # no effect for -1, the CPU
        states = torch.empty(inputs.states_shape, dtype=torch.float32, device=x.device)
        of_state = (x, inputs.dt, inputs.A, inputs.B, inputs.dt_bias, inputs.initial_states, states)
        scalars = (strides_of_each(*of_state), *map(float, inputs.dt_limit))
        launch(_ssd_step_state_kernel, programs, of_state, scalars, **options)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        of_output = (states, inputs.C, x, inputs.D, inputs.z, out)
        launch(
            _ssd_step_output_kernel, programs, of_output, (strides_of_each(*of_output),), **options
        )
    return SSDOutput(out, states)


def _run_step(inputs: SSDInputs, _precision: Precision) -> SSDOutput:
    _refuse_unsupported(_STEP, inputs)
    refuse_gradient(_STEP, vars(inputs).values())
    return two_stages(inputs)


# --- the implementations


def _refuse_unsupported(name: str, inputs: SSDInputs) -> None:
    """Raises UnsupportedError for inputs that implementation `name` does not support."""
    dstate = inputs.B.shape[3]
    if name == _STEP and (inputs.x.shape[1] != 1 or inputs.cu_seqlens is not None):
        raise UnsupportedError(f"{name}: one token of each sequence, side by side")
    if name == _ON_COPY and inputs.initial_states is None:
        raise UnsupportedError(f"{name}: sequences begin with a state")
    if dstate > MAX_DSTATE:
        raise UnsupportedError(f"{name}: dstate is at most {MAX_DSTATE}, not {dstate}")
    refuse_device(name, inputs.x)


def _plan(name: str, launches: int, reason: str, inputs: SSDInputs, precision: Precision) -> Plan:
    """The plan of the implementation `name` of this file.  Raises UnsupportedError as its run."""
    _refuse_unsupported(name, inputs)
    return Plan(
        variant="interpreter" if INTERPRETED else "portable",
        launches=launches,
        config=blocks_of(inputs),
        reason=f"{reason}; fp32 throughout{precision.equals_exact_text}",
    )


_ONE_LAUNCH = "one launch, position by position"
register(
    Implementation(
        operator="ssd",
        name="recurrent",
        run=ssd_recurrent,
        plan=partial(_plan, "recurrent", 1, _ONE_LAUNCH),
        keeps=keeps_every_state,
        pools=True,
        in_place=partial(ssd_recurrent, in_place=True),
        stepped=partial(stepped, _prepare_steps),
        batch_invariant=True,
    )
)
register(
    Implementation(
        operator="ssd",
        name=_STEP,
        run=_run_step,
        plan=partial(_plan, _STEP, 2, "the state in one launch, the output in another"),
    )
)
register(
    Implementation(
        operator="ssd",
        name=_ON_COPY,
        run=_run_on_copy,
        plan=partial(
            _plan,
            _ON_COPY,
            2,
            f"each call begins with a copy of the state, in its time; {_ONE_LAUNCH}",
        ),
    )
)
