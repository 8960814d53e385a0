# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""A decode step of SSD in two launches: the first writes the state, the second reads it for the output.

It moves one state more than a fused step and computes the same in fp32.  The five launches of `unfused` would be a slow
baseline for one token, because they process chunks.

Oracle: `reference.py`.  Source: Dao and Gu 2024 (arXiv:2405.21060), equation 2.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import triton
import triton.language as tl

from ssdprof.kernels.device import INTERPRETED, refuse_device, refuse_gradient
from ssdprof.kernels.functions import LOG2_E, decay_exp2, ptr_offset, softplus
from ssdprof.kernels.launch import Described, described, launch
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, UnsupportedError, register
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.recurrent import MAX_DSTATE, SSDRecurrentConfig
from ssdprof.kernels.tensors import strides_of_each

STAGES = {"_ssd_step_state_kernel": "step_state", "_ssd_step_output_kernel": "step_output"}
_NAME = "unfused_step"
_EQUALS = "; the same as exact with fp32 states"  # appended to the reason for every other precision


@described
def _step_state_metadata(tensors: Any, _S: Any) -> Described:
    *_, initial, final = tensors
    return f"{tuple(final.shape)}", 4 * final.numel(), (initial, final)


@triton.jit(launch_metadata=_step_state_metadata)
def _ssd_step_state_kernel(tensors, strides, dt_low, dt_high, S: tl.constexpr):
    x_ptr, dt_ptr, A_ptr, B_ptr, dt_bias_ptr, initial_states_ptr, final_states_ptr = tensors
    x_strides, dt_strides, A_strides, B_strides, dt_bias_strides, initial_states_strides, final_states_strides = strides
    SLICES: tl.constexpr = (S.HEADDIM + S.BLOCK_P - 1) // S.BLOCK_P
    unit = tl.program_id(0) % (S.HEADS * SLICES)
    i_b, i_h = tl.program_id(0) // (S.HEADS * SLICES), unit // SLICES
    o_p, o_n = (unit % SLICES) * S.BLOCK_P + tl.arange(0, S.BLOCK_P), tl.arange(0, S.BLOCK_N)
    m_p, m_n = o_p < S.HEADDIM, o_n < S.DSTATE
    m_state = m_p[:, None] & m_n[None, :]
    index = (i_b, i_h, o_p[:, None], o_n[None, :])

    dt = tl.load(dt_ptr + ptr_offset((i_b, 0, i_h), dt_strides)).to(tl.float32)
    if dt_bias_ptr is not None:
        dt += tl.load(dt_bias_ptr + ptr_offset((i_h,), dt_bias_strides)).to(tl.float32)
    if S.DT_SOFTPLUS:
        dt = softplus(dt)
    dt = tl.clamp(dt, dt_low, dt_high, propagate_nan=tl.PropagateNan.ALL)
    A = tl.load(A_ptr + ptr_offset((i_h,), A_strides)).to(tl.float32)
    x = tl.load(x_ptr + ptr_offset((i_b, 0, i_h, o_p), x_strides), mask=m_p, other=0.0).to(tl.float32)
    B = tl.load(B_ptr + ptr_offset((i_b, 0, i_h // S.HEADS_PER_GROUP, o_n), B_strides), mask=m_n, other=0.0).to(
        tl.float32
    )
    state = (dt * x)[:, None] * B[None, :]
    if initial_states_ptr is not None:
        initial = tl.load(initial_states_ptr + ptr_offset(index, initial_states_strides), mask=m_state, other=0.0)
        state += initial.to(tl.float32) * decay_exp2(dt * A * LOG2_E)
    tl.store(final_states_ptr + ptr_offset(index, final_states_strides), state, mask=m_state)


def step_state(inputs: SSDInputs, config: SSDRecurrentConfig) -> torch.Tensor:
    """First launch of an unfused SSD step: the state of every head after the token, in fp32.

        dt    = clamp(softplus(dt + dt_bias), low, high)
        state = exp(dt A) state + dt x B^T

    In:   x (b, 1, h, p) | dt (b, 1, h) | A, dt_bias (h) | B (b, 1, g, n) | initial_states (b, h, p, n)
    Out:  final_states (b, h, p, n) fp32
    Grid: (b * h * slices of p), slices fastest, then heads.
    """
    final_states = torch.empty(inputs.states_shape, dtype=torch.float32, device=inputs.x.device)
    tensors = (inputs.x, inputs.dt, inputs.A, inputs.B, inputs.dt_bias, inputs.initial_states, final_states)
    batch, heads, headdim, dstate = inputs.states_shape
    launch(
        _ssd_step_state_kernel,
        batch * heads * triton.cdiv(headdim, config.block_p),
        tensors,
        (strides_of_each(*tensors), *map(float, inputs.dt_limit)),
        HEADS=heads, HEADS_PER_GROUP=inputs.heads_per_group, HEADDIM=headdim, DSTATE=dstate,
        BLOCK_P=config.block_p, BLOCK_N=triton.next_power_of_2(dstate), DT_SOFTPLUS=bool(inputs.dt_softplus),
        num_warps=config.num_warps,
    )  # fmt: skip
    return final_states


@described
def _step_output_metadata(tensors: Any, _S: Any) -> Described:
    states = tensors[0]
    return f"{tuple(states.shape)}", 2 * states.numel(), (states,)


@triton.jit(launch_metadata=_step_output_metadata)
def _ssd_step_output_kernel(tensors, strides, S: tl.constexpr):
    states_ptr, C_ptr, x_ptr, D_ptr, z_ptr, out_ptr = tensors
    states_strides, C_strides, x_strides, D_strides, z_strides, out_strides = strides
    SLICES: tl.constexpr = (S.HEADDIM + S.BLOCK_P - 1) // S.BLOCK_P
    unit = tl.program_id(0) % (S.HEADS * SLICES)
    i_b, i_h = tl.program_id(0) // (S.HEADS * SLICES), unit // SLICES
    o_p, o_n = (unit % SLICES) * S.BLOCK_P + tl.arange(0, S.BLOCK_P), tl.arange(0, S.BLOCK_N)
    m_p, m_n = o_p < S.HEADDIM, o_n < S.DSTATE

    index = (i_b, i_h, o_p[:, None], o_n[None, :])
    state = tl.load(states_ptr + ptr_offset(index, states_strides), mask=m_p[:, None] & m_n[None, :], other=0.0)
    C = tl.load(C_ptr + ptr_offset((i_b, 0, i_h // S.HEADS_PER_GROUP, o_n), C_strides), mask=m_n, other=0.0).to(
        tl.float32
    )
    out = tl.sum(state * C[None, :], axis=1)
    if D_ptr is not None:
        x = tl.load(x_ptr + ptr_offset((i_b, 0, i_h, o_p), x_strides), mask=m_p, other=0.0).to(tl.float32)
        if len(D_strides) == 2:
            D = tl.load(D_ptr + ptr_offset((i_h, o_p), D_strides), mask=m_p, other=0.0).to(tl.float32)
        else:
            D = tl.load(D_ptr + ptr_offset((i_h,), D_strides)).to(tl.float32)
        out += D * x
    if z_ptr is not None:
        z = tl.load(z_ptr + ptr_offset((i_b, 0, i_h, o_p), z_strides), mask=m_p, other=0.0).to(tl.float32)
        out *= z / (1.0 + tl.exp2(-z * LOG2_E))
    tl.store(out_ptr + ptr_offset((i_b, 0, i_h, o_p), out_strides), out.to(out_ptr.dtype.element_ty), mask=m_p)


def step_output(inputs: SSDInputs, states: torch.Tensor, config: SSDRecurrentConfig) -> torch.Tensor:
    """Second launch of an unfused SSD step: the output, read from the state after the token.

        out = (state C + D x) * silu(z)

    In:   states (b, h, p, n) fp32 | C (b, 1, g, n) | x, z (b, 1, h, p) | D (h) or (h, p)
    Out:  out (b, 1, h, p), x's dtype
    Grid: (b * h * slices of p), slices fastest, then heads.
    """
    out = torch.empty(inputs.x.shape, dtype=inputs.x.dtype, device=inputs.x.device)
    tensors = (states, inputs.C, inputs.x, inputs.D, inputs.z, out)
    batch, heads, headdim, dstate = inputs.states_shape
    launch(
        _ssd_step_output_kernel,
        batch * heads * triton.cdiv(headdim, config.block_p),
        tensors,
        (strides_of_each(*tensors),),
        HEADS=heads, HEADS_PER_GROUP=inputs.heads_per_group, HEADDIM=headdim, DSTATE=dstate,
        BLOCK_P=config.block_p, BLOCK_N=triton.next_power_of_2(dstate),
        num_warps=config.num_warps,
    )  # fmt: skip
    return out


def run(inputs: SSDInputs, precision: Precision = Precision()) -> SSDOutput:  # noqa: ARG001, B008
    """Output in x's dtype, final states in fp32, for one token of each sequence.

    Raises UnsupportedError for more tokens, for packed sequences, and where the kernels cannot run.
    """
    _refuse_unsupported(inputs)
    return two_stages(inputs)


def two_stages(inputs: SSDInputs) -> SSDOutput:
    """`run` without checks."""
    config = SSDRecurrentConfig.choose(inputs)
    with torch.cuda.device(inputs.x.get_device()):  # no effect for -1, the CPU
        final_states = step_state(inputs, config)
        return SSDOutput(step_output(inputs, final_states, config), final_states)


def plan(inputs: SSDInputs, precision: Precision = Precision()) -> Plan:  # noqa: B008
    """The launches and configuration of a call.  Launches nothing."""
    _refuse_unsupported(inputs)
    return Plan(
        variant="interpreter" if INTERPRETED else "portable",
        launches=2,
        config=asdict(SSDRecurrentConfig.choose(inputs)),
        reason="the state in one launch, the output in another; fp32 throughout" + _EQUALS * (precision != Precision()),
    )


def _refuse_unsupported(inputs: SSDInputs) -> None:
    x, dstate = inputs.x, inputs.B.shape[3]
    if x.shape[1] != 1 or inputs.cu_seqlens is not None:
        raise UnsupportedError(f"{_NAME}: one token of each sequence, side by side")
    if dstate > MAX_DSTATE:
        raise UnsupportedError(f"{_NAME}: dstate is at most {MAX_DSTATE}, not {dstate}")
    refuse_gradient(_NAME, vars(inputs).values())
    refuse_device(_NAME, x)


register(Implementation(operator="ssd", name=_NAME, run=run, plan=plan))
