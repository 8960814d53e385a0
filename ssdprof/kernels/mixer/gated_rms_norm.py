# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The gated RMS norm after an operator, over groups of neighbouring channels.

    gate first:  y = x * silu(gate),  out = y / sqrt(mean(y^2) + eps) * weight        Mamba-2
    norm first:  out = x / sqrt(mean(x^2) + eps) * weight * silu(gate)                gated delta rule

In:   x, gate (l, d) or (b, l, d), any strides | weight (d)
Out:  out, as x, contiguous
Grid: (blocks of b * l * groups rows).  One program owns whole groups: rows of group_size channels.
Computes in fp32 and rounds once.  Oracle: `normed` in tests/kernels/test_gated_rms_norm.py.
Source: Dao and Gu 2024 (arXiv:2405.21060), section 7.1; Yang et al. 2024 (arXiv:2412.06464), section 3.4.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ssdprof.kernels.functions import TL_DTYPE, ptr_offset
from ssdprof.kernels.launch import Described, described, launch
from ssdprof.kernels.registry import UnsupportedError

MAX_GROUP_SIZE = 32768


@described
def _metadata(tensors: Any, _S: Any) -> Described:
    x, gate, *_ = tensors
    return f"{tuple(x.shape)}", 8 * x.numel(), x.numel() * (2 * x.element_size() + gate.element_size())


@triton.jit(launch_metadata=_metadata)
def _gated_rms_norm_kernel(tensors, strides, length, groups, rows, eps, S: tl.constexpr):
    x_ptr, gate_ptr, weight_ptr, out_ptr = tensors
    x_strides, gate_strides, weight_strides, out_strides = strides
    o_r = tl.program_id(0).to(tl.int64) * S.BLOCK_ROWS + tl.arange(0, S.BLOCK_ROWS)
    o_c = tl.arange(0, S.BLOCK_G)
    m = (o_r < rows)[:, None] & (o_c < S.GROUP_SIZE)[None, :]
    i_g, i_bl = o_r % groups, o_r // groups
    channel = i_g[:, None] * S.GROUP_SIZE + o_c[None, :]
    index = ((i_bl // length)[:, None], (i_bl % length)[:, None], channel)

    b_x = tl.load(x_ptr + ptr_offset(index, x_strides), mask=m, other=0.0).to(tl.float32)  # [BLOCK_ROWS, BLOCK_G]
    b_gate = tl.load(gate_ptr + ptr_offset(index, gate_strides), mask=m, other=0.0).to(tl.float32)
    b_weight = tl.load(weight_ptr + ptr_offset((channel,), weight_strides), mask=m, other=0.0).to(tl.float32)
    b_gate = b_gate * tl.sigmoid(b_gate)
    if not S.NORM_FIRST:
        b_x *= b_gate
    b_x *= tl.rsqrt(tl.sum(b_x * b_x, axis=1) / S.GROUP_SIZE + eps)[:, None] * b_weight
    if S.NORM_FIRST:
        b_x *= b_gate
    tl.store(out_ptr + ptr_offset(index, out_strides), b_x.to(out_ptr.dtype.element_ty), mask=m)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float, group_size: int, norm_first: bool
) -> torch.Tensor:  # fmt: skip
    """Launch the kernel.  Shapes are in the module docstring.

    Raises ValueError for shapes that do not fit together, UnsupportedError for dtypes and sizes without support.
    """
    # about 4,096 channels per program, 32 per thread; a larger group has its own program, with more threads
    block = triton.next_power_of_2(group_size)
    block_rows, num_warps = max(1, 4096 // block), min(16, max(4, block // 1024))
    width = x.shape[-1]
    if x.dtype not in TL_DTYPE or gate.dtype not in TL_DTYPE:
        raise UnsupportedError(f"gated_rms_norm: x and gate are fp32, fp16 or bf16, not {x.dtype} and {gate.dtype}")
    if group_size > MAX_GROUP_SIZE:
        raise UnsupportedError(f"gated_rms_norm: groups of at most {MAX_GROUP_SIZE} channels, not {group_size}")
    if x.ndim not in (2, 3) or gate.shape != x.shape or weight.shape != (width,) or width % group_size:
        raise ValueError(
            f"x {tuple(x.shape)}, gate {tuple(gate.shape)}, weight {tuple(weight.shape)} and groups of {group_size} "
            "do not fit together"
        )
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    rows = x.numel() // group_size
    launch(
        _gated_rms_norm_kernel,
        triton.cdiv(rows, block_rows),
        (x, gate, weight, out),
        (
            (_three(x), _three(gate), weight.stride(), _three(out)), x.shape[-2], width // group_size,
            rows, float(eps),
        ),
        NORM_FIRST=norm_first, GROUP_SIZE=group_size, BLOCK_ROWS=block_rows,
        BLOCK_G=block, num_warps=num_warps,
    )  # fmt: skip
    return out


def _three(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of (b, l, d); without a batch dimension, as for a batch of one."""
    return tensor.stride() if tensor.ndim == 3 else (0, *tensor.stride())
