"""The oracle of Kimi Delta Attention: the plain recurrence, and a chunked form for long inputs.

With G_i the sum of g from the chunk's start to position i, a number for each of K channels, S the
state that enters the chunk, and the decays inside the sums over channels,

    L_ij = beta_i sum_d k_id k_jd exp(G_id - G_jd)  (i > j)
    P_ij = sum_d q_id k_jd exp(G_id - G_jd)  (i >= j)
    (I + L) U = beta V - (beta k exp(G)) S
    S' = diag(exp(G_end)) S + (k exp(G_end - G))^T U            out = scale ((q exp(G)) S + P U)

A product of exp(G_i) and exp(-G_j) would overflow.  `decayed_scores` halves the chunk instead:
pairs whose row lies in the second half of a block and whose column lies in the first are anchored
at the first half's last position, and the halves are halved again.  Every exponent is then at most
0, for any gate.  Source: Kimi Team 2025 (arXiv:2510.26692); docs/kda-mathematics.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ssdprof.kernels.gdn.reference import delta_chunks, gdn_recurrence
from ssdprof.kernels.oracle import blocks_of, chunked, register_oracle

# a decay of exp(-800) is zero in fp64, and sums of 64 such gates keep twelve digits
_FORGOTTEN = -800.0


def _unrounded(tensor: Tensor) -> Tensor:
    return tensor


def decayed_scores(
    q: Tensor,
    k: Tensor,
    sums: Tensor,
    exp: Callable[[Tensor], Tensor] = torch.exp,
    operand: Callable[[Tensor], Tensor] = _unrounded,
) -> tuple[Tensor, Tensor]:
    """sum_d x_id k_jd exp(sums_id - sums_jd) for x = q and i >= j, and for x = k and i > j; zeros
    elsewhere.

    q, k, sums: (..., C, K), C a power of two.  exp, operand: of the factors, and the rounding of
    each product's operands.  Returns two (..., C, C).
    """
    *lead, size, width = sums.shape
    scores = tuple(q.new_zeros(*lead, size, size) for _ in range(2))
    scores[0].diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    half = size // 2
    while half:
        count = size // (2 * half)
        (first_k, second_k), (first_sums, second_sums), (_, second_q) = (
            tensor.reshape(*lead, count, 2, half, width).unbind(-3) for tensor in (k, sums, q)
        )
        anchor = first_sums[..., -1:, :]
        columns = operand(first_k * exp((anchor - first_sums).clamp(max=0)))
        down = exp((second_sums - anchor).clamp(max=0))
        for into, rows in zip(scores, (second_q, second_k), strict=True):
            blocks = into.view(*lead, count, 2, half, count, 2, half)
            product = operand(rows * down) @ columns.mT
            blocks[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).copy_(product.movedim(-3, -1))
        half //= 2
    return scores[0], scores[1]


def _decayed(q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    sums = g.clamp(min=_FORGOTTEN).cumsum(-2)
    scores, system = decayed_scores(q, k, sums)
    return scores, beta * system, sums.exp(), (sums[..., -1:, :] - sums).exp()


_chunked = partial(delta_chunks, _decayed)
kda_recurrence = gdn_recurrence
# Memory for one block is about 10 * block * HV * (2 K + V + ORACLE_CHUNK) elements of the dtype.
kda_blocks = partial(blocks_of, _chunked)
kda_chunked = partial(chunked, _chunked)
register_oracle("kda", _chunked)
