"""What more can be said of a wrong output: where its error begins, and which rounding is as large.

One more pass over the oracle, made of outputs that do not pass alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ssdprof import operators
from ssdprof.core.accuracy import Accuracy
from ssdprof.core.base import TensorName
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.oracle import Span, sequences
from ssdprof.kernels.precision import Precision
from ssdprof.measure.accuracy import Candidate, block_length
from ssdprof.operators.rounding import Rounded, unit_roundoff
from ssdprof.operators.tensors import dtype_name

BORDERS = (256, 128, 64, 32, 16)
AS_LARGE = 1.5  # ratio of two errors of the same size
FAR_ABOVE = 16  # of a unit roundoff: the relative error of a wrong row
COARSE = (torch.bfloat16, torch.float16)
TENSORS: tuple[TensorName, ...] = ("out", "final_states")


def diagnosed(
    inputs: Inputs, candidate: Candidate, accuracies: Sequence[Accuracy]
) -> tuple[Accuracy, ...]:
    """The accuracies, with a remark on each output that does not pass and is finite."""
    wrong = [accuracy for accuracy in accuracies if accuracy.reason]
    if not wrong or any(accuracy.vs_oracle.nonfinite for accuracy in wrong):
        return tuple(accuracies)
    errors = _Errors(inputs, candidate)
    remarks = {
        accuracy.tensor: "; ".join(
            filter(None, (errors.beginning(accuracy), errors.known_rounding(accuracy.tensor)))
        )
        for accuracy in wrong
    }
    return tuple(
        accuracy.changed(remark=remarks.get(accuracy.tensor, "")) for accuracy in accuracies
    )


@dataclass(frozen=True)
class _Rounding:
    """A rounding that a precision does not allow.

    words: "states were kept in bf16".  forms: that make it, with the length of their chunks.
    """

    words: str
    forms: Sequence[tuple[Rounded, int]]


class _Errors:
    """Errors of an output, position by position, and of known roundings, head by head."""

    def __init__(self, inputs: Inputs, candidate: Candidate) -> None:
        self._inputs, self._candidate = inputs, candidate
        self._operator = operators.get(inputs.operator)
        shape = candidate.output[0].shape[:3]
        device = inputs.device
        self._rms, self._max, self._size = (
            torch.zeros(shape, dtype=torch.float64, device=device) for _ in range(3)
        )
        self._states = torch.zeros(
            candidate.output[1].shape[:2], dtype=torch.float64, device=device
        )
        # of each tensor: (words or "", evaluation) -> sums of squares of the errors, (h)
        self._squares: dict[TensorName, dict[tuple[str, int], torch.Tensor]] = {
            name: {} for name in TENSORS
        }
        self._sum()

    def _sum(self) -> None:
        oracle, inputs = self._operator.judged, self._inputs
        roundings = list(self._roundings())
        out, final_states = self._candidate.output
        for span, exact_out, exact_state, row in oracle.blocks(
            inputs, block_length(oracle, inputs, inputs.device)
        ):
            part = (span.batch, slice(span.start, span.stop))
            exact = exact_out.double()
            error = (out[part].double() - exact).abs()
            self._rms[part] = error.square().mean(-1).sqrt()
            self._max[part] = error.amax(-1)
            self._size[part] = exact.square().mean(-1).sqrt()
            self._add("out", ("", 0), error.transpose(0, 1))
            if row is not None:
                state = exact_state.double()
                error = (final_states[row].double() - state).abs()
                self._states[row] = error.flatten(1).amax(1)
                self._add("final_states", ("", 0), error)
            for rounding in roundings:
                for index, (form, chunk) in enumerate(rounding.forms):
                    rounded = form.advance(inputs, span, oracle.gate(inputs, span, chunk))[0]
                    key = (rounding.words, index)
                    self._add("out", key, (rounded.double() - exact).transpose(0, 1))
                    if row is not None:
                        self._add("final_states", key, form.state.double() - exact_state.double())
            self._add_rounded("out", exact.transpose(0, 1), out.dtype)
            if row is not None:
                self._add_rounded("final_states", exact_state.double(), final_states.dtype)

    def _add(self, tensor: TensorName, key: tuple[str, int], error: torch.Tensor) -> None:
        """error: (h, ...)."""
        sums = self._squares[tensor]
        squares = error.square().flatten(1).sum(1)
        sums[key] = sums[key] + squares if key in sums else squares

    def _add_rounded(self, tensor: TensorName, exact: torch.Tensor, dtype: torch.dtype) -> None:
        """What a result would be, rounded to a coarser dtype at last."""
        for coarser in COARSE:
            if torch.finfo(coarser).eps > torch.finfo(dtype).eps:
                key = (f"it were rounded to {dtype_name(coarser)}", 0)
                self._add(tensor, key, exact.to(coarser).double() - exact)

    def _roundings(self) -> Iterator[_Rounding]:
        oracle, precision = self._operator.judged, self._candidate.precision
        sizes = (oracle.chunk_size(self._inputs), *oracle.shorter_chunks(self._inputs))

        def rounding(words: str, changed: Precision) -> _Rounding:
            forms = [(oracle.rounded(self._inputs, changed), size) for size in sizes]
            return _Rounding(words, forms)

        yield rounding("", precision)
        for dtype in COARSE:
            if torch.finfo(dtype).eps > torch.finfo(precision.state_dtype).eps:
                words = f"states were kept in {dtype_name(dtype)}"
                yield rounding(words, replace(precision, state_dtype=dtype))
        if precision.exact:
            relaxed = replace(precision, intermediates="relaxed")
            yield rounding("intermediates were rounded to 16 bits", relaxed)

    # --- words

    def known_rounding(self, tensor: TensorName) -> str:
        """ "as if states were kept in bf16"; empty if no rounding causes an error of this size."""
        sums = dict(self._squares[tensor])
        actual = sums.pop(("", 0)).sqrt()
        allowed = [sums.pop(key).sqrt() for key in list(sums) if not key[0]]
        largest = torch.stack(allowed).amax(0) if allowed else torch.zeros_like(actual)
        for (words, _), squares in sums.items():
            expected = squares.sqrt()
            ratio = actual / expected
            alike = (ratio < AS_LARGE) & (ratio > 1 / AS_LARGE) & (expected > AS_LARGE * largest)
            if float(alike.double().mean()) > 0.75:
                return f"the error is as large as if {words}"
        return ""

    def beginning(self, accuracy: Accuracy) -> str:
        """The first place outside the budget of a head, and the border from which on all is
        wrong.
        """
        use = next((use for use in accuracy.budget if use.error > use.budget), None)
        if use is None:
            return ""
        spans = sequences(self._inputs.sequences, self._inputs.length, self._inputs.cu_seqlens)
        if accuracy.tensor == "final_states":
            outside = self._states[:, use.head] > use.budget
            if use.norm == "rms" or len(outside) != len(spans) or not bool(outside.any()):
                return ""
            first = spans[int(outside.byte().argmax())]
            return f"the first wrong state is that of {_named(first, spans)}"
        errors = (self._max if use.norm == "max" else self._rms)[..., use.head]
        for span in spans:
            outside = errors[span.batch, span.start : span.stop] > use.budget
            if bool(outside.any()):
                position = int(outside.byte().argmax())
                start = self._border(span, use.head, position)
                name = _named(span, spans)
                if start is None:
                    return f"the first position outside is {position} of {name}"
                if start == 0:
                    return f"all of {name} is wrong, from its start on"
                multiple = next(
                    (f", a multiple of {size}," for size in BORDERS if start % size == 0), ""
                )
                return f"from position {start} of {name} on{multiple} all is wrong"
        return ""

    def _border(self, span: Span, head: int, position: int) -> int | None:
        """The position in a sequence, at most this one, before which it is right and from which on
        it is wrong, in nine of ten positions.
        """
        rows = (span.batch, slice(span.start, span.stop), head)
        unit = unit_roundoff(self._candidate.output[0].dtype)
        wrong = (self._rms[rows] > FAR_ABOVE * unit * self._size[rows]).double()
        length = span.length
        before = torch.cat([wrong.new_zeros(1), wrong.cumsum(0)[:-1]])
        count = torch.arange(length, device=wrong.device)
        share_before = before / count.clamp(min=1)
        share_after = (wrong.sum() - before) / (length - count)
        start = int((share_after - share_before)[: position + 1].argmax())
        return start if share_after[start] >= 0.9 and share_before[start] <= 0.1 else None


def _named(span: Span, spans: Sequence[Span]) -> str:
    """ "the sequence", or "sequence 2 (17 tokens)"."""
    if len(spans) == 1:
        return "the sequence"
    return f"sequence {span.sequence} ({span.length:,} tokens)"
