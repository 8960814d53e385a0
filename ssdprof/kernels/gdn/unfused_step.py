# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""A decode step of the gated delta rule in three launches: the written value, the state, the output.

It moves two states more than a fused step and computes the same in fp32.  If the call normalises q and k, two small
launches do so.  The six launches of `unfused` would be a slow baseline for one token, because they process chunks.

Oracle: `reference.py`, `gdn_recurrence`.  Source: Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464), equation 10.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ssdprof.kernels.device import INTERPRETED, refuse_device, refuse_gradient
from ssdprof.kernels.functions import LOG2_E, decay_exp2, ptr_offset
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.gdn.unfused.stages import qk_l2norm
from ssdprof.kernels.launch import launch
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, UnsupportedError, register
from ssdprof.kernels.tensors import strides_of_each

STAGES = {
    "_own_slice": "caller", "_gdn_step_write_kernel": "step_write", "_gdn_step_state_kernel": "step_state",
    "_gdn_step_output_kernel": "step_output",
}  # fmt: skip
_NAME = "unfused_step"


@triton.jit
def _own_slice(S: tl.constexpr):
    """The program's sequence and head, its rows and columns of the state, and their masks.

    Grid of all three launches: (B * HV * slices of V), slices fastest, then heads.
    """
    SLICES: tl.constexpr = (S.VALUE_DIM + S.BLOCK_V - 1) // S.BLOCK_V
    unit = tl.program_id(0) % (S.VALUE_HEADS * SLICES)
    i_b, i_h = tl.program_id(0) // (S.VALUE_HEADS * SLICES), unit // SLICES
    o_k, o_v = tl.arange(0, S.BLOCK_K), (unit % SLICES) * S.BLOCK_V + tl.arange(0, S.BLOCK_V)
    return i_b, i_h, o_k, o_v, o_k < S.KEY_DIM, o_v < S.VALUE_DIM


