"""Evaluates the formulas of unfused stages for tests, and limits the distance of a kernel's output from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Arithmetic:
    """Compute in `dtype`; operands of products and intermediates are rounded to theirs first."""

    dtype: torch.dtype
    operand_dtype: torch.dtype
    intermediate_dtype: torch.dtype

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype)

    def operand(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.operand_dtype).to(self.dtype)

    def intermediate(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.intermediate_dtype).to(self.dtype)


FP64 = Arithmetic(torch.float64, torch.float64, torch.float64)
Formula = Callable[[Arithmetic], torch.Tensor]


def assert_within(ours: torch.Tensor, formula: Formula, low: Arithmetic) -> None:
    """Error against fp64 at most twice the error of the formula in `low`, plus twice a rounding of the output."""
    hi, lo = formula(FP64), formula(low).double()
    assert torch.isfinite(ours).all(), "something was not written, or is not finite"
    error, allowed = (ours.double() - hi).abs().max(), (lo - hi).abs().max()
    eps = torch.finfo(ours.dtype).eps * hi.abs().max()
    assert error <= 2 * (allowed + eps), f"{error:.3g}, with {allowed:.3g} + {eps:.3g} allowed twice"
