"""The oracle of the SSD operator: the plain recurrence, and a chunked form for long inputs.

    dt_t  = clamp(softplus(dt_t + dt_bias), *dt_limit)
    h_t   = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T
    out_t = (h_t C_t + D x_t) * silu(z_t)

Both use only torch operations, run on CPU and GPU, and compute in a dtype that the caller chooses.
The chunked form is that of Dao and Gu 2024 (arXiv:2405.21060), section 6, with one change: the
decay between two positions is the exponential of the *sum* of the steps between them.  In a
difference of two cumulative sums, one huge step would cancel the digits of later ones.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ssdprof.kernels.oracle import (
    ORACLE_CHUNK,
    Span,
    blocks_of,
    chunked,
    initial_states,
    register_oracle,
    segment_sums,
    spans_of,
)
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput

# as A = -inf: the decay is 0 at every step; but times a step of 0, which decays by nothing, it is 0
_FORGETS = -1e30


def ssd_recurrence(inputs: SSDInputs, dtype: torch.dtype = torch.float64) -> SSDOutput:
    """The recurrence, position by position, for short inputs.  Output and final states in
    `dtype`.
    """
    out = torch.empty(inputs.x.shape, dtype=dtype, device=inputs.x.device)
    final_states = initial_states(inputs, dtype)
    for span in spans_of(inputs):
        state = final_states[span.sequence]
        for t in range(span.start, span.stop):
            here = Span(sequence=span.sequence, batch=span.batch, start=t, stop=t + 1)
            (x,), (dt,), A, (B,), (C,) = _load(inputs, here, dtype)
            group_of_head = (
                torch.arange(state.shape[0], device=state.device) // inputs.heads_per_group
            )
            B, C = B[group_of_head], C[group_of_head]  # (h, n)
            state = (
                state * (dt * A).exp()[:, None, None]
                + (dt[:, None] * x)[:, :, None] * B[:, None, :]
            )
            out[span.batch, t] = _skip_and_gate(
                inputs, here, (state * C[:, None, :]).sum(-1)[None]
            )[0]
        final_states[span.sequence] = state
    return SSDOutput(out, final_states)


def _load(inputs: SSDInputs, span: Span, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x (l, h, p), dt (l, h) after bias, softplus and limit, A (h), B and C (l, g, n) of the span,
    in `dtype`.
    """
    x, dt, B, C = (
        tensor[span.batch, span.start : span.stop].to(dtype)
        for tensor in (inputs.x, inputs.dt, inputs.B, inputs.C)
    )
    if inputs.dt_bias is not None:
        dt = dt + inputs.dt_bias.to(dtype)
    if inputs.dt_softplus:
        # log(exp(dt) + exp(0)), without the threshold of torch's softplus, which is the identity
        # above 20
        dt = torch.logaddexp(dt, torch.zeros_like(dt))
    return x, dt.clamp(*inputs.dt_limit), inputs.A.to(dtype).clamp(min=_FORGETS), B, C


def _skip_and_gate(inputs: SSDInputs, span: Span, out: Tensor) -> Tensor:
    """(out + D x) * silu(z) of the span.  D and z are optional."""
    if inputs.D is not None:
        x = inputs.x[span.batch, span.start : span.stop].to(out.dtype)
        out = out + inputs.D.to(out.dtype).reshape(x.shape[1], -1) * x
    if inputs.z is not None:
        out = out * torch.nn.functional.silu(
            inputs.z[span.batch, span.start : span.stop].to(out.dtype)
        )
    return out


def _chunked(
    inputs: SSDInputs, span: Span, dtype: torch.dtype, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Output (l, h, p) and the state (h, p, n) after the span.

    Heads are split into (g, r), with r heads per group.  Every product with B or C is then one
    matrix product per chunk and group, and B and C are not repeated.
    """
    x, dt, A, B, C = _load(inputs, span, dtype)
    (l, h, p), (g, n) = x.shape, B.shape[1:]
    r, q, c = h // g, ORACLE_CHUNK, -(-l // ORACLE_CHUNK)
    pad = c * q - l  # positions with dt = 0: they neither decay nor add

    def chunks(tensor: Tensor) -> Tensor:
        """(l, ...) -> (c, q, ...)"""
        rest = tensor.shape[1:]
        return torch.cat([tensor, tensor.new_zeros(pad, *rest)]).reshape(c, q, *rest)

    x = chunks(x).reshape(c, q, g, r, p)
    B, C = chunks(B).transpose(1, 2), chunks(C).transpose(1, 2)  # (c, g, q, n)
    dt = chunks(dt).reshape(c, q, g, r).permute(0, 2, 3, 1)  # (c, g, r, q)
    steps = dt * A.reshape(g, r, 1)  # log of the decay at each position
    log_decay = segment_sums(steps)  # (c, g, r, q, s)

    # within a chunk: contributions of position s to position q
    scores = (C @ B.mT)[:, :, None] * log_decay.exp() * dt[..., None, :]  # (c, g, r, q, s)
    out = scores @ x.permute(0, 2, 3, 1, 4)  # (c, g, r, q, p)

    # from chunk to chunk
    # (c, g, s, r): up to the chunk's end
    weights = (log_decay[..., -1, :].exp() * dt).permute(0, 1, 3, 2)
    weighted_x = (x.transpose(1, 2) * weights[..., None]).reshape(c, g, q, r * p)
    chunk_states = (B.mT @ weighted_x).reshape(c, g, n, r, p)
    since_start = steps.cumsum(-1)  # (c, g, r, q)
    chunk_decay = since_start[..., -1].exp()[:, :, None, :, None]  # (c, g, 1, r, 1)
    carried = state.reshape(g, r, p, n).permute(0, 3, 1, 2)  # (g, n, r, p)
    entering = torch.empty_like(chunk_states)
    for i in range(c):
        entering[i] = carried
        carried = carried * chunk_decay[i] + chunk_states[i]
    from_before = (C @ entering.reshape(c, g, n, r * p)).reshape(c, g, q, r, p)
    out += from_before.transpose(2, 3) * since_start.exp()[..., None]

    out = out.permute(0, 3, 1, 2, 4).reshape(c * q, h, p)[:l]
    return _skip_and_gate(inputs, span, out), carried.permute(0, 2, 3, 1).reshape(h, p, n)


# Memory for one block is about 10 * block * h * (p + ORACLE_CHUNK + p * n / ORACLE_CHUNK) elements
# of the dtype.
ssd_blocks = partial(blocks_of, _chunked)
ssd_chunked = partial(chunked, _chunked)
ssd_reference = register_oracle("ssd", _chunked)
