"""The oracle of Kimi Delta Attention: the plain recurrence, and a chunked form for long inputs.

G_i is the sum of g from the chunk's start to position i, with a number for each of K channels, and
S the state that enters the chunk.  The decays are inside the sums over channels d:

    L_ij = beta_i sum_d k_id k_jd exp(G_id - G_jd)  (i > j)
    P_ij = sum_d q_id k_jd exp(G_id - G_jd)  (i >= j)
    (I + L) U = beta V - (beta k exp(G)) S
    S' = diag(exp(G_end)) S + (k exp(G_end - G))^T U            out = scale ((q exp(G)) S + P U)

As G only falls, exp(-G_j) would overflow.  `decayed_scores` therefore halves the chunk.  A pair
with its row i in the second half and its column j in the first half decays by exp(G_i - G_a)
exp(G_a - G_j), where a, its anchor, is the last position of the first half.  Pairs inside a half
are treated in the same way.  Every exponent is then at most 0, for any gate.
Source: Kimi Team 2025 (arXiv:2510.26692); docs/kda-mathematics.md.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ssdprof.kernels.gdn.reference import delta_chunks, gdn_recurrence
from ssdprof.kernels.oracle import blocks_of, chunked, register_oracle

# Least g: exp(-800) is zero in fp64.  A sum of 64 such gates has a unit in the last place of 7e-12,
# so that the later decays of a chunk, exponentials of differences of sums, keep eleven digits.
_FORGOTTEN = -800.0


def _unrounded(tensor: Tensor) -> Tensor:
    """The tensor as it is: the oracle does not round the operands of its products."""
    return tensor


def decayed_scores(
    q: Tensor,
    k: Tensor,
    sums: Tensor,
    exp: Callable[[Tensor], Tensor] = torch.exp,
    operand: Callable[[Tensor], Tensor] = _unrounded,
) -> tuple[Tensor, Tensor]:
    """The sums over d of x_id k_jd exp(sums_id - sums_jd), for x = q and i >= j, and for x = k and
    i > j; zeros elsewhere.  Returns both, (..., C, C) each.

    q, k, sums: (..., C, K), C a power of two.  sums: G, which falls along C.
    exp: computes decays from exponents, which are at most 0.
    operand: rounds the operands of matrix products, which compute all pairs but those with i = j.
    """
    *lead, size, width = sums.shape
    q_scores = q.new_zeros(*lead, size, size)
    k_scores = q.new_zeros(*lead, size, size)
    q_scores.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    half = size // 2
    while half:
        # pairs between the two halves of each of `count` blocks of 2 * half positions
        count = size // (2 * half)
        (first_k, second_k), (first_sums, second_sums), (_, second_q) = (
            tensor.reshape(*lead, count, 2, half, width).unbind(-3) for tensor in (k, sums, q)
        )
        anchor = first_sums[..., -1:, :]
        columns = operand(first_k * exp((anchor - first_sums).clamp(max=0)))
        since_anchor = exp((second_sums - anchor).clamp(max=0))
        for scores, rows in ((q_scores, second_q), (k_scores, second_k)):
            product = operand(rows * since_anchor) @ columns.mT  # (..., count, half, half)
            blocks = scores.view(*lead, count, 2, half, count, 2, half)
            # rows in second halves and columns in first halves, (..., count, half, count, half),
            # of the same block: the diagonal of both axes `count`, which comes last
            blocks[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).copy_(product.movedim(-3, -1))
        half //= 2
    return q_scores, k_scores


def _decayed(q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """`gdn.reference.Decayed` for a decay of every channel: P and L (..., C, C), and the decays
    since the chunk's start and to its end (..., C, K).

    q, k, g: (..., C, K), g at most 0.  beta: (..., C, 1).
    """
    sums = g.clamp(min=_FORGOTTEN).cumsum(-2)
    scores, key_scores = decayed_scores(q, k, sums)
    return scores, beta * key_scores, sums.exp(), (sums[..., -1:, :] - sums).exp()


_chunked = partial(delta_chunks, _decayed)
kda_recurrence = gdn_recurrence
# Memory for one block is about 3.5 * block * HV * (2 K + V + ORACLE_CHUNK) elements of the dtype,
# measured on a CPU with K = V = 128.
kda_blocks = partial(blocks_of, _chunked)
kda_chunked = partial(chunked, _chunked)
register_oracle("kda", _chunked)
