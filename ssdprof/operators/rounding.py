"""Roundings that a precision may allow, for the rounded forms of operators (docs/measuring.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ssdprof.kernels.precision import Precision

_LOG2_E = math.log2(math.e)


def coarsest_rounding(input_dtype: torch.dtype, precision: Precision, largest_exponent: torch.Tensor) -> torch.Tensor:
    """The largest relative error that a single rounding may make in a head's terms, (h).

    Operands, weights and states: the unit roundoff of their dtype.  Decays: exponents are fp32 numbers of up to
    `largest_exponent`, and an absolute error of an exponent is a relative one of its decay.  At most 1.
    """
    dtypes = (input_dtype, precision.intermediate_dtype(input_dtype), precision.state_dtype)
    coarsest = max(unit_roundoff(dtype) for dtype in dtypes)
    return (unit_roundoff(torch.float32) * largest_exponent.double()).clamp(min=coarsest, max=1.0)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the spacing at 1: the relative error of rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def gpu_exp(tensor: torch.Tensor) -> torch.Tensor:
    """exp as a GPU computes it: 2 to the fp32 product with log2(e)."""
    return torch.exp2(tensor * _LOG2_E)


def two_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """Rounded to 22 significant bits, as a sum of two tf32 numbers.  Veltkamp's splitting (Dekker 1971)."""
    scaled = tensor * 5.0  # 2 ** (24 - 22) + 1
    return scaled - (scaled - tensor)


def rounded_operand(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 numbers as a matrix product on tensor cores takes them: in `dtype`, fp32 as two tf32 numbers."""
    return two_tf32(tensor) if dtype == torch.float32 else tensor.to(dtype).float()


def split_chunks(tensor: torch.Tensor, q: int) -> torch.Tensor:
    """(l, ...) -> (c, q, ...), zeros at the end."""
    length, *rest = tensor.shape
    pad = -length % q
    return torch.cat([tensor, tensor.new_zeros(pad, *rest)]).reshape(-1, q, *rest)


@contextmanager
def ieee_matmul() -> Iterator[None]:
    """Compute fp32 products in fp32, whatever the process has set: no precision allows the rounding of TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
