"""Base class of rounded forms: the three roundings of a precision, and the state of a sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch

from ssdprof.kernels.precision import Precision
from ssdprof.operators.operator import Gate, Span
from ssdprof.operators.rounding import ieee_matmul, rounded_operand

G = TypeVar("G", bound=Gate)


class RoundedForm(ABC, Generic[G]):
    """Evaluates an operator in one precision, span after span; the state is carried within a sequence.

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
