"""The oracle of the SSD operator: the plain recurrence, and a chunked form for long inputs.

    dt_t  = clamp(softplus(dt_t + dt_bias), *dt_limit)
    h_t   = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T
    out_t = (h_t C_t + D x_t) * silu(z_t)

Both use only torch operations, run on CPU and GPU, and compute in a dtype that the caller chooses.
The chunked form is that of Dao and Gu 2024 (arXiv:2405.21060), section 6, with one change: the
decay between two positions is the exponential of the *sum* of the steps between them.  In a
difference of two cumulative sums, one huge step would cancel the digits of later ones.
"""

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
    split_chunks,
)
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput

# The least A: lower ones, also -inf, are replaced by it.  Its decay is 0 in fp64 at every step with
# dt above 1e-27.  In contrast to that of -inf, its product with dt = 0 is 0, no decay, and not NaN.
_FORGETS = -1e30


def ssd_recurrence(inputs: SSDInputs, dtype: torch.dtype = torch.float64) -> SSDOutput:
    """The recurrence, position by position, for short inputs.  Output and final states are in
    `dtype`.  Returns only the final states, also for inputs with `state_every`.
    """
    out = torch.empty(inputs.x.shape, dtype=dtype, device=inputs.x.device)
    final_states = initial_states(inputs, dtype)
    for span in spans_of(inputs):
        state = final_states[span.sequence]  # (h, p, n)
        x, dt, A, B, C = _load(inputs, span, dtype)
        decay = (dt * A).exp()[..., None, None]  # (l, h, 1, 1)
        # B and C of each head, (l, h, n), and dt x
        B, C = (rows.repeat_interleave(inputs.heads_per_group, 1) for rows in (B, C))
        scaled_x = dt[..., None] * x
        y = torch.empty_like(x)
        for t in range(span.length):
            state = state * decay[t] + scaled_x[t, :, :, None] * B[t, :, None, :]
            y[t] = (state * C[t, :, None, :]).sum(-1)
        span.of(out).copy_(_skip_and_gate(inputs, span, y))
        final_states[span.sequence] = state
    return SSDOutput(out, final_states)


def _load(inputs: SSDInputs, span: Span, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x (l, h, p), dt (l, h) after bias, softplus and limit, A (h) of at least _FORGETS, B and C
    (l, g, n) of the span, in `dtype`.
    """
    x, dt, B, C = (
        span.of(tensor).to(dtype) for tensor in (inputs.x, inputs.dt, inputs.B, inputs.C)
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
        x = span.of(inputs.x).to(out.dtype)
        out = out + inputs.D.to(out.dtype).reshape(x.shape[1], -1) * x
    if inputs.z is not None:
        out = out * torch.nn.functional.silu(span.of(inputs.z).to(out.dtype))
    return out


def _chunked(
    inputs: SSDInputs, span: Span, dtype: torch.dtype, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The chunked form: output (l, h, p), and the state (h, p, n) after the span.

    Heads are split into (g, r), with r heads per group.  Every product with B or C is then one
    matrix product per chunk and group, and B and C are not repeated for each head.

    state: (h, p, n), before the span
    """
    x, dt, A, B, C = _load(inputs, span, dtype)
    l, h, p = x.shape
    g, n = B.shape[1:]
    r = h // g
    q = ORACLE_CHUNK

    # padding has dt = 0: it neither decays nor adds
    x, dt, B, C = (split_chunks(rows, q) for rows in (x, dt, B, C))  # (c, heads, q, ...)
    c = len(x)
    x = x.reshape(c, g, r, q, p)
    dt = dt.reshape(c, g, r, q)
    steps = dt * A.reshape(g, r, 1)  # log of the decay at each position
    log_decay = segment_sums(steps)  # (c, g, r, q, s)

    # contributions of positions s of a chunk to its positions q
    scores = (C @ B.mT)[:, :, None] * log_decay.exp() * dt[..., None, :]  # (c, g, r, q, s)
    out = scores @ x  # (c, g, r, q, p)

    # the state that each chunk adds, (c, g, n, r, p): dt and the decay up to the chunk's end are
    # weights (c, g, s, r) of x
    weights = (log_decay[..., -1, :].exp() * dt).permute(0, 1, 3, 2)
    weighted_x = (x.permute(0, 1, 3, 2, 4) * weights[..., None]).reshape(c, g, q, r * p)
    chunk_states = (B.mT @ weighted_x).reshape(c, g, n, r, p)

    # the state that enters each chunk
    since_start = steps.cumsum(-1)  # (c, g, r, q)
    chunk_decay = since_start[..., -1].exp()[:, :, None, :, None]  # (c, g, 1, r, 1)
    carried = state.reshape(g, r, p, n).permute(0, 3, 1, 2)  # (g, n, r, p)
    entering = torch.empty_like(chunk_states)
    for i in range(c):
        entering[i] = carried
        carried = carried * chunk_decay[i] + chunk_states[i]

    # contributions of that state to the output
    from_before = (C @ entering.reshape(c, g, n, r * p)).reshape(c, g, q, r, p)
    out += from_before.transpose(2, 3) * since_start.exp()[..., None]

    out = out.permute(0, 3, 1, 2, 4).reshape(c * q, h, p)[:l]
    return _skip_and_gate(inputs, span, out), carried.permute(0, 2, 3, 1).reshape(h, p, n)


# The oracle block by block, joined to one output in a dtype of choice, and as the implementation
# "reference" (`kernels/oracle.py`).  At its peak, `_chunked` holds about three times
# block * h * (p + ORACLE_CHUNK + p * n / ORACLE_CHUNK) numbers of the dtype: x, scores and states.
ssd_blocks = partial(blocks_of, _chunked)
ssd_chunked = partial(chunked, _chunked)
ssd_reference = register_oracle("ssd", _chunked)
