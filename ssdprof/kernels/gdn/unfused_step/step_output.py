# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Third launch of an unfused GDN step: the output, read from the state after the token.

    out = S^T (scale q)

In:   states (B, HV, K, V) fp32 | q (B, 1, H, K)
Out:  out (B, 1, HV, V), v's dtype
Grid: (B * HV * slices of V), slices fastest, then heads.
Oracle: `../reference.py`, `gdn_recurrence`.  Source: Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464), equation 10.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ssdprof.kernels.functions import ptr_offset
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.gdn.recurrent import RecurrentConfig
from ssdprof.kernels.launch import launch
from ssdprof.kernels.tensors import strides_of_each

STAGES = {"_gdn_step_output_kernel": "step_output"}


def _metadata(_grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    states = args["tensors"][0]
    return {
        "name": f"{kernel.name} {tuple(states.shape)}",
        "flops": 2 * states.numel(),
        "bytes": states.numel() * states.element_size(),
    }


@triton.jit(launch_metadata=_metadata)
def _gdn_step_output_kernel(tensors, strides, scale, S: tl.constexpr):
    states_ptr, q_ptr, out_ptr = tensors
    states_strides, q_strides, out_strides = strides
    SLICES: tl.constexpr = (S.VALUE_DIM + S.BLOCK_V - 1) // S.BLOCK_V
    unit = tl.program_id(0) % (S.VALUE_HEADS * SLICES)
    i_b, i_h = tl.program_id(0) // (S.VALUE_HEADS * SLICES), unit // SLICES
    o_k, o_v = tl.arange(0, S.BLOCK_K), (unit % SLICES) * S.BLOCK_V + tl.arange(0, S.BLOCK_V)
    m_k, m_v = o_k < S.KEY_DIM, o_v < S.VALUE_DIM

    index = (i_b, i_h, o_k[:, None], o_v[None, :])
    state = tl.load(states_ptr + ptr_offset(index, states_strides), mask=m_k[:, None] & m_v[None, :], other=0.0)
    q_index = (i_b, 0, i_h // S.VALUES_PER_KEY, o_k)
    q = tl.load(q_ptr + ptr_offset(q_index, q_strides), mask=m_k, other=0.0).to(tl.float32)
    out = tl.sum(state * (q * scale)[:, None], axis=0)
    tl.store(out_ptr + ptr_offset((i_b, 0, i_h, o_v), out_strides), out.to(out_ptr.dtype.element_ty), mask=m_v)


def step_output(inputs: GDNInputs, q: torch.Tensor, states: torch.Tensor, config: RecurrentConfig) -> torch.Tensor:
    """Launch the kernel on the current device.

    q: normalised if the call normalises
    states: after the token, (B, HV, K, V) fp32
    """
    out = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=q.device)
    tensors = (states, q, out)
    batch, heads, key_dim, value_dim = inputs.states_shape
    launch(
        _gdn_step_output_kernel,
        batch * heads * triton.cdiv(value_dim, config.block_v),
        tensors,
        (strides_of_each(*tensors), inputs.scale_or_default),
        VALUE_HEADS=heads, VALUES_PER_KEY=inputs.values_per_key, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        BLOCK_K=triton.next_power_of_2(key_dim), BLOCK_V=config.block_v,
        num_warps=config.num_warps,
    )  # fmt: skip
    return out
