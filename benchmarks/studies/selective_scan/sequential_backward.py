# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Gradients of the selective scan, position after position, from the states before the tiles.

    dh[t] = decay[t+1] * dh[t+1] + C[t] * dy[t]
    dx[t] = dh[t] . B[t],    ddecay[t] = dh[t] . h[t-1],    dB[t] = dh[t] * x[t],    dC[t] = h[t] * dy[t]

In each tile, from the last to the first, the states are computed again and stored, then read in reverse order.

In:   x, dy (b, l, h) | decay (b, l, h) fp32 | B, C (b, l, h, n) | entering (b, tiles, h, n) fp32
Out:  dx, ddecay, dB, dC, each as x, decay, B, C
Grid: (b * h).  One program owns one head of one sequence, and a row of the workspace (b * h, BLOCK_T, n) fp32.
Oracle: `reference.py`.  The same bits in every call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from selective_scan.inputs import ScanInputs
from selective_scan.sequential import ScanConfig, metadata
from ssdprof.kernels.functions import ptr_offset
from ssdprof.kernels.launch import launch


@triton.jit(launch_metadata=metadata, do_not_specialize=["nheads", "seqlen"])
def _sequential_backward_kernel(
    x_ptr, decay_ptr, B_ptr, C_ptr, dy_ptr, entering_ptr, dx_ptr, ddecay_ptr, dB_ptr, dC_ptr, aside_ptr,
    x_strides, decay_strides, B_strides, C_strides, dy_strides, entering_strides,
    dx_strides, ddecay_strides, dB_strides, dC_strides, aside_strides,
    nheads, seqlen,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    i_bh = tl.program_id(0)
    i_b, i_h = i_bh // nheads, i_bh % nheads
    o_n = tl.arange(0, BLOCK_N)
    m = o_n < N
    passed = tl.zeros((BLOCK_N,), dtype=tl.float32)  # decay[t+1] * dh[t+1]
    tiles = tl.cdiv(seqlen, BLOCK_T)
    for back in range(0, tiles):
        i_tile = tiles - 1 - back
        first = i_tile * BLOCK_T
        length = tl.minimum(BLOCK_T, seqlen - first)
        entering = tl.load(entering_ptr + ptr_offset((i_b, i_tile, i_h, o_n), entering_strides), mask=m, other=0.0)

        # --- recompute the states of the tile
        h = entering
        for i_t in tl.range(0, length, num_stages=NUM_STAGES):
            t = first + i_t
            x = tl.load(x_ptr + ptr_offset((i_b, t, i_h), x_strides)).to(tl.float32)
            decay = tl.load(decay_ptr + ptr_offset((i_b, t, i_h), decay_strides))
            b_B = tl.load(B_ptr + ptr_offset((i_b, t, i_h, o_n), B_strides), mask=m, other=0.0).to(tl.float32)
            h = decay * h + b_B * x
            tl.store(aside_ptr + ptr_offset((i_bh, i_t, o_n), aside_strides), h, mask=m)
        tl.debug_barrier()  # another thread may load the data that this one has stored

        # --- from the last position to the first
        for i_back in tl.range(0, length, num_stages=NUM_STAGES):
            i_t = length - 1 - i_back
            t = first + i_t
            x = tl.load(x_ptr + ptr_offset((i_b, t, i_h), x_strides)).to(tl.float32)
            decay = tl.load(decay_ptr + ptr_offset((i_b, t, i_h), decay_strides))
            dy = tl.load(dy_ptr + ptr_offset((i_b, t, i_h), dy_strides)).to(tl.float32)
            b_B = tl.load(B_ptr + ptr_offset((i_b, t, i_h, o_n), B_strides), mask=m, other=0.0).to(tl.float32)
            b_C = tl.load(C_ptr + ptr_offset((i_b, t, i_h, o_n), C_strides), mask=m, other=0.0).to(tl.float32)
            h = tl.load(aside_ptr + ptr_offset((i_bh, i_t, o_n), aside_strides), mask=m, other=0.0)
            kept = aside_ptr + ptr_offset((i_bh, i_t - 1, o_n), aside_strides)
            before = tl.where(i_t > 0, tl.load(kept, mask=m & (i_t > 0), other=0.0), entering)
            dh = passed + b_C * dy
            dx, ddecay = tl.sum(dh * b_B, 0), tl.sum(dh * before, 0)
            tl.store(dx_ptr + ptr_offset((i_b, t, i_h), dx_strides), dx.to(dx_ptr.dtype.element_ty))
            tl.store(ddecay_ptr + ptr_offset((i_b, t, i_h), ddecay_strides), ddecay)
            dB_offset = ptr_offset((i_b, t, i_h, o_n), dB_strides)
            tl.store(dB_ptr + dB_offset, (dh * x).to(dB_ptr.dtype.element_ty), mask=m)
            dC_offset = ptr_offset((i_b, t, i_h, o_n), dC_strides)
            tl.store(dC_ptr + dC_offset, (h * dy).to(dC_ptr.dtype.element_ty), mask=m)
            passed = decay * dh
        tl.debug_barrier()  # before the next tile's states overwrite these


def sequential_backward(
    inputs: ScanInputs, dy: torch.Tensor, entering: torch.Tensor, *, config: ScanConfig | None = None
) -> tuple[torch.Tensor, ...]:
    """Returns (dx, ddecay, dB, dC).  entering: from the forward kernel with the same block_t."""
    config = config or ScanConfig()
    batch, seqlen, nheads, n = inputs.B.shape
    if entering.shape[1] != triton.cdiv(seqlen, config.block_t):
        raise ValueError(f"entering is of {entering.shape[1]} tiles, not of block_t {config.block_t}")
    gradients = tuple(torch.empty_like(tensor) for tensor in inputs.tensors)
    aside = torch.empty(batch * nheads, config.block_t, n, dtype=torch.float32, device=dy.device)
    tensors = (*inputs.tensors, dy, entering, *gradients, aside)
    launch(
        _sequential_backward_kernel,
        batch * nheads,
        tensors,
        (*(tensor.stride() for tensor in tensors), nheads, seqlen),
        N=n, BLOCK_N=triton.next_power_of_2(n), BLOCK_T=config.block_t, NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
    )  # fmt: skip
    return gradients
