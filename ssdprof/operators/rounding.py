"""Roundings that a precision may allow, for the rounded forms of operators (docs/measuring.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.oracle import Span as Span
from ssdprof.kernels.oracle import split_chunks as split_chunks
from ssdprof.kernels.precision import Precision

_LOG2_E = math.log2(math.e)
_TF32_EPS, _TWO_TF32_EPS = 2.0**-10, 2.0**-21
_SIGN_AND_EXPONENT = -0x800000  # of an fp32 number's bits, as an int32
# a GPU may flush numbers below the least normal fp32 number to zero
FLUSHED = torch.finfo(torch.float32).tiny


def coarsest_rounding(
    input_dtype: torch.dtype, precision: Precision, largest_exponent: Tensor
) -> Tensor:
    """The largest relative error that a single rounding may make in a head's terms, (h).

    Operands, weights and states: the unit roundoff of their dtype.  Decays: exponents are fp32
    numbers of up to `largest_exponent`, and an absolute error of an exponent is a relative one of
    its decay.  At most 1.
    """
    dtypes = (input_dtype, precision.intermediate_dtype(input_dtype), precision.state_dtype)
    coarsest = max(unit_roundoff(dtype) for dtype in dtypes)
    return (unit_roundoff(torch.float32) * largest_exponent.double()).clamp(min=coarsest, max=1.0)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the spacing at 1: the relative error of rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def gpu_exp(tensor: Tensor) -> Tensor:
    """exp as a GPU computes it: 2 to the fp32 product with log2(e)."""
    return torch.exp2(tensor * _LOG2_E)


def two_tf32(tensor: Tensor) -> Tensor:
    """Rounded to 22 significant bits, as a sum of two tf32 numbers.  Veltkamp's splitting (Dekker
    1971).
    """
    scaled = tensor * 5.0  # 2 ** (24 - 22) + 1
    return scaled - (scaled - tensor)


def running_sum(tensor: Tensor) -> Tensor:
    """Along the last dimension, one addend after the other: the order that loses most."""
    sums = [tensor[..., 0]]
    for i in range(1, tensor.shape[-1]):
        sums.append(sums[-1] + tensor[..., i])
    return torch.stack(sums, -1)


@contextmanager
def _ieee_matmul() -> Iterator[None]:
    """Compute fp32 products in fp32, whatever the process has set: no precision allows the rounding
    of TF32.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The part of a span that all precisions share: the decays' exponents (c, h, q) in fp32.  Spans
    begin at chunks.

    dt: of SSD, in the same shape.
    """

    exponents: Tensor
    dt: Tensor | None = None

    @cached_property
    def decays(self) -> Tensor:
        """From position j to position i of a chunk, (c, h, i, j), for exponents that fall: 1 above
        the diagonal.
        """
        return gpu_exp((self.exponents[..., :, None] - self.exponents[..., None, :]).clamp(max=0))

    def largest_exponent(self) -> Tensor:
        """The largest magnitude of an exponent in each head, (h); 0 without positions."""
        chunks, heads, _ = self.exponents.shape
        return self.exponents.abs().amax((0, 2)) if chunks else self.exponents.new_zeros(heads)


class Rounded:
    """An operator in one precision, with every rounding that it allows, evaluated span after span.

    inputs: of the same dtype and device as those of the spans.
    chunks: (inputs, self, span, gate) -> out of a span that has positions; moves `state` (h, ...)
    to its end.
    """

    def __init__(
        self,
        inputs: Inputs,
        precision: Precision,
        chunks: Callable[[Any, Rounded, Span, Gate], Tensor],
    ) -> None:
        """Relaxed intermediates are also the operands of products."""
        self._device = inputs.device
        self._state_dtype = precision.state_dtype
        self._chunks = chunks
        self._intermediate_dtype = precision.intermediate_dtype(inputs.values.dtype)
        self.operand_dtype = inputs.values.dtype if precision.exact else self._intermediate_dtype
        self._sequence: int | None = None
        self._generator: torch.Generator | None = None
        self._cuts = False
        self.state = torch.empty(0)

    def perturb(self, seed: int, *, cuts: bool = False) -> Rounded:
        """From now on, make an independent error of up to half a unit in the last place instead of
        each rounding of an operand, and of each to 16 bits.  Returns itself.

        cuts: 16-bit operands are instead cut to tf32, with an independent error of up to one of its
        units towards zero.
        """
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._cuts = cuts
        return self

    def advance(self, inputs: Inputs, span: Span, gate: Gate) -> tuple[Tensor, Tensor]:
        """out (l, h, ...) of the span in the inputs' dtype, and the state (h, ...) after it in
        fp32.
        """
        if span.sequence != self._sequence:
            self._sequence = span.sequence
            self.state = torch.zeros(inputs.states_shape[1:], device=self._device)
            if inputs.initial is not None:
                self.state = self.stored(inputs.initial[span.sequence].float())
        if span.start == span.stop:
            return span.of(inputs.values), self.state
        with _ieee_matmul():
            out = self._chunks(inputs, self, span, gate)
        return out, self.state

    def operand(self, tensor: Tensor) -> Tensor:
        """fp32 numbers as a matrix product on tensor cores takes them: fp32 as two tf32 numbers."""
        if self.operand_dtype == torch.float32:
            exact = self._generator is None
            return two_tf32(tensor) if exact else self._with_error(tensor, _TWO_TF32_EPS, -0.5)
        return (
            self._with_error(tensor, _TF32_EPS, -1.0)
            if self._cuts
            else self._in(tensor, self.operand_dtype)
        )

    def intermediate(self, tensor: Tensor) -> Tensor:
        return self._in(tensor, self._intermediate_dtype)

    def stored(self, tensor: Tensor) -> Tensor:
        """A state as it passes from chunk to chunk, rounded to the state dtype."""
        return self._in(tensor, self._state_dtype)

    def _in(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """fp32 numbers rounded to `dtype`, or with an error of that size."""
        if self._generator is None or dtype == torch.float32:
            return tensor.to(dtype).float()
        info = torch.finfo(dtype)
        return self._with_error(tensor, info.eps, -0.5, smallest=info.smallest_normal)

    def _with_error(
        self, tensor: Tensor, eps: float, least: float, smallest: float = 0.0
    ) -> Tensor:
        """The tensor with an error in each element.

        The error is `least` to `least` + 1 units in the last place, of the element or of
        `smallest`, whichever is larger.
        """
        tensor = tensor.contiguous()
        power = (tensor.view(torch.int32) & _SIGN_AND_EXPONENT).view(torch.float32)
        if smallest > FLUSHED:
            power = tensor.sign() * power.abs().clamp(min=smallest)
        error = torch.empty_like(tensor).uniform_(least, least + 1, generator=self._generator)
        return torch.addcmul(tensor, power, error, value=eps)
