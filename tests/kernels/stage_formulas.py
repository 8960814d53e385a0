"""Evaluates the formulas of unfused stages for tests, and limits the distance of a kernel's output from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

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


@dataclass(frozen=True)
class Chunk:
    """Chunk c of row b, positions start..stop.  first, last: whether it is the first, the last of its sequence."""

    b: int
    c: int
    start: int
    stop: int
    sequence: int
    first: bool
    last: bool

    @property
    def length(self) -> int:
        return self.stop - self.start


def chunks_of(inputs: Any) -> list[Chunk]:
    batch, length = next(iter(vars(inputs).values())).shape[:2]  # of x or q
    rows = [(b, b, 0, length) for b in range(batch)]
    if inputs.cu_seqlens is not None:
        rows = [(0, i, start, stop) for i, (start, stop) in enumerate(pairwise(inputs.cu_seqlens.tolist()))]
    chunks: list[Chunk] = []
    for b, sequence, start, stop in rows:
        for position in range(start, stop, inputs.chunk_size):
            end = min(position + inputs.chunk_size, stop)
            c = sum(chunk.b == b for chunk in chunks)
            chunks.append(Chunk(b, c, position, end, sequence, position == start, end == stop))
    return chunks
