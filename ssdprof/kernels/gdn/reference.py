"""The oracle of the gated delta rule: the plain recurrence, and a chunked form for long inputs.

    u_t   = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)        corrected value
    S_t   = exp(g_t) S_{t-1} + k_t u_t^T
    out_t = S_t^T (scale q_t)

A g_t above 0 counts as 0.  Queries and keys are normalised first if the call asks for it.  Both
forms use only torch operations, run on CPU and GPU, and compute in a dtype that the caller chooses.

Chunked form.  With d_ts = exp(g_{s+1} + ... + g_t), d_t the same from the chunk's start, and S the
state that enters the chunk,

    S_t = d_t S + sum_{s<=t} d_ts k_s u_s^T
    u_t = beta_t (v_t - d_t S^T k_t - sum_{s<t} d_ts (k_t . k_s) u_s)

so u solves a unit lower triangular system, (I + L) U = beta V - (beta d K) S with L_ts = beta_t
d_ts (k_t . k_s) for s < t, else 0.  Both right-hand sides are solved for all chunks at once, U = U0
- W S, and only S passes from chunk to chunk.
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

# How an operator applies its decays: (q, k, g, beta) of chunks -> the scores q k^T times their
# decays, 0 above the diagonal; L; the decay from the chunk's start to each position; and the decay
# from each position to the chunk's end.  The last two have one column for a decay of the whole
# head, K columns for a decay of each channel.
Decayed = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def gdn_recurrence(inputs: GDNInputs, dtype: torch.dtype = torch.float64) -> GDNOutput:
    """The recurrence, position by position, for short inputs.  g has one number for a head, or one
    for each of its K channels.

    Returns the output and the final states of all sequences in `dtype`.  Ignores `state_every`.
    """
    out = torch.empty(inputs.v.shape, dtype=dtype, device=inputs.v.device)
    final_states = initial_states(inputs, dtype)
    for span in spans_of(inputs):
        state = final_states[span.sequence]  # (HV, K, V)
        q, k, v, g, beta = _load_heads(inputs, span, dtype)

        # columns of a matrix for each position and head
        q, k, v, beta = q[..., None], k[..., None], v[..., None], beta[..., None, None]
        for t in range(span.length):
            decay = g[t].reshape(len(state), -1, 1).exp()  # (HV, 1 or K, 1)
            state = state * decay
            u = beta[t] * (v[t] - state.mT @ k[t])
            state = state + k[t] @ u.mT
            out[span.batch, span.start + t] = (state.mT @ q[t])[..., 0]
        final_states[span.sequence] = state
    return GDNOutput(out, final_states)


def load(inputs: GDNInputs, span: Span, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v and beta of the T positions of a span, in `dtype`.

    q and k (T, H, K), normalised if use_qk_l2norm; v (T, HV, V); beta (T, HV).
    """
    q, k, v, beta = (
        span.of(tensor).to(dtype) for tensor in (inputs.q, inputs.k, inputs.v, inputs.beta)
    )
    if inputs.use_qk_l2norm:
        q, k = (rows * (rows.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for rows in (q, k))
    return q, k, v, beta


def _load_heads(inputs: GDNInputs, span: Span, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v, g and beta of the T positions of a span, for each value head, in `dtype`.

    q, times the scale, and k: (T, HV, K); v: (T, HV, V); g, at most 0, and beta: (T, HV); KDA's g:
    (T, HV, K).
    """
    q, k, v, beta = load(inputs, span, dtype)
    q = (q * inputs.scale_or_default).repeat_interleave(inputs.values_per_key, 1)
    k = k.repeat_interleave(inputs.values_per_key, 1)
    g = span.of(inputs.g).to(dtype).clamp(max=0)
    return q, k, v, g, beta


def delta_chunks(
    decayed: Decayed, inputs: GDNInputs, span: Span, dtype: torch.dtype, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The chunked form: output (T, HV, V) of the T positions of a span, and the state (HV, K, V)
    after it, both in `dtype`.

    state: (HV, K, V), before the span, in `dtype`.  It is not changed.
    """
    # (c, HV, chunk, ...); padding has g = beta = 0: it neither decays nor adds
    q, k, v, g, beta = (
        split_chunks(rows, ORACLE_CHUNK) for rows in _load_heads(inputs, span, dtype)
    )
    beta = beta[..., None]
    scores, L, since_start, to_end = decayed(q, k, g, beta)
    right_sides = torch.cat([beta * v, beta * since_start * k], -1)
    # unitriangular: the solver reads no diagonal, and takes it to be ones: I + L
    solutions = torch.linalg.solve_triangular(L, right_sides, upper=False, unitriangular=True)
    del right_sides  # as large as the inputs
    U0, W = solutions.split([v.shape[-1], k.shape[-1]], -1)
    out = torch.empty_like(v)
    for c in range(len(v)):
        u = U0[c] - W[c] @ state
        out[c] = (q[c] * since_start[c]) @ state + scores[c] @ u
        state = state * since_start[c, :, -1, :, None] + (k[c] * to_end[c]).mT @ u
    return out.transpose(1, 2).flatten(0, 1)[: span.length], state


def _decayed(q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """`Decayed` for one decay per head.  q, k (c, HV, chunk, K), g (c, HV, chunk), beta (c, HV,
    chunk, 1).
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
# A block of positions needs about 4 * block * HV * (K + V + ORACLE_CHUNK) elements of the dtype at
# most, measured on a CPU; `operators/gdn_oracle.py` allows for 10.
gdn_blocks = partial(blocks_of, _chunked)
gdn_chunked = partial(chunked, _chunked)
gdn_reference = register_oracle("gdn", _chunked)
