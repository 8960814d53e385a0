# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Second launch of an unfused GDN step: the state of every head after the token, in fp32.

    S = exp(g) S + k u^T

In:   k (B, 1, H, K) | u (B, 1, HV, V) fp32 | g (B, 1, HV) | initial_state (B, HV, K, V)
Out:  final_states (B, HV, K, V) fp32
Grid: (B * HV * slices of V), slices fastest, then heads.
Oracle: `../reference.py`, `gdn_recurrence`.  Source: Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464), equation 10.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from ssdprof.kernels.functions import decay_exp2, ptr_offset
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.gdn.recurrent import RecurrentConfig
from ssdprof.kernels.launch import launch
from ssdprof.kernels.tensors import strides_of_each

LOG2_E = tl.constexpr(math.log2(math.e))

STAGES = {"_gdn_step_state_kernel": "step_state"}


def _metadata(_grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    *_, initial, final = args["tensors"]
    states = [final] if initial is None else [initial, final]
    return {
        "name": f"{kernel.name} {tuple(final.shape)}",
        "flops": 3 * final.numel(),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in states),
    }


@triton.jit(launch_metadata=_metadata)
def _gdn_step_state_kernel(tensors, strides, S: tl.constexpr):
    k_ptr, u_ptr, g_ptr, initial_state_ptr, final_states_ptr = tensors
    k_strides, u_strides, g_strides, initial_state_strides, final_states_strides = strides
    SLICES: tl.constexpr = (S.VALUE_DIM + S.BLOCK_V - 1) // S.BLOCK_V
    unit = tl.program_id(0) % (S.VALUE_HEADS * SLICES)
    i_b, i_h = tl.program_id(0) // (S.VALUE_HEADS * SLICES), unit // SLICES
    o_k, o_v = tl.arange(0, S.BLOCK_K), (unit % SLICES) * S.BLOCK_V + tl.arange(0, S.BLOCK_V)
    m_k, m_v = o_k < S.KEY_DIM, o_v < S.VALUE_DIM
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


def step_state(inputs: GDNInputs, k: torch.Tensor, u: torch.Tensor, config: RecurrentConfig) -> torch.Tensor:
    """Launch the kernel on the current device.  k, u: as in `step_write`."""
    final_states = torch.empty(inputs.states_shape, dtype=torch.float32, device=k.device)
    tensors = (k, u, inputs.g, inputs.initial_state, final_states)
    batch, heads, key_dim, value_dim = inputs.states_shape
    launch(
        _gdn_step_state_kernel,
        batch * heads * triton.cdiv(value_dim, config.block_v),
        tensors,
        (strides_of_each(*tensors),),
        VALUE_HEADS=heads, VALUES_PER_KEY=inputs.values_per_key, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        BLOCK_K=triton.next_power_of_2(key_dim), BLOCK_V=config.block_v,
        num_warps=config.num_warps,
    )  # fmt: skip
    return final_states
