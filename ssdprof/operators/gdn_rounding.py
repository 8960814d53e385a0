"""The gated delta rule in one precision: rounded at every place where that precision allows a rounding.

This is the `lo` of the comparison (docs/measuring.md).  It is the chunked algorithm of Yang, Kautz and Hatamizadeh 2024
(arXiv:2412.06464), section 3.3, with chunks of 64 positions whatever the call's chunk size, in plain torch.  Everything
is computed in fp32 and rounded

    where a matrix product takes it     to the input's dtype; fp32 to two tf32 numbers, as tensor cores take it:
                                        q and k (normalised ones too), the inverse, beta times v and beta times decay
                                        times k, w, u, the state, what a chunk writes, the scores
    in products between the inverse's 16-row blocks     cut to tf32; for fp32 inputs to two tf32 numbers
    where states pass from chunk to chunk, and at the end     to the state dtype
    as the output     to the input's dtype
    if relaxed: decays, q k^T, beta and their products, and what a chunk writes   to 16 bit (the input's dtype;
                                        bfloat16 for fp32 inputs), and fp32 operands, too

k k^T, its decays and betas, and the substitution inside blocks of 16 rows stay in fp32.  No kernel is imitated beyond
that and nothing here is fitted: an implementation that rounds at fewer places only gets closer to the oracle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ssdprof.operators.operator import Span
from ssdprof.operators.rounding import RoundedForm, gpu_exp, split_chunks, two_tf32

if TYPE_CHECKING:
    from ssdprof.kernels.gdn.inputs import GDNInputs
    from ssdprof.kernels.precision import Precision

CHUNK = 64
_LEAF = 16  # rows of the blocks that are inverted in fp32
_FORGOTTEN = -110.0  # a decay of exp(-110) is zero in fp32


@dataclass(frozen=True, kw_only=True)
class GDNGate:
    """Shared by all precisions: the running sum of g in each chunk, (c, h, CHUNK) in fp32; the padding has g = 0."""

    g_cumsum: torch.Tensor

    @classmethod
    def of(cls, inputs: GDNInputs, span: Span) -> GDNGate:
        g = inputs.g[span.batch, span.start : span.stop].float().clamp(_FORGOTTEN, 0)
        g = split_chunks(g, CHUNK).transpose(1, 2)
        running = [g[..., 0]]
        for i in range(1, CHUNK):
            running.append(running[-1] + g[..., i])
        return cls(g_cumsum=torch.stack(running, -1))

    def largest_exponent(self) -> torch.Tensor:
        """max |g_cumsum| of each head, (h); 0 without positions."""
        if len(self.g_cumsum) == 0:
            return self.g_cumsum.new_zeros(self.g_cumsum.shape[1])
        return self.g_cumsum.abs().amax((0, 2))


class RoundedGDN(RoundedForm[GDNGate]):
    """The operator in one precision: see the module."""

    def __init__(self, inputs: GDNInputs, precision: Precision) -> None:
        super().__init__(inputs.v, inputs.initial_state, inputs.states_shape, precision)
        self._inputs = inputs

    def _chunks(self, span: Span, gate: GDNGate) -> torch.Tensor:
        inputs, operand, intermediate = self._inputs, self._operand_rounded, self._intermediate_rounded
        positions = slice(span.start, span.stop)
        q, k = (self._queries_or_keys(tensor[span.batch, positions]) for tensor in (inputs.q, inputs.k))  # (c, h, i, K)
        v = split_chunks(inputs.v[span.batch, positions].float(), CHUNK).transpose(1, 2)  # (c, h, i, V)
        beta = split_chunks(inputs.beta[span.batch, positions].float(), CHUNK).transpose(1, 2)[..., None]
        g = gate.g_cumsum

        decay = gpu_exp((g[..., :, None] - g[..., None, :]).clamp(max=0)).tril()  # (c, h, i, j)
        inverse = operand(self._inverse(((k @ k.mT) * decay * beta).tril(-1)))
        beta, since_start = intermediate(beta), intermediate(gpu_exp(g))[..., None]
        u = operand(inverse @ operand(beta * v))
        w = operand(inverse @ operand(intermediate(beta * since_start) * k))

        last = g[..., -1:]
        to_end = intermediate(gpu_exp((last - g).clamp(max=0)))[..., None]
        chunk_decay = gpu_exp(last)[..., None]
        scores = operand(intermediate(intermediate(q @ k.mT) * intermediate(decay)))
        out = torch.empty_like(v)
        for c in range(len(v)):
            entering = operand(self._state)
            written = intermediate(u[c] - w[c] @ entering)
            out[c] = since_start[c] * (q[c] @ entering) + scores[c] @ operand(written)
            added = k[c].mT @ operand(written * to_end[c])
            self._state = self._state_rounded(self._state * chunk_decay[c] + added)
        out = out * inputs.scale_or_default
        return out.transpose(1, 2).flatten(0, 1)[: span.stop - span.start].to(inputs.v.dtype)

    def _queries_or_keys(self, tensor: torch.Tensor) -> torch.Tensor:
        """(l, H, K) as an operand, (c, h, CHUNK, K)."""
        tensor = tensor.float()
        if self._inputs.use_qk_l2norm:
            tensor = tensor * (tensor.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        tensor = self._operand_rounded(tensor).repeat_interleave(self._inputs.values_per_key, 1)
        return split_chunks(tensor, CHUNK).transpose(1, 2)

    def _inverse(self, system: torch.Tensor) -> torch.Tensor:
        """(I + system)^-1 by blocks: those on the diagonal in fp32, then pairs of neighbours."""
        product = _tf32 if self._operand_dtype != torch.float32 else two_tf32
        identity = torch.eye(_LEAF, device=system.device)
        leaves = _blocks_below(system, _LEAF, 0)
        inverse: torch.Tensor = torch.linalg.solve_triangular(
            leaves, identity.expand_as(leaves), upper=False, unitriangular=True
        )
        half = _LEAF
        while half < CHUNK:
            top, bottom, between = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :], _blocks_below(system, half, 1)
            corner = -product(bottom) @ product(product(between) @ product(top))
            upper, lower = torch.cat([top, torch.zeros_like(top)], -1), torch.cat([corner, bottom], -1)
            inverse = torch.cat([upper, lower], -2)
            half *= 2
        return inverse.squeeze(-3)


def _blocks_below(system: torch.Tensor, size: int, below: int) -> torch.Tensor:
    """(..., CHUNK, CHUNK) -> (..., n, size, size): blocks on the diagonal, or the one below each even block of it."""
    count = CHUNK // size
    blocks = system.reshape(*system.shape[:-2], count, size, count, size)
    on_or_below = [blocks[..., i + below, :, i, :] for i in range(0, count, 1 + below)]
    return torch.stack(on_or_below, -3)


def _tf32(tensor: torch.Tensor) -> torch.Tensor:
    """An fp32 operand as a tensor core reads it: without its low 13 bits."""
    return (tensor.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
