# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Selective scan, forward, position after position.

    h[t] = decay[t] * h[t-1] + B[t] * x[t],    y[t] = C[t] . h[t]

In:   x (b, l, h) | decay (b, l, h) fp32 | B, C (b, l, h, n)
Out:  y (b, l, h) | entering (b, tiles, h, n) fp32: the state before each tile, for the gradients
Grid: (b * h).  One program owns one head of one sequence and walks over its positions; the state stays in registers.
Oracle: `reference.py`.  The same bits in every call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from selective_scan.inputs import ScanInputs
from ssdprof.kernels.functions import ptr_offset
from ssdprof.kernels.launch import launch


@dataclass(frozen=True, kw_only=True)
class ScanConfig:
    """block_t: positions of a tile.  num_stages: positions, or tiles, that loads run ahead."""

    block_t: int = 128
    num_warps: int = 1
    num_stages: int = 4


def metadata(_grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """For a profiler: five operations per element of a state; every tensor read or written once."""
    tensors = [value for name, value in args.items() if name.endswith("_ptr") and value is not None]
    return {
        "name": f"{kernel.name} {'x'.join(map(str, args['B_ptr'].shape))}",
        "flops": 5 * args["B_ptr"].numel(),
        "bytes": sum(t.numel() * t.element_size() for t in tensors),
    }


@triton.jit(launch_metadata=metadata, do_not_specialize=["nheads", "seqlen"])
def _sequential_kernel(
    x_ptr, decay_ptr, B_ptr, C_ptr, y_ptr, entering_ptr,
    x_strides, decay_strides, B_strides, C_strides, y_strides, entering_strides,
    nheads, seqlen,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    i_b, i_h = tl.program_id(0) // nheads, tl.program_id(0) % nheads
    o_n = tl.arange(0, BLOCK_N)
    m = o_n < N
    h = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for i_tile in range(0, tl.cdiv(seqlen, BLOCK_T)):
        tl.store(entering_ptr + ptr_offset((i_b, i_tile, i_h, o_n), entering_strides), h, mask=m)
        first = i_tile * BLOCK_T
        for t in tl.range(first, tl.minimum(first + BLOCK_T, seqlen), num_stages=NUM_STAGES):
            x = tl.load(x_ptr + ptr_offset((i_b, t, i_h), x_strides)).to(tl.float32)
            decay = tl.load(decay_ptr + ptr_offset((i_b, t, i_h), decay_strides))
            b_B = tl.load(B_ptr + ptr_offset((i_b, t, i_h, o_n), B_strides), mask=m, other=0.0).to(tl.float32)
            b_C = tl.load(C_ptr + ptr_offset((i_b, t, i_h, o_n), C_strides), mask=m, other=0.0).to(tl.float32)
            h = decay * h + b_B * x
            y = tl.sum(b_C * h, 0)
            tl.store(y_ptr + ptr_offset((i_b, t, i_h), y_strides), y.to(y_ptr.dtype.element_ty))


def sequential(inputs: ScanInputs, *, config: ScanConfig | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (y, entering)."""
    config = config or ScanConfig()
    batch, seqlen, nheads, n = inputs.B.shape
    y = torch.empty_like(inputs.x)
    tiles = triton.cdiv(seqlen, config.block_t)
    entering = torch.empty(batch, tiles, nheads, n, dtype=torch.float32, device=y.device)
    tensors = (*inputs.tensors, y, entering)
    launch(
        _sequential_kernel,
        batch * nheads,
        tensors,
        (*(tensor.stride() for tensor in tensors), nheads, seqlen),
        N=n, BLOCK_N=triton.next_power_of_2(n), BLOCK_T=config.block_t, NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
    )  # fmt: skip
    return y, entering
