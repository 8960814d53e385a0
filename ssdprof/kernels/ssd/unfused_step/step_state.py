# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""First launch of an unfused SSD step: the state of every head after the token, in fp32.

    dt    = clamp(softplus(dt + dt_bias), low, high)
    state = exp(dt A) state + dt x B^T

In:   x (b, 1, h, p) | dt (b, 1, h) | A, dt_bias (h) | B (b, 1, g, n) | initial_states (b, h, p, n)
Out:  final_states (b, h, p, n) fp32
Grid: (b * h * slices of p), slices fastest, then heads.
Oracle: `../reference.py`.  Source: Dao and Gu 2024 (arXiv:2405.21060), equation 2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from ssdprof.kernels.functions import decay_exp2, ptr_offset
from ssdprof.kernels.launch import launch
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.ssd.portable.stages import softplus
from ssdprof.kernels.ssd.recurrent import RecurrentConfig
from ssdprof.kernels.tensors import strides_of_each

LOG2_E = tl.constexpr(math.log2(math.e))

STAGES = {"_ssd_step_state_kernel": "step_state"}


def _metadata(_grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    *_, initial, final = args["tensors"]
    states = [final] if initial is None else [initial, final]
    return {
        "name": f"{kernel.name} {tuple(final.shape)}",
        "flops": 4 * final.numel(),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in states),
    }


@triton.jit(launch_metadata=_metadata)
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


def step_state(inputs: SSDInputs, config: RecurrentConfig) -> torch.Tensor:
    """Launch the kernel on the current device.  `SSDInputs` has checked the shapes; l must be 1."""
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
