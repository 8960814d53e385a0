"""The roundings that a precision allows, for the rounded forms of operators (docs/measuring.md).

A rounded form is an operator in plain torch that rounds wherever a precision allows it.
"""

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
# spacing at 1 of tf32 numbers, which have 11 significant bits, and of sums of two of them: 22 bits
_TF32_EPS, _TWO_TF32_EPS = 2.0**-10, 2.0**-21
_SIGN_AND_EXPONENT = -0x800000  # mask of these bits of an fp32 number, as an int32
# the least normal fp32 number; a GPU may flush smaller ones to zero
FLUSHED = torch.finfo(torch.float32).tiny


def coarsest_rounding(
    input_dtype: torch.dtype, precision: Precision, largest_exponent: Tensor
) -> Tensor:
    """The largest relative error that a single rounding may make in the terms of each head, (h) in
    fp64, at most 1.

    Operands, intermediates and states have the unit roundoff of their dtype, although fp32 operands
    may be rounded to 22 bits (`Rounded.operand`).  A decay is exp of an fp32 exponent of magnitude
    up to `largest_exponent` (h), whose absolute rounding error is the decay's relative error.
    """
    dtypes = (input_dtype, precision.intermediate_dtype(input_dtype), precision.state_dtype)
    coarsest = max(unit_roundoff(dtype) for dtype in dtypes)
    return (unit_roundoff(torch.float32) * largest_exponent.double()).clamp(min=coarsest, max=1.0)


def unit_roundoff(dtype: torch.dtype) -> float:
    """The bound of the relative error of rounding to nearest: half the spacing at 1."""
    return torch.finfo(dtype).eps / 2


def gpu_exp(tensor: Tensor) -> Tensor:
    """exp as a GPU computes it: 2 to the fp32 product with log2(e)."""
    return torch.exp2(tensor * _LOG2_E)


def two_tf32(tensor: Tensor) -> Tensor:
    """fp32 numbers rounded to 22 significant bits, which a sum of two tf32 numbers has, by
    Veltkamp's splitting (Dekker 1971).
    """
    scaled = tensor * 5.0  # 2 ** (24 - 22) + 1
    return scaled - (scaled - tensor)


def running_sum(tensor: Tensor) -> Tensor:
    """Cumulative sum along the last dimension, which must not be empty.  It adds one number after
    the other, the order that may lose most to rounding.
    """
    sums = [tensor[..., 0]]
    for i in range(1, tensor.shape[-1]):
        sums.append(sums[-1] + tensor[..., i])
    return torch.stack(sums, -1)


@contextmanager
def _ieee_matmul() -> Iterator[None]:
    """Compute fp32 matrix products in fp32, whatever the process has set, because no precision
    allows TF32 there.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The values of a span that are the same in all precisions.  The span begins at a chunk's
    start.

    exponents: natural logs of the decays since the start of each chunk, (c, h, q) in fp32; of KDA,
        whose channels have decays of their own, (c, h, q K).
    dt: SSD's time steps, (c, h, q); None for other operators.
    """

    exponents: Tensor
    dt: Tensor | None = None

    @cached_property
    def decays(self) -> Tensor:
        """The decay from position j to position i of a chunk, (c, h, i, j), for one decay of a
        head (not for KDA).  Where i is before j it is 1, because exponents do not rise.
        """
        return gpu_exp((self.exponents[..., :, None] - self.exponents[..., None, :]).clamp(max=0))

    def largest_exponent(self) -> Tensor:
        """The largest magnitude of an exponent in each head, (h); 0 if there are no positions."""
        chunks, heads, _ = self.exponents.shape
        return self.exponents.abs().amax((0, 2)) if chunks else self.exponents.new_zeros(heads)


class Rounded:
    """Evaluates an operator span after span, with every rounding that one precision allows.

    inputs: inputs of the dtype and device of those that `advance` will get.
    chunks: (inputs, self, span, gate) -> out of a span that has positions.  It also changes
        `state`, (h, ...) in fp32, from the state before the span to the one after it.
    """

    def __init__(
        self,
        inputs: Inputs,
        precision: Precision,
        chunks: Callable[[Any, Rounded, Span, Gate], Tensor],
    ) -> None:
        self._device = inputs.device
        self._state_dtype = precision.state_dtype
        self._chunks = chunks
        self._intermediate_dtype = precision.intermediate_dtype(inputs.values.dtype)
        # with relaxed intermediates, operands are rounded to the dtype of intermediates, too
        self.operand_dtype = inputs.values.dtype if precision.exact else self._intermediate_dtype
        self._sequence: int | None = None
        self._generator: torch.Generator | None = None
        self._cuts = False
        self.state = torch.empty(0)

    def perturb(self, seed: int, *, cuts: bool = False) -> Rounded:
        """From now on, add an independent random error of up to half a unit in the last place
        instead of each rounding of an operand and of each rounding to 16 bits.  Returns itself.

        cuts: operands that would be rounded to 16 bits get an error of up to one unit in the last
            place of tf32, towards zero, as if they were cut to tf32.  fp32 operands do not.
        """
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._cuts = cuts
        return self

    def advance(self, inputs: Inputs, span: Span, gate: Gate) -> tuple[Tensor, Tensor]:
        """Evaluate the span, which follows the previous one or begins another sequence.

        Returns out (l, h, ...) in the inputs' dtype, and the state (h, ...) after the span, whose
        numbers are those of the state dtype, in fp32.  After `perturb`, they have random errors
        instead of a rounding to 16 bits.
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
        """fp32 numbers rounded as operands of a matrix product on tensor cores: to `operand_dtype`,
        or if that is fp32 to the sum of two tf32 numbers.
        """
        if self.operand_dtype == torch.float32:
            if self._generator is None:
                return two_tf32(tensor)
            return self._with_error(tensor, _TWO_TF32_EPS, -0.5)
        if self._cuts:
            return self._with_error(tensor, _TF32_EPS, -1.0)
        return self._in(tensor, self.operand_dtype)

    def intermediate(self, tensor: Tensor) -> Tensor:
        """fp32 numbers rounded to the dtype of intermediates."""
        return self._in(tensor, self._intermediate_dtype)

    def stored(self, tensor: Tensor) -> Tensor:
        """A state rounded to the state dtype, as it passes from chunk to chunk."""
        return self._in(tensor, self._state_dtype)

    def _in(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """fp32 numbers rounded to `dtype`, in fp32.  After `perturb`, 16-bit dtypes stand for a
        random error of up to half a unit in their last place.
        """
        if self._generator is None or dtype == torch.float32:
            return tensor.to(dtype).float()
        info = torch.finfo(dtype)
        return self._with_error(tensor, info.eps, -0.5, smallest=info.smallest_normal)

    def _with_error(
        self, tensor: Tensor, eps: float, least: float, smallest: float = 0.0
    ) -> Tensor:
        """The tensor with a random error in each element, uniform between `least` and `least` + 1
        units in the last place.  A positive error moves an element away from zero.

        eps: the unit in the last place of 1.
        smallest: the smallest normal number of the dtype; smaller elements have its unit.  At most
            `FLUSHED`: each element has its own unit, and those below `FLUSHED` get no error.
        """
        tensor = tensor.contiguous()
        # 2 to the exponent of each element, with the element's sign
        power = (tensor.view(torch.int32) & _SIGN_AND_EXPONENT).view(torch.float32)
        if smallest > FLUSHED:
            power = tensor.sign() * power.abs().clamp(min=smallest)
        error = torch.empty_like(tensor).uniform_(least, least + 1, generator=self._generator)
        return torch.addcmul(tensor, power, error, value=eps)
