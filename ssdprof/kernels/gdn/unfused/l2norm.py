# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Divides rows of q or k by their norm, before the stages of unfused GDN."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ssdprof.kernels.functions import in_units, ptr_offset
from ssdprof.kernels.gdn import config
from ssdprof.kernels.launch import launch
from ssdprof.kernels.tensors import strides_unit

L2NORM_EPS = tl.constexpr(1e-6)

STAGES = {"_gdn_qk_l2norm_kernel": "qk_l2norm"}


@triton.jit
def _gdn_qk_l2norm_kernel(tensors, strides, length, heads, rows, S: tl.constexpr):
    x_ptr, y_ptr = tensors
    (x_strides,) = strides
    o_r = tl.program_id(0).to(tl.int64) * S.BLOCK_ROWS + tl.arange(0, S.BLOCK_ROWS)
    o_k = tl.arange(0, S.BLOCK_K)
    m = (o_r < rows)[:, None] & (o_k < S.KEY_DIM)[None, :]
    i_h, i_bt = o_r % heads, o_r // heads
    index = ((i_bt // length)[:, None], (i_bt % length)[:, None], i_h[:, None], o_k[None, :])
    offset = ptr_offset(index, in_units(x_strides, S.UNIT))
    b_x = tl.load(x_ptr + offset, mask=m, other=0.0).to(tl.float32)  # [BLOCK_ROWS, BLOCK_K]
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=1) + L2NORM_EPS)[:, None]
    tl.store(y_ptr + o_r[:, None] * S.KEY_DIM + o_k[None, :], b_y.to(y_ptr.dtype.element_ty), mask=m)


def qk_l2norm(x: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Before the stages, if the call normalises q and k: y[t] = x[t] / sqrt(sum_k x[t, k]^2 + 1e-6).

    In:   x (B, T, H, K)
    Out:  y (B, T, H, K), contiguous, in `dtype`
    Grid: (blocks of B * T * H rows)
    """
    batch, length, heads, key_dim = x.shape
    options = config.qk_l2norm_options(key_dim)
    y, rows = torch.empty(x.shape, device=x.device, dtype=dtype), batch * length * heads
    launch(
        _gdn_qk_l2norm_kernel, triton.cdiv(rows, options["BLOCK_ROWS"]), (x, y), ((x.stride(),), length, heads, rows),
        KEY_DIM=key_dim, UNIT=strides_unit(x), BLOCK_K=triton.next_power_of_2(key_dim), **options,
    )  # fmt: skip
    return y