@triton.jit
def _gdn_step_write_kernel(tensors, strides, S: tl.constexpr):
    """The value that the token writes, u = beta (v - (exp(g) S)^T k): (B, 1, HV, V) fp32."""
    k_ptr, v_ptr, g_ptr, beta_ptr, initial_state_ptr, u_ptr = tensors
    k_strides, v_strides, g_strides, beta_strides, initial_state_strides, u_strides = strides
    i_b, i_h, o_k, o_v, m_k, m_v = _own_slice(S)
    u = tl.load(v_ptr + ptr_offset((i_b, 0, i_h, o_v), v_strides), mask=m_v, other=0.0).to(tl.float32)
    if initial_state_ptr is not None:
        index = (i_b, i_h, o_k[:, None], o_v[None, :])
        state = tl.load(
            initial_state_ptr + ptr_offset(index, initial_state_strides), mask=m_k[:, None] & m_v[None, :], other=0.0
        ).to(tl.float32)  # fmt: skip
        k = tl.load(k_ptr + ptr_offset((i_b, 0, i_h // S.VALUES_PER_KEY, o_k), k_strides), mask=m_k, other=0.0)
        g = tl.load(g_ptr + ptr_offset((i_b, 0, i_h), g_strides)).to(tl.float32)
        u -= decay_exp2(g * LOG2_E) * tl.sum(state * k.to(tl.float32)[:, None], axis=0)
    u *= tl.load(beta_ptr + ptr_offset((i_b, 0, i_h), beta_strides)).to(tl.float32)
    tl.store(u_ptr + ptr_offset((i_b, 0, i_h, o_v), u_strides), u, mask=m_v)


@triton.jit
def _gdn_step_state_kernel(tensors, strides, S: tl.constexpr):
    """The state after the token, S = exp(g) S + k u^T: (B, HV, K, V) fp32."""
    k_ptr, u_ptr, g_ptr, initial_state_ptr, final_states_ptr = tensors
    k_strides, u_strides, g_strides, initial_state_strides, final_states_strides = strides
    i_b, i_h, o_k, o_v, m_k, m_v = _own_slice(S)
    m_state = m_k[:, None] & m_v[None, :]
    index = (i_b, i_h, o_k[:, None], o_v[None, :])

    k_index = (i_b, 0, i_h // S.VALUES_PER_KEY, o_k)
    k = tl.load(k_ptr + ptr_offset(k_index, k_strides), mask=m_k, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + ptr_offset((i_b, 0, i_h, o_v), u_strides), mask=m_v, other=0.0)
    state = k[:, None] * u[None, :]
    if initial_state_ptr is not None:
        initial = tl.load(initial_state_ptr + ptr_offset(index, initial_state_strides), mask=m_state, other=0.0)
        g = tl.load(g_ptr + ptr_offset((i_b, 0, i_h), g_strides)).to(tl.float32)
        state += initial.to(tl.float32) * decay_exp2(g * LOG2_E)
    tl.store(final_states_ptr + ptr_offset(index, final_states_strides), state, mask=m_state)


@triton.jit
def _gdn_step_output_kernel(tensors, strides, scale, S: tl.constexpr):
    """The output, read from the state after the token, out = S^T (scale q): (B, 1, HV, V), v's dtype."""
    states_ptr, q_ptr, out_ptr = tensors
    states_strides, q_strides, out_strides = strides
    i_b, i_h, o_k, o_v, m_k, m_v = _own_slice(S)
    index = (i_b, i_h, o_k[:, None], o_v[None, :])
    state = tl.load(states_ptr + ptr_offset(index, states_strides), mask=m_k[:, None] & m_v[None, :], other=0.0)
    q_index = (i_b, 0, i_h // S.VALUES_PER_KEY, o_k)
    q = tl.load(q_ptr + ptr_offset(q_index, q_strides), mask=m_k, other=0.0).to(tl.float32)
    out = tl.sum(state * (q * scale)[:, None], axis=0)
    tl.store(out_ptr + ptr_offset((i_b, 0, i_h, o_v), out_strides), out.to(out_ptr.dtype.element_ty), mask=m_v)


def run(inputs: GDNInputs, _precision: Precision = Precision()) -> GDNOutput:  # noqa: B008
    """Output in v's dtype, final states in fp32, for one token of each sequence.

    Raises UnsupportedError for more tokens, for packed sequences, and where the kernels cannot run.
    """
    _refuse_unsupported(inputs)
    refuse_gradient(_NAME, vars(inputs).values())
    return three_stages(inputs)


def three_stages(inputs: GDNInputs) -> GDNOutput:
    """`run` without checks."""
    config, (batch, heads, key_dim, value_dim) = _config(inputs), inputs.states_shape

    def step(kernel: Any, *tensors: torch.Tensor | None, scale: tuple[float, ...] = ()) -> None:
        launch(
            kernel, batch * heads * triton.cdiv(value_dim, config["block_v"]), tensors,
            (strides_of_each(*tensors), *scale),
            VALUE_HEADS=heads, VALUES_PER_KEY=inputs.values_per_key, KEY_DIM=key_dim, VALUE_DIM=value_dim,
            BLOCK_K=triton.next_power_of_2(key_dim), BLOCK_V=config["block_v"], num_warps=config["num_warps"],
        )  # fmt: skip

    q, k, v, g, initial = inputs.q, inputs.k, inputs.v, inputs.g, inputs.initial_state
    with torch.cuda.device(q.get_device()):  # no effect for -1, the CPU
        if inputs.use_qk_l2norm:
            q, k = (qk_l2norm(tensor, dtype=torch.float32) for tensor in (q, k))
        u = torch.empty(v.shape, dtype=torch.float32, device=k.device)
        step(_gdn_step_write_kernel, k, v, g, inputs.beta, initial, u)
        final_states = torch.empty(inputs.states_shape, dtype=torch.float32, device=k.device)
        step(_gdn_step_state_kernel, k, u, g, initial, final_states)
        out = torch.empty(v.shape, dtype=v.dtype, device=q.device)
        step(_gdn_step_output_kernel, final_states, q, out, scale=(inputs.scale_or_default,))
        return GDNOutput(out, final_states)


def plan(inputs: GDNInputs, precision: Precision = Precision()) -> Plan:  # noqa: B008
    """The launches, configuration and workspace of a call.  Launches nothing."""
    _refuse_unsupported(inputs)
    normalised = inputs.q.numel() + inputs.k.numel() if inputs.use_qk_l2norm else 0
    reason = "what is written, the state and the output in a launch each; fp32 throughout"
    return Plan(
        variant="interpreter" if INTERPRETED else "portable", launches=3 + 2 * bool(inputs.use_qk_l2norm),
        config=dict(_config(inputs)), workspace_bytes=4 * (inputs.v.numel() + normalised),
        reason=reason + precision.as_exact,
    )  # fmt: skip


def _config(inputs: GDNInputs) -> dict[str, int]:
    """block_v: slice of V per program.  At most 64 numbers of the state per thread."""
    block_v = min(32, triton.next_power_of_2(inputs.v.shape[3]))
    return {"block_v": block_v, "num_warps": max(2, triton.next_power_of_2(inputs.q.shape[3]) * block_v // (64 * 32))}


def _refuse_unsupported(inputs: GDNInputs) -> None:
    if inputs.q.shape[1] != 1 or inputs.cu_seqlens is not None:
        raise UnsupportedError(f"{_NAME}: one token of each sequence, side by side")
    refuse_device(_NAME, inputs.q)


register(Implementation(operator="gdn", name=_NAME, run=run, plan=plan))
