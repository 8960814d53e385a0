"""Roundings that a precision may allow, for the rounded forms of operators (docs/measuring.md)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from ssdprof.operators.operator import Gate, Span

if TYPE_CHECKING:
    from ssdprof.kernels.precision import Precision

G = TypeVar("G", bound=Gate)
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


class RoundedForm(ABC, Generic[G]):
    """An operator in one precision, evaluated span after span; the state is carried within a sequence.

    values: (b, l, h, ...), in the shape and the dtype of the output.
    initial_states: (sequences, h, ...) of `states_shape`; None is zeros.
    """

    def __init__(
        self,
        values: torch.Tensor,
        initial_states: torch.Tensor | None,
        states_shape: tuple[int, ...],
        precision: Precision,
    ) -> None:
        self._values, self._initial_states, self._states_shape = values, initial_states, states_shape
        self._state_dtype = precision.state_dtype
        self._intermediate_dtype = precision.intermediate_dtype(values.dtype)
        self._operand_dtype = values.dtype if precision.exact else self._intermediate_dtype
        self._sequence: int | None = None
        self._state = torch.empty(0)

    def advance(self, span: Span, gate: G) -> tuple[torch.Tensor, torch.Tensor]:
        """out (l, h, ...) of the span in the inputs' dtype, and the state (h, ...) after it in fp32."""
        if span.sequence != self._sequence:
            self._sequence, self._state = span.sequence, self._initial_state(span.sequence)
        if span.start == span.stop:
            return self._values[span.batch, span.start : span.stop], self._state
        with ieee_matmul():
            out = self._chunks(span, gate)
        return out, self._state

    @abstractmethod
    def _chunks(self, span: Span, gate: G) -> torch.Tensor:
        """out of a span that has positions; moves `_state` to its end."""

    def _initial_state(self, sequence: int) -> torch.Tensor:
        if self._initial_states is not None:
            return self._state_rounded(self._initial_states[sequence].float())
        return self._values.new_zeros(self._states_shape[1:], dtype=torch.float32)

    def _operand_rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        return rounded_operand(tensor, self._operand_dtype)

    def _intermediate_rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._intermediate_dtype).float()

    def _state_rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._state_dtype).float()
