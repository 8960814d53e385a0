"""The formulas of the unfused GDN stages in torch, for one chunk: the kernels' docstrings, written out.

Tensors have heads first: k (HV, C, K), beta and g_cumsum (HV, C), L and A (HV, C, C), u and v_new (HV, V, C),
w (HV, C, K), S (HV, V, K), the state transposed.  `Arithmetic` has the dtype and the roundings.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from stage_formulas import FP64, Arithmetic, Chunk


def qk_l2norm(x: torch.Tensor, a: Arithmetic = FP64) -> torch.Tensor:
    return a.of(x) / (a.of(x).square().sum(-1, keepdim=True) + 1e-6).sqrt()


def gate_cumsum(g: torch.Tensor, a: Arithmetic = FP64) -> torch.Tensor:
    return a.of(g).clamp(-110, 0).cumsum(-1)


def decays(g_cumsum: torch.Tensor, a: Arithmetic) -> torch.Tensor:
    return (a.of(g_cumsum)[..., :, None] - a.of(g_cumsum)[..., None, :]).clamp(max=0).exp()


def scaled_dot_kkt(k: torch.Tensor, beta: torch.Tensor, g_cumsum: torch.Tensor, a: Arithmetic = FP64) -> torch.Tensor:
    k = a.operand(k)
    return (a.of(beta)[..., None] * decays(g_cumsum, a) * (k @ k.mT)).tril(-1)


def solve_tril(L: torch.Tensor, a: Arithmetic = FP64) -> torch.Tensor:
    identity = torch.eye(L.shape[-1], dtype=a.dtype).expand_as(L)
    return torch.linalg.solve_triangular(a.of(L), identity, upper=False, unitriangular=True)


def recompute_w_u(
    A: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, g_cumsum: torch.Tensor, a: Arithmetic = FP64
) -> tuple[torch.Tensor, torch.Tensor]:
    beta, since_start = a.of(beta), a.of(g_cumsum).exp()
    w = a.operand(a.of(A) * a.intermediate(beta * since_start)[:, None, :]) @ a.operand(k)
    u = a.operand(a.of(A) * a.intermediate(beta)[:, None, :]) @ a.operand(v)
    return w, u.mT


def chunk_state(
    k: torch.Tensor, w: torch.Tensor, u: torch.Tensor, g_cumsum: torch.Tensor, S: torch.Tensor, a: Arithmetic = FP64
) -> tuple[torch.Tensor, torch.Tensor]:
    """v_new, and the state after the chunk."""
    g_cumsum = a.of(g_cumsum)
    end = g_cumsum[:, -1:]
    v_new = a.of(u) - a.operand(S) @ a.of(w).mT
    written = a.operand(a.intermediate(v_new) * a.intermediate((end - g_cumsum).exp())[:, None, :])
    return v_new, end[..., None].exp() * a.of(S) + written @ a.operand(k)


def chunk_output(
    q: torch.Tensor,
    k: torch.Tensor,
    S: torch.Tensor,
    v_new: torch.Tensor,
    g_cumsum: torch.Tensor,
    scale: float,
    a: Arithmetic = FP64,
) -> torch.Tensor:
    q, k = a.operand(q), a.operand(k)
    scores = a.operand(a.intermediate(q @ k.mT) * a.intermediate(decays(g_cumsum, a))).tril()
    before = a.intermediate(a.of(g_cumsum).exp())[..., None] * (q @ a.operand(S).mT)
    return scale * (before + scores @ a.of(v_new).mT)


def of_chunk(tensor: torch.Tensor, chunk: Chunk, size: int, heads: int) -> torch.Tensor:
    """(B, T, h, ...) -> (heads, size, ...) in fp64: zeros past the end, key heads repeated."""
    piece = tensor[chunk.b, chunk.start : chunk.stop].double().transpose(0, 1)
    rest = piece.new_zeros(piece.shape[0], size - piece.shape[1], *piece.shape[2:])
    return torch.cat([piece, rest], 1).repeat_interleave(heads // tensor.shape[2], 0)


def workspace(pieces: Sequence[torch.Tensor], chunks: Sequence[Chunk], slots: tuple[int, int]) -> torch.Tensor:
    """(B, NT, HV, ...): the tensor that a stage passes to the next one; NaN in slots of chunks that do not exist."""
    whole = torch.full((*slots, *pieces[0].shape), torch.nan, dtype=pieces[0].dtype)
    for piece, chunk in zip(pieces, chunks, strict=True):
        whole[chunk.b, chunk.c] = piece
    return whole
