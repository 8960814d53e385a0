"""The oracle of Kimi Delta Attention: the plain recurrence, and a chunked form for long inputs.

With G_i the sum of g from the chunk's start to position i, a number for each of K channels, S the state that enters the
chunk, and the decays inside the sums over channels,

    L_ij = beta_i sum_d k_id k_jd exp(G_id - G_jd)  (i > j)     P_ij = sum_d q_id k_jd exp(G_id - G_jd)  (i >= j)
    (I + L) U = beta V - (beta k exp(G)) S
    S' = diag(exp(G_end)) S + (k exp(G_end - G))^T U            out = scale ((q exp(G)) S + P U)

A product of exp(G_i) and exp(-G_j) would overflow.  `decayed_scores` halves the chunk instead: pairs whose row lies in
the second half of a block and whose column lies in the first are anchored at the first half's last position, and the
halves are halved again.  Every exponent is then at most 0, for any gate.  Source: Kimi Team 2025 (arXiv:2510.26692);
docs/kda-mathematics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ssdprof.kernels.gdn.reference import _load
from ssdprof.kernels.kda.inputs import GDNOutput, KDAInputs
from ssdprof.kernels.oracle import ORACLE_CHUNK, OutputBlock, Span, blocks_of, initial_states, joined, oracle_plan
from ssdprof.kernels.oracle import sequences as sequences_of
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, register

_FORGOTTEN = -800.0  # a decay of exp(-800) is zero in fp64, and sums of 64 such gates keep twelve digits


def _unrounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def decayed_scores(
    q: torch.Tensor, k: torch.Tensor, sums: torch.Tensor, exp: Callable[[torch.Tensor], torch.Tensor] = torch.exp,
    operand: Callable[[torch.Tensor], torch.Tensor] = _unrounded,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """sum_d x_id k_jd exp(sums_id - sums_jd) for x = q and i >= j, and for x = k and i > j; zeros elsewhere.

    q, k, sums: (..., C, K), C a power of two.  exp, operand: of the factors, and the rounding of each product's
    operands.  Returns two (..., C, C).
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


def kda_recurrence(inputs: KDAInputs, dtype: torch.dtype = torch.float64) -> GDNOutput:
    """The recurrence, position by position, for short inputs.  Output and final states in `dtype`."""
    out = torch.empty(inputs.v.shape, dtype=dtype, device=inputs.v.device)
    final_states = initial_states(inputs, dtype)
    for span in sequences_of(inputs.sequences, inputs.length, inputs.cu_seqlens):
        state, (q, k, v, g, beta) = final_states[span.sequence], _load(inputs, span, dtype)
        for t in range(span.stop - span.start):
            state = state * g[:, t, :, None].exp()
            u = beta[:, t, None] * (v[:, t] - (state.mT @ k[:, t, :, None])[..., 0])
            state = state + k[:, t, :, None] * u[:, None, :]
            out[span.batch, span.start + t] = (state.mT @ q[:, t, :, None])[..., 0]
        final_states[span.sequence] = state
    return GDNOutput(out, final_states)


def kda_blocks(inputs: KDAInputs, dtype: torch.dtype = torch.float64, *, block: int = 2048) -> Iterator[OutputBlock]:
    """The chunked form as a stream of blocks: see `blocks_of`.

    Memory for one block is about 10 * block * HV * (2 K + V + ORACLE_CHUNK) elements of `dtype`.
    Reads the values of cu_seqlens on the host.  Raises ValueError if they are not 0 = c_0 <= c_1 <= ... = T.
    """
    return blocks_of(inputs, _chunked, dtype, block)


def kda_chunked(inputs: KDAInputs, dtype: torch.dtype = torch.float64, *, block: int = 2048) -> GDNOutput:
    """The blocks of `kda_blocks` joined.  Output and final states in `dtype`."""
    return GDNOutput(*joined(inputs, kda_blocks(inputs, dtype, block=block), dtype, dtype))


def _chunked(
    inputs: KDAInputs, span: Span, dtype: torch.dtype, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (T, HV, V) and the state (HV, K, V) after the span."""
    pieces, length = _load(inputs, span, dtype), span.stop - span.start
    count = -(-length // ORACLE_CHUNK)
    pad = count * ORACLE_CHUNK - length  # positions with g = beta = 0: they neither decay nor add

    def chunks(tensor: torch.Tensor) -> torch.Tensor:
        """(HV, T, ...) -> (HV, NT, chunk, ...)"""
        heads, rest = tensor.shape[0], tensor.shape[2:]
        return torch.cat([tensor, tensor.new_zeros(heads, pad, *rest)], 1).reshape(heads, count, ORACLE_CHUNK, *rest)

    q, k, v, g, beta = map(chunks, pieces)
    beta, sums = beta[..., None], g.clamp(min=_FORGOTTEN).cumsum(-2)
    since_start, to_end = sums.exp(), (sums[..., -1:, :] - sums).exp()
    scores, system = decayed_scores(q, k, sums)
    right = torch.cat([beta * v, beta * since_start * k], -1)
    U0, W = torch.linalg.solve_triangular(beta * system, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    out = torch.empty_like(v)
    for i in range(count):
        u = U0[:, i] - W[:, i] @ state
        out[:, i] = (q[:, i] * since_start[:, i]) @ state + scores[:, i] @ u
        state = state * since_start[:, i, -1, :, None] + (k[:, i] * to_end[:, i]).mT @ u
    return out.flatten(1, 2)[:, :length].transpose(0, 1), state


def kda_reference(inputs: KDAInputs, _precision: Precision = Precision()) -> GDNOutput:  # noqa: B008
    """The oracle as an implementation: computes in fp64 at every precision, and rounds once."""
    return GDNOutput(*joined(inputs, kda_blocks(inputs), inputs.v.dtype, torch.float32))


register(Implementation(operator="kda", name="reference", run=kda_reference, plan=oracle_plan))
