"""Draws the weights of random models with the scales of a trained model."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

Weights = Iterator[tuple[str, torch.Tensor]]  # name, tensor


class Draw:
    """Random tensors in bf16, reproducible for one seed and one kind of device."""

    def __init__(self, seed: int, device: str) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device = device

    def normal(self, *shape: int, std: float) -> torch.Tensor:
        values = torch.empty(shape, device=self.device, dtype=torch.bfloat16)
        return values.normal_(0.0, std, generator=self.generator).cpu()

    def uniform(self, size: int, low: float, high: float) -> torch.Tensor:
        values = torch.empty(size, device=self.device)
        return values.uniform_(low, high, generator=self.generator).cpu()

    def linear(self, outputs: int, inputs: int, scale: float = 1.0) -> torch.Tensor:
        """(outputs, inputs); maps a vector of unit elements to elements of size `scale`."""
        return self.normal(outputs, inputs, std=scale / math.sqrt(inputs))

    def dt_bias(self, heads: int) -> torch.Tensor:
        """Its softplus is a time step, log-uniform in 1e-3..1e-1."""
        dt = torch.exp(self.uniform(heads, math.log(1e-3), math.log(1e-1)))
        return (dt + torch.log(-torch.expm1(-dt))).bfloat16()

    def a_log(self, heads: int) -> torch.Tensor:
        """log of a decay rate, uniform in 1..16."""
        return torch.log(self.uniform(heads, 1.0, 16.0)).bfloat16()


def ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16)
