"""The oracle of the gated delta rule: the plain recurrence, and a chunked form for long inputs.

    u_t   = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)        corrected value
    S_t   = exp(g_t) S_{t-1} + k_t u_t^T
    out_t = S_t^T (scale q_t)

A g_t above 0 counts as 0.  Both forms use only torch operations, run on CPU and GPU, and compute in
a dtype that the caller chooses.

Chunked form.  With d_ts = exp(g_{s+1} + ... + g_t), d_t the same from the chunk's start, and S the
state that enters the chunk,

    S_t = d_t S + sum_{s<=t} d_ts k_s u_s^T
    u_t = beta_t (v_t - d_t S^T k_t - sum_{s<t} d_ts (k_t . k_s) u_s)

so u solves a unit lower triangular system, (I + L) U = beta V - (beta d K) S with L_ts = beta_t
d_ts (k_t . k_s).  Both right-hand sides are solved for all chunks at once, U = U0 - W S, and only S
passes from chunk to chunk.
Source: Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464), section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
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

# (q, k, g, beta) of chunks -> scores and L with their decays (the solver adds the identity), and
# the decays since the chunk's start and to its end, of a head or of each channel
Decayed = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def gdn_recurrence(inputs: GDNInputs, dtype: torch.dtype = torch.float64) -> GDNOutput:
    """The recurrence, position by position, for short inputs; g of a head, or of each of its K
    channels.

    Output and final states in `dtype`.
    """
    out = torch.empty(inputs.v.shape, dtype=dtype, device=inputs.v.device)
    final_states = initial_states(inputs, dtype)
    for span in spans_of(inputs):
        state, (all_q, all_k, all_v, g, all_beta) = (
            final_states[span.sequence],
            _load(inputs, span, dtype),
        )
        for t in range(span.stop - span.start):
            q, k, v, beta = (
                tensor[:, t, :, None] for tensor in (all_q, all_k, all_v, all_beta[..., None])
            )
            state = state * g[:, t].reshape(len(g), -1, 1).exp()
            u = beta * (v - state.mT @ k)
            state = state + k @ u.mT
            out[span.batch, span.start + t] = (state.mT @ q)[..., 0]
        final_states[span.sequence] = state
    return GDNOutput(out, final_states)


def _load(inputs: GDNInputs, span: Span, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q (HV, T, K), scaled, k (HV, T, K), both normalised if use_qk_l2norm, v (HV, T, V), g and
    beta (HV, T).
    """
    q, k, v, g, beta = (
        tensor[span.batch, span.start : span.stop].transpose(0, 1).to(dtype)
        for tensor in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    )
    if inputs.use_qk_l2norm:
        q, k = (
            tensor * (tensor.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for tensor in (q, k)
        )
    q, k = (
        tensor.repeat_interleave(inputs.values_per_key, 0)
        for tensor in (q * inputs.scale_or_default, k)
    )
    return q, k, v, g.clamp(max=0), beta


def delta_chunks(
    decayed: Decayed, inputs: GDNInputs, span: Span, dtype: torch.dtype, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Output (T, HV, V) and the state (HV, K, V) after the span, with the decays of `decayed`."""
    pieces, length = _load(inputs, span, dtype), span.stop - span.start
    count = -(-length // ORACLE_CHUNK)
    pad = count * ORACLE_CHUNK - length  # positions with g = beta = 0: they neither decay nor add

    def chunks(tensor: Tensor) -> Tensor:
        """(HV, T, ...) -> (HV, NT, chunk, ...)"""
        heads, rest = tensor.shape[0], tensor.shape[2:]
        return torch.cat([tensor, tensor.new_zeros(heads, pad, *rest)], 1).reshape(
            heads, count, ORACLE_CHUNK, *rest
        )

    q, k, v, g, beta = map(chunks, pieces)
    beta = beta[..., None]
    scores, system, since_start, to_end = decayed(q, k, g, beta)
    right = torch.cat([beta * v, beta * since_start * k], -1)
    U0, W = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    out = torch.empty_like(v)
    for i in range(count):
        u = U0[:, i] - W[:, i] @ state
        out[:, i] = (q[:, i] * since_start[:, i]) @ state + scores[:, i] @ u
        state = state * since_start[:, i, -1, :, None] + (k[:, i] * to_end[:, i]).mT @ u
    return out.flatten(1, 2)[:, :length].transpose(0, 1), state


def _decayed(q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    decay = segment_sums(g).exp()  # d_ts, zero above the diagonal
    since_start = g.cumsum(-1).exp()[..., None]  # d_t
    return (
        (q @ k.mT) * decay,
        (beta * decay * (k @ k.mT)).tril(-1),
        since_start,
        decay[..., -1, :, None],
    )


_chunked = partial(delta_chunks, _decayed)
# Memory for one block is about 10 * block * HV * (K + V + ORACLE_CHUNK) elements of the dtype.
gdn_blocks = partial(blocks_of, _chunked)
gdn_chunked = partial(chunked, _chunked)
gdn_reference = register_oracle("gdn", _chunked)
