"""The oracle of the gated delta rule: the recurrence as it is written, and a chunked form for long inputs.

    u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)        what the state does not know of v_t yet
    S_t = exp(g_t) S_{t-1} + k_t u_t^T
    o_t = S_t^T (scale q_t)

Both are plain torch, run on CPU and GPU, and compute in the dtype that the caller asks for.

Chunked form.  With d_ts = exp(g_{s+1} + ... + g_t), d_t the same from the chunk's start, and S the state that enters
the chunk,

    S_t = d_t S + sum_{s<=t} d_ts k_s u_s^T
    u_t = beta_t (v_t - d_t S^T k_t - sum_{s<t} d_ts (k_t . k_s) u_s)

so u solves a unit lower triangular system, (I + L) U = beta V - (beta d K) S with L_ts = beta_t d_ts (k_t . k_s).  Both
right-hand sides are solved for every chunk at once, U = U0 - W S, and only S goes from chunk to chunk.
Source: Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464), section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.segment_sums import segment_sums

_CHUNK = 64  # positions per chunk of the chunked form: any value gives the same answer, this one little work


def gdn_recurrence(inputs: GDNInputs, dtype: torch.dtype = torch.float64) -> GDNOutput:
    """The recurrence, one position after the other: for short inputs.  Output and final state in `dtype`."""
    o = torch.empty(inputs.v.shape, dtype=dtype, device=inputs.v.device)
    state = _initial_state(inputs, dtype)
    piece = _Piece.load(inputs, 0, inputs.v.shape[1], dtype)
    for t in range(inputs.v.shape[1]):
        q, k, v, beta = (tensor[:, :, t, :, None] for tensor in (piece.q, piece.k, piece.v, piece.beta[..., None]))
        state = state * piece.g[:, :, t, None, None].exp()
        u = beta * (v - state.mT @ k)
        state = state + k @ u.mT
        o[:, t] = (state.mT @ q)[..., 0]
    return GDNOutput(o, state)


def gdn_chunked(inputs: GDNInputs, dtype: torch.dtype = torch.float64, *, block: int = 2048) -> GDNOutput:
    """The chunked form, `block` positions at a time.  Output and final state in `dtype`.

    Beyond the output, memory is that of a block: about 10 * B * block * HV * (K + V + _CHUNK) elements of `dtype`.
    """
    length = inputs.v.shape[1]
    o = torch.empty(inputs.v.shape, dtype=dtype, device=inputs.v.device)
    state = _initial_state(inputs, dtype)
    for start in range(0, length, block):
        stop = min(start + block, length)
        piece, state = _chunked(_Piece.load(inputs, start, stop, dtype), state)
        o[:, start:stop] = piece
    return GDNOutput(o, state)


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Positions start..stop in the dtype of the computation, value heads before positions."""

    q: torch.Tensor  # (B, HV, T, K), normalised if asked for, and scaled
    k: torch.Tensor  # (B, HV, T, K), normalised if asked for
    v: torch.Tensor  # (B, HV, T, V)
    g: torch.Tensor  # (B, HV, T)
    beta: torch.Tensor  # (B, HV, T)

    @classmethod
    def load(cls, inputs: GDNInputs, start: int, stop: int, dtype: torch.dtype) -> _Piece:
        q, k, v, g, beta = (
            tensor[:, start:stop].transpose(1, 2).to(dtype)
            for tensor in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
        )
        if inputs.use_qk_l2norm:
            q, k = (tensor * (tensor.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for tensor in (q, k))
        q = q * (q.shape[-1] ** -0.5 if inputs.scale is None else inputs.scale)
        q, k = (tensor.repeat_interleave(inputs.values_per_key, 1) for tensor in (q, k))
        return cls(q=q, k=k, v=v, g=g, beta=beta)


def _chunked(piece: _Piece, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, T, HV, V) and the state (B, HV, K, V) after the piece."""
    length = piece.v.shape[2]
    count = -(-length // _CHUNK)
    pad = count * _CHUNK - length  # positions with g = beta = 0: they neither decay nor add

    def chunks(tensor: torch.Tensor) -> torch.Tensor:
        """(B, HV, T, ...) -> (B, HV, NT, chunk, ...)"""
        heads, rest = tensor.shape[:2], tensor.shape[3:]
        return torch.cat([tensor, tensor.new_zeros(*heads, pad, *rest)], 2).reshape(*heads, count, _CHUNK, *rest)

    q, k, v, beta = chunks(piece.q), chunks(piece.k), chunks(piece.v), chunks(piece.beta)[..., None]
    g = chunks(piece.g)
    decay = segment_sums(g).exp()  # d_ts, zero above the diagonal
    since_start = g.cumsum(-1).exp()[..., None]  # d_t
    to_end = decay[..., -1, :, None]

    system = (beta * decay * (k @ k.mT)).tril(-1)  # L; the solver adds the identity
    right = torch.cat([beta * v, beta * since_start * k], -1)
    U0, W = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    scores = (q @ k.mT) * decay
    o = torch.empty_like(v)
    for i in range(count):
        u = U0[:, :, i] - W[:, :, i] @ state
        o[:, :, i] = (q[:, :, i] * since_start[:, :, i]) @ state + scores[:, :, i] @ u
        state = state * since_start[:, :, i, -1:] + (k[:, :, i] * to_end[:, :, i]).mT @ u
    return o.flatten(2, 3)[:, :, :length].transpose(1, 2), state


def _initial_state(inputs: GDNInputs, dtype: torch.dtype) -> torch.Tensor:
    """(B, HV, K, V), a fresh tensor."""
    if inputs.initial_state is not None:
        return inputs.initial_state.to(dtype, copy=True)
    batch, _, heads, value_dim = inputs.v.shape
    return torch.zeros(batch, heads, inputs.q.shape[3], value_dim, dtype=dtype, device=inputs.v.device)
