"""Inputs of the gated delta rule for tests: one description, many sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.precision import Precision

EXACT, RELAXED = Precision(), Precision(intermediates="relaxed")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes and kinds of inputs.  lengths: packed sequences instead of a batch of `length`.

    collinear: share of a common vector in every key.  gate: mean of -g.
    """

    batch: int = 1
    length: int = 70
    lengths: tuple[int, ...] | None = None
    key_heads: int = 1
    values_per_key: int = 1
    key_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    gate: float = 0.3
    largest_beta: float = 1.0
    collinear: float = 0.0
    initial_state: bool = False
    l2norm: bool = True
    chunk_size: int = 64
    seed: int = 0
    device: str = "cpu"

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)

    @property
    def tokens(self) -> int:
        return self.length if self.lengths is None else sum(self.lengths)

    def inputs(self, **overrides: Any) -> GDNInputs:
        """GDNInputs, drawn on the CPU; keyword arguments replace fields."""
        generator = torch.Generator().manual_seed(self.seed)
        batch, length, heads = self.batch, self.tokens, self.key_heads * self.values_per_key
        sequences = batch if self.lengths is None else len(self.lengths)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        key = normal(self.key_heads, self.key_dim)
        k = self.collinear * key + (1 - self.collinear) * normal(batch, length, self.key_heads, self.key_dim)
        if not self.l2norm:
            k = k / k.norm(dim=-1, keepdim=True)
        bounds = None if self.lengths is None else torch.tensor([0, *accumulate(self.lengths)])
        state = normal(sequences, heads, self.key_dim, self.value_dim) if self.initial_state else None
        fields: dict[str, Any] = dict(
            q=normal(batch, length, self.key_heads, self.key_dim).to(self.dtype),
            k=k.to(self.dtype),
            v=normal(batch, length, heads, self.value_dim).to(self.dtype),
            g=-self.gate * torch.rand(batch, length, heads, generator=generator) * 2,
            beta=(self.largest_beta * normal(batch, length, heads).sigmoid()).to(self.dtype),
            initial_state=state,
            use_qk_l2norm=self.l2norm,
            chunk_size=self.chunk_size,
            cu_seqlens=bounds,
        )
        fields = {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value for name, value in fields.items()
        }
        return GDNInputs(**(fields | overrides))
