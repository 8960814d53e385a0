# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Second launch of an unfused SSD step: the output, read from the state after the token.

    out = (state C + D x) * silu(z)

In:   states (b, h, p, n) fp32 | C (b, 1, g, n) | x, z (b, 1, h, p) | D (h) or (h, p)
Out:  out (b, 1, h, p), x's dtype
Grid: (b * h * slices of p), slices fastest, then heads.
Oracle: `../reference.py`.  Source: Dao and Gu 2024 (arXiv:2405.21060), equation 2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from ssdprof.kernels.functions import ptr_offset
from ssdprof.kernels.launch import launch
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.ssd.recurrent import RecurrentConfig
from ssdprof.kernels.tensors import strides_of_each

LOG2_E = tl.constexpr(math.log2(math.e))

STAGES = {"_ssd_step_output_kernel": "step_output"}


def _metadata(_grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    states = args["tensors"][0]
    return {
        "name": f"{kernel.name} {tuple(states.shape)}",
        "flops": 2 * states.numel(),
        "bytes": states.numel() * states.element_size(),
    }


@triton.jit(launch_metadata=_metadata)
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


def step_output(inputs: SSDInputs, states: torch.Tensor, config: RecurrentConfig) -> torch.Tensor:
    """Launch the kernel on the current device.  states: after the token, (b, h, p, n) fp32."""
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
