# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Selective scan, forward, by an associative scan of each tile.

    h[t] = decay[t] * h[t-1] + B[t] * x[t],    y[t] = C[t] . h[t]
    (a, s) then (b, t)  ->  (a b, b s + t)        with decays a, b and summands s, t

In:   x (b, l, h) | decay (b, l, h) fp32 | B, C (b, l, h, n)
Out:  y (b, l, h) | states (b, l, h, n), every h[t] in the dtype of B, for the gradients; only y if they are not kept
Grid: (b * h).  One program owns one head of one sequence and walks over tiles of BLOCK_T positions; the state passes
      from tile to tile in fp32.
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

CONFIG = ScanConfig(num_warps=4, num_stages=2)


@triton.jit
def then(first_decay, first_added, second_decay, second_added):
    """Two steps as one."""
    return first_decay * second_decay, first_added * second_decay + second_added


@triton.jit(launch_metadata=metadata, do_not_specialize=["nheads", "seqlen"])
def _parallel_kernel(
    x_ptr, decay_ptr, B_ptr, C_ptr, y_ptr, states_ptr,
    x_strides, decay_strides, B_strides, C_strides, y_strides, states_strides,
    nheads, seqlen,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    i_b, i_h = tl.program_id(0) // nheads, tl.program_id(0) % nheads
    o_t, o_n = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_N)
    entering = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for first in tl.range(0, seqlen, BLOCK_T, num_stages=NUM_STAGES):
        o_l = first + o_t
        m_l = o_l < seqlen
        m = m_l[:, None] & (o_n < N)[None, :]
        x = tl.load(x_ptr + ptr_offset((i_b, o_l, i_h), x_strides), mask=m_l, other=0.0).to(tl.float32)
        decay = tl.load(decay_ptr + ptr_offset((i_b, o_l, i_h), decay_strides), mask=m_l, other=1.0)
        b_B = tl.load(B_ptr + ptr_offset((i_b, o_l[:, None], i_h, o_n[None, :]), B_strides), mask=m, other=0.0)
        b_C = tl.load(C_ptr + ptr_offset((i_b, o_l[:, None], i_h, o_n[None, :]), C_strides), mask=m, other=0.0)
        added = b_B.to(tl.float32) * x[:, None]
        decays, added = tl.associative_scan((tl.broadcast_to(decay[:, None], added.shape), added), 0, then)
        h = decays * entering[None, :] + added  # [BLOCK_T, BLOCK_N]
        y = tl.sum(b_C.to(tl.float32) * h, 1)
        tl.store(y_ptr + ptr_offset((i_b, o_l, i_h), y_strides), y.to(y_ptr.dtype.element_ty), mask=m_l)
        if states_ptr is not None:
            states_offset = ptr_offset((i_b, o_l[:, None], i_h, o_n[None, :]), states_strides)
            tl.store(states_ptr + states_offset, h.to(states_ptr.dtype.element_ty), mask=m)
        # positions past the end add nothing and decay nothing
        entering = tl.sum(tl.where(o_t[:, None] == BLOCK_T - 1, h, 0.0), 0)


def parallel(
    inputs: ScanInputs, *, keeps_states: bool = True, config: ScanConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns (y, states)."""
    config = config or CONFIG
    batch, seqlen, nheads, n = inputs.B.shape
    y = torch.empty_like(inputs.x)
    states = torch.empty_like(inputs.B) if keeps_states else None
    tensors = (*inputs.tensors, y, states)
    launch(
        _parallel_kernel,
        batch * nheads,
        tensors,
        (*(() if tensor is None else tensor.stride() for tensor in tensors), nheads, seqlen),
        N=n, BLOCK_N=triton.next_power_of_2(n), BLOCK_T=config.block_t, NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
    )  # fmt: skip
    return y, states
