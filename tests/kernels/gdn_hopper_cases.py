"""GDN inputs of sizes that the Hopper kernel takes, drawn by a seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.gdn.reference import gdn_recurrence


@dataclass(frozen=True, kw_only=True)
class GDNCase:
    """lengths: lengths of packed sequences, instead of `batch` and `seqlen`; gate: the mean of g."""

    batch: int = 1
    seqlen: int = 130
    lengths: tuple[int, ...] | None = None
    key_heads: int = 1
    heads: int = 2
    key_dim: int = 128
    value_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    gate: float = -0.1
    beta: float = 1.0
    normalise: bool = False
    initial_state: bool = False
    scale: float | None = None

    def inputs(self, seed: int = 0) -> GDNInputs:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        batch, seqlen = (self.batch, self.seqlen) if self.lengths is None else (1, sum(self.lengths))
        tokens = (batch, seqlen)
        q, k = (normal(*tokens, self.key_heads, self.key_dim) for _ in range(2))
        if not self.normalise:
            q, k = (tensor / tensor.norm(dim=-1, keepdim=True) for tensor in (q, k))
        ends = None if self.lengths is None else torch.tensor((0, *self.lengths), dtype=torch.int32).cumsum(0)
        sequences = batch if self.lengths is None else len(self.lengths)
        return GDNInputs(
            q=q.to(self.dtype),
            k=k.to(self.dtype),
            v=normal(*tokens, self.heads, self.value_dim).to(self.dtype),
            g=2 * self.gate * torch.rand(*tokens, self.heads, generator=generator),
            beta=self.beta * torch.rand(*tokens, self.heads, generator=generator),
            initial_state=normal(sequences, self.heads, self.key_dim, self.value_dim) if self.initial_state else None,
            scale=self.scale,
            use_qk_l2norm=self.normalise,
            cu_seqlens=ends,
        )


def errors(ours: GDNOutput, inputs: GDNInputs) -> tuple[float, float]:
    """RMS errors of the output and of the final states against the recurrence in fp64, relative to their RMS."""
    exact = gdn_recurrence(inputs)
    return tuple(float((a.double() - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True))  # type: ignore
