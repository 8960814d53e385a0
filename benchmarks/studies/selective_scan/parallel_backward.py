# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Gradients of the selective scan, by an associative scan of each tile from its end, with the kept states.

    dh[t] = decay[t+1] * dh[t+1] + C[t] * dy[t]
    dx[t] = dh[t] . B[t],    ddecay[t] = dh[t] . h[t-1],    dB[t] = dh[t] * x[t],    dC[t] = h[t] * dy[t]

In:   x, dy (b, l, h) | decay (b, l, h) fp32 | B, C, states (b, l, h, n)
Out:  dx, ddecay, dB, dC, each as x, decay, B, C
Grid: (b * h).  One program owns one head of one sequence and walks over its tiles, from the last to the first; dh
      passes from tile to tile in fp32.
Oracle: `reference.py`.  The same bits in every call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from selective_scan.inputs import ScanInputs
from selective_scan.parallel import CONFIG, then
from selective_scan.sequential import ScanConfig, metadata
from ssdprof.kernels.functions import ptr_offset
from ssdprof.kernels.launch import launch


@triton.jit(launch_metadata=metadata, do_not_specialize=["nheads", "seqlen"])
def _parallel_backward_kernel(
    x_ptr, decay_ptr, B_ptr, C_ptr, dy_ptr, states_ptr, dx_ptr, ddecay_ptr, dB_ptr, dC_ptr,
    x_strides, decay_strides, B_strides, C_strides, dy_strides, states_strides,
    dx_strides, ddecay_strides, dB_strides, dC_strides,
    nheads, seqlen,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    i_b, i_h = tl.program_id(0) // nheads, tl.program_id(0) % nheads
    o_t, o_n = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_N)
    after = tl.zeros((BLOCK_N,), dtype=tl.float32)  # dh of the position after the tile
    tiles = tl.cdiv(seqlen, BLOCK_T)
    for back in range(0, tiles):
        o_l = (tiles - 1 - back) * BLOCK_T + o_t
        m_l, m_n = o_l < seqlen, (o_n < N)[None, :]
        m = m_l[:, None] & m_n

        # --- dh of every position
        dy = tl.load(dy_ptr + ptr_offset((i_b, o_l, i_h), dy_strides), mask=m_l, other=0.0).to(tl.float32)
        next_decay_offset = ptr_offset((i_b, o_l + 1, i_h), decay_strides)
        next_decay = tl.load(decay_ptr + next_decay_offset, mask=o_l + 1 < seqlen, other=1.0)
        b_C = tl.load(C_ptr + ptr_offset((i_b, o_l[:, None], i_h, o_n[None, :]), C_strides), mask=m, other=0.0)
        added = b_C.to(tl.float32) * dy[:, None]
        next_decays = tl.broadcast_to(next_decay[:, None], added.shape)
        decays, added = tl.associative_scan((next_decays, added), 0, then, reverse=True)
        dh = decays * after[None, :] + added  # [BLOCK_T, BLOCK_N]
        after = tl.sum(tl.where(o_t[:, None] == 0, dh, 0.0), 0)

        # --- gradients of the inputs
        b_B = tl.load(B_ptr + ptr_offset((i_b, o_l[:, None], i_h, o_n[None, :]), B_strides), mask=m, other=0.0)
        dx = tl.sum(dh * b_B.to(tl.float32), 1)
        tl.store(dx_ptr + ptr_offset((i_b, o_l, i_h), dx_strides), dx.to(dx_ptr.dtype.element_ty), mask=m_l)
        x = tl.load(x_ptr + ptr_offset((i_b, o_l, i_h), x_strides), mask=m_l, other=0.0).to(tl.float32)
        dB_offset = ptr_offset((i_b, o_l[:, None], i_h, o_n[None, :]), dB_strides)
        tl.store(dB_ptr + dB_offset, (dh * x[:, None]).to(dB_ptr.dtype.element_ty), mask=m)

        before_offset = ptr_offset((i_b, o_l[:, None] - 1, i_h, o_n[None, :]), states_strides)
        before = tl.load(states_ptr + before_offset, mask=m & (o_l > 0)[:, None], other=0.0)
        ddecay = tl.sum(dh * before.to(tl.float32), 1)
        tl.store(ddecay_ptr + ptr_offset((i_b, o_l, i_h), ddecay_strides), ddecay, mask=m_l)
        states_offset = ptr_offset((i_b, o_l[:, None], i_h, o_n[None, :]), states_strides)
        h = tl.load(states_ptr + states_offset, mask=m, other=0.0).to(tl.float32)
        dC_offset = ptr_offset((i_b, o_l[:, None], i_h, o_n[None, :]), dC_strides)
        tl.store(dC_ptr + dC_offset, (h * dy[:, None]).to(dC_ptr.dtype.element_ty), mask=m)


def parallel_backward(
    inputs: ScanInputs, dy: torch.Tensor, states: torch.Tensor, *, config: ScanConfig | None = None
) -> tuple[torch.Tensor, ...]:
    """Returns (dx, ddecay, dB, dC).  states: from the forward kernel."""
    config = config or CONFIG
    batch, _, nheads, n = inputs.B.shape
    gradients = tuple(torch.empty_like(tensor) for tensor in inputs.tensors)
    tensors = (*inputs.tensors, dy, states, *gradients)
    launch(
        _parallel_backward_kernel,
        batch * nheads,
        tensors,
        (*(tensor.stride() for tensor in tensors), nheads, inputs.B.shape[1]),
        N=n, BLOCK_N=triton.next_power_of_2(n), BLOCK_T=config.block_t,
        num_warps=config.num_warps,
    )  # fmt: skip
    return gradients
