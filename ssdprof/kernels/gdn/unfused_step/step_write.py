# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""First launch of an unfused GDN step: the value that the token writes into the state, in fp32.

    u = beta (v - (exp(g) S)^T k)

In:   k (B, 1, H, K) | v (B, 1, HV, V) | g, beta (B, 1, HV) | initial_state (B, HV, K, V)
Out:  u (B, 1, HV, V) fp32
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

STAGES = {"_gdn_step_write_kernel": "step_write"}


def _metadata(_grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    *_, state, u = args["tensors"]
    elements = 0 if state is None else state.numel()
    return {
        "name": f"{kernel.name} {tuple(u.shape)}",
        "flops": 2 * elements + 3 * u.numel(),
        "bytes": elements * (0 if state is None else state.element_size()) + 2 * u.numel() * u.element_size(),
    }


@triton.jit(launch_metadata=_metadata)
def _gdn_step_write_kernel(tensors, strides, S: tl.constexpr):
    k_ptr, v_ptr, g_ptr, beta_ptr, initial_state_ptr, u_ptr = tensors
    k_strides, v_strides, g_strides, beta_strides, initial_state_strides, u_strides = strides
    SLICES: tl.constexpr = (S.VALUE_DIM + S.BLOCK_V - 1) // S.BLOCK_V
    unit = tl.program_id(0) % (S.VALUE_HEADS * SLICES)
    i_b, i_h = tl.program_id(0) // (S.VALUE_HEADS * SLICES), unit // SLICES
    o_k, o_v = tl.arange(0, S.BLOCK_K), (unit % SLICES) * S.BLOCK_V + tl.arange(0, S.BLOCK_V)
    m_k, m_v = o_k < S.KEY_DIM, o_v < S.VALUE_DIM

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


def step_write(inputs: GDNInputs, k: torch.Tensor, config: RecurrentConfig) -> torch.Tensor:
    """Launch the kernel on the current device.  k: normalised if the call normalises.  T must be 1."""
    u = torch.empty(inputs.v.shape, dtype=torch.float32, device=k.device)
    tensors = (k, inputs.v, inputs.g, inputs.beta, inputs.initial_state, u)
    batch, heads, key_dim, value_dim = inputs.states_shape
    launch(
        _gdn_step_write_kernel,
        batch * heads * triton.cdiv(value_dim, config.block_v),
        tensors,
        (strides_of_each(*tensors),),
        VALUE_HEADS=heads, VALUES_PER_KEY=inputs.values_per_key, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        BLOCK_K=triton.next_power_of_2(key_dim), BLOCK_V=config.block_v,
        num_warps=config.num_warps,
    )  # fmt: skip
    return u
