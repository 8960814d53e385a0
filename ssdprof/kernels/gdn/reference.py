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
    split_chunks,
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
        state = final_states[span.sequence]
        (*rows, g, beta_rows) = _load(inputs, span, dtype)
        for t in range(span.length):
            q, k, v, beta = (row[t, ..., None] for row in (*rows, beta_rows[..., None]))
            state = state * g[t].reshape(len(state), -1, 1).exp()
            u = beta * (v - state.mT @ k)
            state = state + k @ u.mT
            out[span.batch, span.start + t] = (state.mT @ q)[..., 0]
        final_states[span.sequence] = state
    return GDNOutput(out, final_states)


def load(inputs: GDNInputs, span: Span, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q and k (T, H, K), normalised if use_qk_l2norm, v (T, HV, V) and beta (T, HV)."""
    q, k, v, beta = (
        span.of(tensor).to(dtype) for tensor in (inputs.q, inputs.k, inputs.v, inputs.beta)
    )
    if inputs.use_qk_l2norm:
        q, k = (rows * (rows.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for rows in (q, k))
    return q, k, v, beta


def _load(inputs: GDNInputs, span: Span, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """As `load`, but q, scaled, and k of value heads, (T, HV, K); g (T, HV) before beta."""
    q, k, v, beta = load(inputs, span, dtype)
    q, k = (
        rows.repeat_interleave(inputs.values_per_key, 1)
        for rows in (q * inputs.scale_or_default, k)
    )
    return q, k, v, span.of(inputs.g).to(dtype).clamp(max=0), beta


def delta_chunks(
    decayed: Decayed, inputs: GDNInputs, span: Span, dtype: torch.dtype, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Output (T, HV, V) and the state (HV, K, V) after the span, with the decays of `decayed`."""
    # padding has g = beta = 0: it neither decays nor adds
    q, k, v, g, beta = (
        split_chunks(rows, ORACLE_CHUNK) for rows in _load(inputs, span, dtype)
    )  # (c, HV, chunk, ...)
    beta = beta[..., None]
    scores, system, since_start, to_end = decayed(q, k, g, beta)
    right = torch.cat([beta * v, beta * since_start * k], -1)
    U0, W = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    out = torch.empty_like(v)
    for i in range(len(v)):
        u = U0[i] - W[i] @ state
        out[i] = (q[i] * since_start[i]) @ state + scores[i] @ u
        state = state * since_start[i, :, -1, :, None] + (k[i] * to_end[i]).mT @ u
    return out.transpose(1, 2).flatten(0, 1)[: span.length], state


def _decayed(q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """The products of a chunk with their decays: q k^T, beta k k^T below the diagonal, and the
    decays from the chunk's start and to its end.
    """
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
