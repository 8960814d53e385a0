"""The SSD operator in one precision: rounded at every place where that precision allows a rounding.

This is the `lo` of the comparison (docs/measuring.md).  It is the chunked algorithm of Dao and Gu 2024
(arXiv:2405.21060), section 6, in plain torch, at the chunk size `SSDInputs.power_of_two_chunk`.  Everything is
computed in fp32 and rounded

    where a matrix product takes it     to the input's dtype; fp32 to two tf32 numbers, as tensor cores take it
    where states pass from chunk to chunk, and at the end     to the state dtype
    as the output     to the input's dtype
    if relaxed: decays, C B^T, dt and their products     to 16 bit (the input's dtype; bfloat16 for fp32 inputs)

It imitates no kernel and nothing is fitted: an implementation that rounds at fewer places only gets
closer to the oracle.  fp32 sums are made in the order that a kernel may make them and that loses most, one addend after
the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ssdprof.operators.operator import Span
from ssdprof.operators.rounding import RoundedForm, gpu_exp, split_chunks

if TYPE_CHECKING:
    from ssdprof.kernels.precision import Precision
    from ssdprof.kernels.ssd.inputs import SSDInputs


@dataclass(frozen=True, kw_only=True)
class SSDGate:
    """The part that all precisions share: dt and the running sum of dt A in each chunk, (c, g, r, q) in fp32.

    Heads are split into (g, r), r heads of one group.  The last chunk is padded with dt = 0, which neither decays nor
    adds.
    """

    dt: torch.Tensor
    dA_cumsum: torch.Tensor

    @classmethod
    def of(cls, inputs: SSDInputs, span: Span) -> SSDGate:
        dt = inputs.dt[span.batch, span.start : span.stop].float()
        if inputs.dt_bias is not None:
            dt = dt + inputs.dt_bias.float()
        if inputs.dt_softplus:
            dt = torch.nn.functional.softplus(dt)
        dt = dt.clamp(*inputs.dt_limit)
        groups = inputs.B.shape[2]
        dt = split_chunks(dt.reshape(len(dt), groups, inputs.heads_per_group), inputs.power_of_two_chunk).permute(
            0, 2, 3, 1
        )
        steps = dt * inputs.A.float().reshape(groups, -1, 1)
        running = [steps[..., 0]]
        for i in range(1, inputs.power_of_two_chunk):
            running.append(running[-1] + steps[..., i])
        return cls(dt=dt, dA_cumsum=torch.stack(running, -1))

    def largest_exponent(self) -> torch.Tensor:
        """max |dA_cumsum| of each head, (h); 0 without positions."""
        if len(self.dA_cumsum) == 0:
            return self.dA_cumsum.new_zeros(self.dA_cumsum.shape[1:3]).flatten()
        return self.dA_cumsum.abs().amax((0, 3)).flatten()


class RoundedSSD(RoundedForm[SSDGate]):
    """The operator in one precision: see the module."""

    def __init__(self, inputs: SSDInputs, precision: Precision) -> None:
        super().__init__(inputs.x, inputs.initial_states, inputs.states_shape, precision)
        self._inputs = inputs

    def _chunks(self, span: Span, gate: SSDGate) -> torch.Tensor:
        inputs, q = self._inputs, self._inputs.power_of_two_chunk
        operand, intermediate = self._operand_rounded, self._intermediate_rounded
        (h, p), (g, n) = inputs.x.shape[2:], inputs.B.shape[2:]
        r, length = h // g, span.stop - span.start
        x_span = inputs.x[span.batch, span.start : span.stop].float()
        x = operand(split_chunks(x_span.reshape(length, g, r, p), q).permute(0, 2, 3, 1, 4))  # (c, g, r, q, p)
        B, C = (
            operand(split_chunks(tensor[span.batch, span.start : span.stop].float(), q).transpose(1, 2))
            for tensor in (inputs.B, inputs.C)
        )  # (c, g, q, n)
        a, dt = gate.dA_cumsum, intermediate(gate.dt)

        causal = torch.ones(q, q, dtype=torch.bool, device=x.device).tril()
        decay = intermediate(gpu_exp((a[..., :, None] - a[..., None, :]).clamp(max=0)))  # (c, g, r, q, s)
        CB = intermediate(C @ B.mT)[:, :, None]
        scores = torch.where(causal, intermediate(intermediate(CB * decay) * dt[..., None, :]), 0.0)
        out = operand(scores) @ x

        last = a[..., -1:]
        weights = intermediate(intermediate(gpu_exp((last - a).clamp(max=0))) * dt)
        chunk_states = operand(x * weights[..., None]).mT @ B[:, :, None]  # (c, g, r, p, n)
        chunk_decay = gpu_exp(last)[..., None]
        state = self._state.reshape(g, r, p, n)
        entering = []
        for c in range(len(chunk_states)):
            entering.append(state)
            state = self._state_rounded(state * chunk_decay[c] + chunk_states[c])
        self._state = state.reshape(h, p, n)
        out += (C[:, :, None] @ operand(torch.stack(entering)).mT) * intermediate(gpu_exp(a))[..., None]

        out = out.permute(0, 3, 1, 2, 4).reshape(-1, h, p)[:length]
        if inputs.D is not None:
            out = out + inputs.D.float().reshape(h, -1) * x_span
        if inputs.z is not None:
            out = out * torch.nn.functional.silu(inputs.z[span.batch, span.start : span.stop].float())
        return out.to(inputs.x.dtype)
