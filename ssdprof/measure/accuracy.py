"""The comparator: measures how far an output is from the fp64 oracle, and how much of its error
budget it uses.

It compares three tensors: `hi`, the fp64 oracle; `lo`, the same operator with every rounding that
the precision allows (`OracleSpec.rounded`); `ours`, the output under test.  For each head, in the
maximum norm and in the RMS norm,

    |ours - hi|  <=  2 * (|lo - hi| + eps * |hi|)

must hold, with eps the relative error of the coarsest rounding on the way (`coarsest_rounding`).
(`FLUSHED`, the smallest normal fp32 number, is added in the brackets, so that zeros have a budget.)
The error of a single `lo` may be small by chance, so the largest error of several ones counts: the
plain ones, of which some have shorter chunks, and "draws", in which every operand has a random
error.  docs/measuring.md says why.  All tensors are compared in blocks of positions, so that only
the outputs under test are ever in memory as a whole, in their own dtype.

Sums and comparisons are in fp64.  A difference of two fp32, fp16 or bf16 numbers is then exact
unless their exponents are more than 29 binary digits apart, so the comparator's own rounding does
not affect a result.  The host waits for the device once for each block, of which the oracle looks
whether it is finite, and in `result`.

Shapes in this module: b is the batch, l the positions, h the heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Generic, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from ssdprof import operators
from ssdprof.core.accuracy import Accuracy, BudgetUse, Deviation
from ssdprof.core.base import SLICES, TOLERANCES, DType, TensorName
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.oracle import Block, Span, joined
from ssdprof.kernels.precision import Precision
from ssdprof.measure.rounding_tests import DRAWS, HeadNorms, RoundingTests, finite
from ssdprof.operators.operator import Operator, OracleSpec, OutputPair
from ssdprof.operators.rounding import FLUSHED, Gate, Rounded, coarsest_rounding, unit_roundoff
from ssdprof.operators.tensors import dtype_name

_NAMES: tuple[TensorName, ...] = ("out", "final_states")
K = TypeVar("K", bound=Hashable)  # the type of the candidates' keys
# the inputs of a call, the positions of one block in them, and the decays of that block
SpanInputs = tuple[Inputs, Span, Gate]
ORACLE = "fp64 oracle"
_COARSE = (torch.bfloat16, torch.float16)
_FINE_DRAWS = 8  # draws of `lo` for fp32 inputs; 16-bit inputs have `DRAWS`
# memory for one block and the tensors that are computed from it, by type of device
_WORKING_BYTES = {"cuda": 5 << 30, "cpu": 256 << 20}
# Positions of the longest block.  On a GPU more draws fit beside a shorter block and are made at
# once: of 12 for 8,192 tokens, with 1,024 positions 6 for mamba2-2.7b and for Kimi Linear, and 12
# for Qwen3-Next; with 2,048 positions 3, 4 and 6.
_LONGEST_BLOCK = {"cuda": 1024, "cpu": 2048}
# tokens of a sequence, for packed ones their average, up to which draws are evaluated at once on a
# CPU
_SHORT = 16


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An output to verify.

    precision: what the implementation may round.
    baseline: the key of the candidate with which it is also compared; None: there is none.
    name: shown where this is the baseline of another candidate; empty: its key is shown.
    cuts: whether the implementation declares that it cuts operands of matrix products to tf32.
    """

    output: OutputPair
    precision: Precision
    baseline: Hashable | None = None
    name: str = ""
    cuts: bool = False

    @property
    def nulls(self) -> dict[str, bool]:
        """The null hypotheses of the tests: the names of the rounded forms of which the output may
        be one, and whether they cut operands to tf32.
        """
        forms = {str(self.precision): False}
        if self.cuts:
            forms[f"{self.precision}, cut"] = True
        return forms


def compare(
    inputs: Inputs,
    candidates: Mapping[K, Candidate],
    *,
    on_progress: Callable[[int], object] | None = None,
) -> dict[K, tuple[Accuracy, ...]]:
    """The accuracy of out and final_states of every candidate, in one pass over the oracle.

    candidates: by keys of the caller, which the result has, too.  There is at least one.
    on_progress: called with the number of positions done since the last call; there are b * l.

    Raises ValueError if a candidate's tensors lack the shape, dtype or device of the operator's
    output.
    """
    for candidate in candidates.values():
        check_output(candidate.output, inputs)
    comparison = _Comparison(inputs, candidates)
    for block in comparison.blocks():
        comparison.add(block)
        if on_progress is not None:
            span, *_ = block
            on_progress(span.length)
    return comparison.results()


class _Comparison(Generic[K]):
    """Compares all candidates with the oracle, block by block.

    Candidates of the same precision share their rounded forms.
    """

    def __init__(self, inputs: Inputs, candidates: Mapping[K, Candidate]) -> None:
        self._inputs = inputs
        self._candidates = candidates
        self._operator = operators.get(inputs.operator)
        self._oracle = oracle = self._operator.oracle
        self._out = oracle.forms(inputs)[0]
        self._length = block_length(oracle, inputs)
        coarse = self._out.dtype in _COARSE
        count = DRAWS if coarse else _FINE_DRAWS
        self._together = _drawn_together(self._operator, inputs, self._length, count)
        self._shorter = oracle.shorter_chunks(inputs) if coarse else ()
        self._rounded: dict[str, list[Rounded]] = {}
        for candidate in candidates.values():
            for null, cuts in candidate.nulls.items():
                self._rounded[null] = self._forms(candidate.precision, cuts, count)
        plain_count = 1 + len(self._shorter)
        self._outs = _TensorSums("out", candidates, coarse, plain_count)
        self._states = _TensorSums("final_states", candidates, coarse, plain_count)
        self._largest_exponent = torch.zeros(self._out.shape[2], device=inputs.device)  # (h)
        # the first block of the current sequence; there is none yet
        self._origin = Span(sequence=-1, batch=0, start=0, stop=0)

    def _forms(self, precision: Precision, cuts: bool, count: int) -> list[Rounded]:
        """The rounded forms of a precision.

        First the plain ones, without random errors: for the usual chunk length and for each shorter
        length.  Then forms with random errors, which make `count` draws, `_together` in each form.
        cuts: whether the forms with random errors cut operands to tf32.
        """

        def new() -> Rounded:
            return self._oracle.rounded(self._inputs, precision)

        plain = [new() for _ in range(1 + len(self._shorter))]
        seeds = range(count // self._together)
        return plain + [new().perturb(seed, cuts=cuts) for seed in seeds]

    def _advance(self, forms: list[Rounded], spans: Sequence[SpanInputs]) -> Iterator[Tensor]:
        """`out` of a block, (h, l, ...), by each plain form, then by each draw of the others.

        spans: the block for each plain form, then the block for the others, in which it is repeated
        `_together` times.
        """
        *plain_spans, wide_span = spans
        plain_count = len(plain_spans)
        for form, span in zip(forms[:plain_count], plain_spans, strict=True):
            out, _ = form.advance(*span)
            yield _head_first(out)
        for form in forms[plain_count:]:
            outs, _ = form.advance(*wide_span)
            yield from map(_head_first, outs.chunk(self._together, 1))

    def _states_of(self, forms: list[Rounded]) -> Iterator[Tensor]:
        """The states after the block, (h, rows, width), in the order of `_advance`."""
        plain_count = 1 + len(self._shorter)
        for form in forms[:plain_count]:
            yield _rows(form.state)
        for form in forms[plain_count:]:
            yield from map(_rows, form.state.chunk(self._together))

    def blocks(self) -> Iterable[Block]:
        """The blocks of the oracle, in the order in which `add` takes them."""
        return self._oracle.blocks(self._inputs, block=self._length)

    def add(self, block: Block) -> None:
        """Compare a block of all candidates.

        Blocks come in the order of `blocks`, because rounded forms carry their states from one to
        the next.
        """
        # index: in `final_states`; None: the state after the block is none of the final ones
        span, exact_out, exact_state, index = block
        inputs = self._inputs
        oracle = self._oracle
        if span.sequence != self._origin.sequence:
            self._origin = span
        chunk = oracle.fitting_chunk(inputs, span.length)
        gate = oracle.gate(inputs, span, chunk)
        self._largest_exponent = torch.maximum(self._largest_exponent, gate.largest_exponent())
        spans: list[SpanInputs] = [(inputs, span, gate)]
        for size in self._shorter:
            spans.append((inputs, span, oracle.gate(inputs, span, min(size, chunk))))
        # the block several times side by side, for draws that are made together
        wide, wide_span = self._operator.repeated(inputs, span, self._together)
        wide_gate = gate if wide is inputs else oracle.gate(wide, wide_span, chunk)
        spans.append((wide, wide_span, wide_gate))
        self._outs.add(
            _head_first(exact_out).double(),
            {null: self._advance(forms, spans) for null, forms in self._rounded.items()},
            Region(
                shape=self._outs.shape,
                index=span.batch,
                positions=(span.start, span.stop),
                origin=self._origin.start,
            ),
        )
        if index is not None:
            self._states.add(
                _rows(exact_state),
                {null: self._states_of(forms) for null, forms in self._rounded.items()},
                Region(shape=self._states.shape, index=index, positions=None),
            )

    def results(self) -> dict[K, tuple[Accuracy, ...]]:
        """The accuracy of each candidate's `out` and `final_states`.  Waits for the device."""
        dtype = self._out.dtype
        accuracies: dict[K, tuple[Accuracy, ...]] = {}
        for key, candidate in self._candidates.items():
            eps = coarsest_rounding(dtype, candidate.precision, self._largest_exponent)
            accuracies[key] = tuple(
                tensor.result(key, eps, unit_roundoff(dtype))
                for tensor in (self._outs, self._states)
            )
        return accuracies


class _TensorSums(Generic[K]):
    """The running comparison of one output tensor, `out` or `final_states`, of all candidates."""

    def __init__(
        self, name: TensorName, candidates: Mapping[K, Candidate], coarse: bool, plain_count: int
    ) -> None:
        """coarse: whether the inputs have 16 bits; only then are errors tested (`RoundingTests`).
        plain_count: number of rounded forms without random errors.
        """
        index = _NAMES.index(name)
        self._tensors = {key: candidate.output[index] for key, candidate in candidates.items()}
        first = next(iter(self._tensors.values()))
        heads = first.shape[2] if name == "out" else first.shape[1]
        self.name = name
        self.shape = tuple(first.shape)
        self._dtype = first.dtype
        self._candidates = candidates

        scale = _rms(first)  # one for all comparisons, so that their shares of matches compare

        def deviation(against: str) -> RunningDeviation:
            return RunningDeviation(against, self.shape, heads, scale)

        # the deviation of the oracle itself, rounded to the dtype of the output
        self._floor = deviation(ORACLE)
        self._from_oracle = {key: deviation(ORACLE) for key in candidates}
        self._from_baseline: dict[K, RunningDeviation] = {}
        names: dict[Hashable, str] = {
            key: candidate.name or str(key) for key, candidate in candidates.items()
        }
        for key, candidate in candidates.items():
            if candidate.baseline is not None:
                self._from_baseline[key] = deviation(names[candidate.baseline])
        self._rounding_tests = RoundingTests(
            self.shape[1] if name == "out" else None, tested=coarse, plain_count=plain_count
        )
        # for each dtype, whether all of a head of the oracle's tensor fits in it: (h)
        self._fits_oracle = {
            dtype: torch.ones(heads, dtype=torch.bool, device=first.device) for dtype in _COARSE
        }

    def add(self, high: Tensor, rounded: Mapping[str, Iterable[Tensor]], region: Region) -> None:
        """Compare a block.

        high: the oracle's block, (h, rows, width), fp64.
        rounded: name of a null hypothesis -> its blocks: those of the plain forms, then draws.
        """
        floor = high.to(self._dtype)
        if self.name == "final_states":
            for dtype in _COARSE:
                self._fits_oracle[dtype] &= _fits(floor, dtype)
        self._floor.add(floor.double(), high, region)
        blocks: dict[Hashable, Tensor] = {
            key: region.cut(tensor) for key, tensor in self._tensors.items()
        }
        start = region.positions[0] if region.positions else 0
        errors = {null: (form - high for form in forms) for null, forms in rounded.items()}
        self._rounding_tests.add(
            high, floor.double(), dict(enumerate(blocks.values())), errors, start, region.origin
        )
        for key, candidate in self._candidates.items():
            self._from_oracle[key].add(blocks[key], high, region)
            if candidate.baseline is not None:
                baseline_block = blocks[candidate.baseline]
                self._from_baseline[key].add(blocks[key], baseline_block, region)

    def result(self, key: K, eps: Tensor, unit: float) -> Accuracy:
        """The accuracy of one candidate's tensor.  Waits for the device.

        eps: the relative error of the coarsest rounding, (h); see the module.  unit: the unit
        roundoff of the inputs' dtype.
        """
        from_baseline = self._from_baseline.get(key)
        candidate = self._candidates[key]
        claimed = candidate.precision.state_dtype
        is_states = self.name == "final_states"
        nulls = list(candidate.nulls)
        index = list(self._tensors).index(key)
        uses = [self._budget_use(key, eps, "max"), self._budget_use(key, eps, "rms")]
        return Accuracy(
            tensor=self.name,
            dtype=dtype_name(self._dtype),
            vs_oracle=self._from_oracle[key].result(),
            vs_baseline=None if from_baseline is None else from_baseline.result(),
            floor=self._floor.result(),
            checks=self._rounding_tests.checks(index, nulls, unit, eps),
            budget=tuple(use for use in uses if use is not None),
            coarser=self._coarser_than(key, claimed) if is_states else None,
            claimed=dtype_name(claimed) if is_states else None,
        )

    def _budget_use(self, key: K, eps: Tensor, norm: Literal["max", "rms"]) -> BudgetUse | None:
        """The error and the budget of the head that uses most of its budget, in this norm.

        None if that budget is not finite, because the exponent of a decay is not a number.
        """
        deviation = self._from_oracle[key]
        high = self._floor.other
        low = self._rounding_tests.norms(list(self._candidates[key].nulls))

        def size(norms: HeadNorms) -> Tensor:
            """The norm of each head, (h)."""
            return norms.max if norm == "max" else norms.rms(deviation.elements / len(high.max))

        error = size(deviation.error)
        largest = torch.stack([size(norms) for norms in low]).amax(0)
        budget = 2 * (largest + eps * size(high) + FLUSHED)
        head = int((error / budget).argmax())
        if not bool(budget[head].isfinite()):
            return None
        return BudgetUse(
            norm=norm,
            head=head,
            error=float(error[head]),
            budget=float(budget[head]),
            position=deviation.position_of_max(head),
        )

    def _coarser_than(self, key: K, claimed: torch.dtype) -> DType | None:
        """A 16-bit dtype, coarser than the claimed one, in which all states of a head fit, although
        the oracle's do not; None if there is none.

        Such states were rounded to that dtype, which need not exceed the budget.
        """
        states = self._tensors[key].transpose(0, 1)
        for dtype in _COARSE:
            if torch.finfo(dtype).eps > torch.finfo(claimed).eps:
                rounded_heads = _fits(states, dtype) & ~self._fits_oracle[dtype]
                if bool(rounded_heads.any()):
                    return dtype_name(dtype)
        return None


def _head_first(out: Tensor) -> Tensor:
    """(l, h, ...) -> (h, l, ...)."""
    return out.transpose(0, 1).contiguous()


def _rows(state: Tensor) -> Tensor:
    """(h, ...) -> (h, rows, width)."""
    return state.reshape(len(state), -1, state.shape[-1])


def _fits(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """For each head, whether a rounding to `dtype` changes no element except those near zero:
    (h, ...) -> (h).
    """
    fits = (tensor.to(dtype).to(tensor.dtype) == tensor) | (tensor.abs() < FLUSHED)
    return fits.flatten(1).all(1)


def check_output(output: OutputPair, inputs: Inputs) -> None:
    """ValueError unless the tensors have the shapes, dtypes and device of the operator's output for
    these inputs.
    """
    device = inputs.device
    forms = operators.get(inputs.operator).oracle.forms(inputs)
    for name, tensor, form in zip(_NAMES, output, forms, strict=True):
        if (
            tuple(tensor.shape) != form.shape
            or tensor.dtype != form.dtype
            or tensor.device != device
        ):
            raise ValueError(
                f"{name} must be {form.dtype} of shape {tuple(form.shape)} on {device}, "
                f"not {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
            )


def block_length(oracle: OracleSpec, inputs: Inputs) -> int:
    """Positions per block of the oracle: whole chunks, at least one, as many as `_LONGEST_BLOCK`
    and `_WORKING_BYTES` allow.
    """
    chunk = oracle.chunk_size(inputs)
    device = inputs.device.type
    fitting = _WORKING_BYTES[device] // oracle.bytes_per_position(inputs)
    length: int = max(chunk, min(fitting, _LONGEST_BLOCK[device]) // chunk * chunk)
    return length


def _drawn_together(operator: Operator, inputs: Inputs, block: int, count: int) -> int:
    """The number of draws that are evaluated at once, a divisor of `count`.

    On a GPU, and for short sequences, an operation takes as long as its launch, so that as many
    draws as fit in memory are evaluated at once.  Elsewhere it is one, as for operators whose heads
    cannot be repeated (`Operator.repeated`).
    block: positions per block.
    """
    device = inputs.device.type
    sequences = inputs.sequences if inputs.cu_seqlens is not None else 1
    if not operator.divided or (device == "cpu" and inputs.length > _SHORT * sequences):
        return 1
    needed = operator.oracle.bytes_per_position(inputs) * min(block, inputs.length)
    # a rounded form takes about a third of the memory of a block of the oracle, or less
    fitting = max(1, 3 * _WORKING_BYTES[device] // needed)
    divisors = [number for number in range(1, count + 1) if count % number == 0]
    return max(number for number in divisors if number <= fitting)


# --- the difference of two tensors, block by block

_NOWHERE = torch.iinfo(torch.int64).max  # an index behind all elements
# Larger differences count as not finite: the sum of their squares would overflow in fp64.
_LARGEST = 1e145


@dataclass(frozen=True, kw_only=True)
class Region:
    """The region of a block in its tensor: positions start, ..., stop - 1 of an index of `out`, or
    an index of `final_states`.

    Blocks are compared with the head first, as (h, rows, width).  A row is a position of `out`, or
    a row of a state.
    """

    shape: tuple[int, ...]  # of the tensor: (b, l, h, ...), or (sequences, h, ...)
    index: int  # in the first dimension of the tensor
    positions: tuple[int, int] | None  # (start, stop); None for states
    origin: int = 0  # first position of the sequence to which the block belongs

    def cut(self, tensor: Tensor) -> Tensor:
        """The block of a tensor of `shape`, head first, in fp64."""
        block = tensor[self.index]
        if self.positions is not None:
            block = _head_first(block[slice(*self.positions)])
        return _rows(block).double()

    def flat(self, head: Tensor, j: Tensor) -> Tensor:
        """Row-major index in the tensor of element j of a head of the block.

        j counts the elements of (rows, width) of the head, row by row.
        """
        if self.positions is None:
            _, heads, *state_dims = self.shape
            return (self.index * heads + head) * prod(state_dims) + j
        _, length, heads, *value_dims = self.shape
        width = prod(value_dims)
        position = self.positions[0] + j // width
        return ((self.index * length + position) * heads + head) * width + j % width


class RunningDeviation:
    """Accumulates the `Deviation` of a tensor, "ours", from another one, block by block."""

    def __init__(self, against: str, shape: tuple[int, ...], heads: int, scale: Tensor) -> None:
        """against: names the other tensor in reports.  shape: shape of both tensors.
        scale: a scalar in fp64, the RMS of a tensor, for tolerances relative to it.
        """
        device = scale.device
        self.against = against
        self.shape = shape
        self._scale = scale
        self.error = HeadNorms(heads, device)
        self.other = HeadNorms(heads, device)
        # sums of squares of the error and of the other tensor in each slice of positions:
        # (2, slices), fp64; None for states
        self._squares: Tensor | None = None
        self._worst_index = torch.zeros(heads, dtype=torch.int64, device=device)
        # matches for each absolute tolerance, then for each relative one
        self._matches = torch.zeros(2 * len(TOLERANCES) - 1, dtype=torch.int64, device=device)
        self._nonfinite = torch.zeros((), dtype=torch.int64, device=device)
        self._first_nonfinite = torch.full((), _NOWHERE, dtype=torch.int64, device=device)
        self.elements = 0

    def add(self, ours: Tensor, other: Tensor, region: Region) -> None:
        """Compare a block.  ours, other: (h, rows, width), fp64.

        An element matches at tolerance t if it equals the other one, or if both are finite and
        |ours - other| <= t (1 + |other|), or, for relative tolerances, t (scale + |other|).  So a
        NaN never matches, and an infinity matches only the same infinity.
        """
        if ours.numel() == 0:
            return
        head = torch.arange(len(ours), device=ours.device)
        distance = (ours - other).abs()
        bad = ~(distance < _LARGEST)
        error = distance.masked_fill(bad, 0.0)
        other_finite = other.masked_fill(bad, 0.0).abs()

        block_max, block_argmax = error.flatten(1).max(1)
        worse = (block_max > self.error.max) | (self.elements == 0)
        self._worst_index = torch.where(worse, region.flat(head, block_argmax), self._worst_index)
        _, errors = self.error.add(error)
        _, others = self.other.add(other_finite)
        if region.positions is not None:
            self._add_slices((errors, others), *region.positions)

        equal = ours == other
        absolute = distance / (1.0 + other_finite)
        relative = distance / (self._scale + other_finite)
        shares = [(absolute, tolerance) for tolerance in TOLERANCES]
        shares += [(relative, tolerance) for tolerance in TOLERANCES[1:]]
        for i, (share, tolerance) in enumerate(shares):
            self._matches[i] += (equal | (share <= tolerance)).sum()

        bad = bad.flatten(1)
        first_in_head = bad.to(torch.uint8).argmax(1)
        first = torch.where(bad.any(1), region.flat(head, first_in_head), _NOWHERE).min()
        self._first_nonfinite = torch.minimum(self._first_nonfinite, first)
        self._nonfinite += bad.sum()
        self.elements += ours.numel()

    def _add_slices(self, rows: tuple[Tensor, ...], start: int, stop: int) -> None:
        """Add sums of squares to their slices of the positions.

        rows: the sums of squares of the error and of the other tensor, each (h, rows).
        start, stop: the positions of the rows.
        """
        slices = min(SLICES, self.shape[1])
        device = self._scale.device
        if self._squares is None:
            self._squares = torch.zeros(2, slices, dtype=torch.float64, device=device)
        index = torch.arange(start, stop, device=device) * slices // self.shape[1]
        in_slice = torch.arange(slices, device=device)[:, None] == index
        for sums, squares in zip(self._squares, rows, strict=True):
            # index_add_ has no fixed order of additions
            sums += torch.where(in_slice, squares.sum(0), 0.0).sum(1)

    def result(self) -> Deviation:
        """The deviation of the whole tensor.  Waits for the device.

        `worst_head` is the head with the largest ratio of its RMS error to its RMS.
        `worst_position` is the position of `max_abs`, which may be in another head.
        """
        ratios = rms_ratio(self.error.square_sum, self.other.square_sum)
        whole_ratio = rms_ratio(self.error.square_sum.sum(), self.other.square_sum.sum())
        along: list[float | None] = []
        if self._squares is not None:
            along = [_finite_or_none(ratio) for ratio in rms_ratio(*self._squares).tolist()]
        nonfinite = int(self._nonfinite)
        percents = [100.0 * count / max(self.elements, 1) for count in self._matches.tolist()]
        zero, small, large, small_rms, large_rms = percents  # in the order of `add`
        return Deviation(
            against=self.against,
            elements=self.elements,
            matches=(zero, small, large),
            matches_rms=(small_rms, large_rms),
            rms_ratio=_finite_or_none(float(whole_ratio)),
            max_abs=float(self.error.max.max()),
            worst_head=int(ratios.argmax()),
            worst_position=self.position_of_max(int(self.error.max.argmax())),
            nonfinite=nonfinite,
            first_nonfinite=unravel(int(self._first_nonfinite), self.shape) if nonfinite else None,
            scale_max_abs=float(self.other.max.max()),
            along=tuple(along),
        )

    def position_of_max(self, head: int) -> tuple[int, ...]:
        """The position in the tensor of the largest difference in `head`."""
        return unravel(int(self._worst_index[head]), self.shape)


def _rms(tensor: Tensor) -> Tensor:
    """The RMS of a tensor, whose elements that are not finite count as 0; a scalar in fp64."""
    norm: Tensor = torch.linalg.vector_norm(finite(tensor), dtype=torch.float64)
    return norm / math.sqrt(max(tensor.numel(), 1))


def rms_ratio(error_squares: Tensor, other_squares: Tensor) -> Tensor:
    """sqrt(error_squares / other_squares); 0 where there is no error, infinity where only the other
    is 0.
    """
    return torch.where(error_squares == 0, 0.0, (error_squares / other_squares).sqrt())


def _finite_or_none(ratio: float) -> float | None:
    """The ratio; None if it is not finite."""
    return ratio if math.isfinite(ratio) else None


def unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The position in a tensor of this shape of a row-major index."""
    return tuple(map(int, np.unravel_index(index, shape)))


# --- outputs


def oracle_output(inputs: Inputs) -> OutputPair:
    """The oracle's output: `out` in the dtype of the operator's output, final states in fp32."""
    oracle = operators.get(inputs.operator).oracle
    blocks = oracle.blocks(inputs, block=block_length(oracle, inputs))
    return joined(inputs, blocks, inputs.values.dtype, torch.float32)


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_BLOCK = 1 << 22  # elements that are converted to int64 at a time
_ODD = 6364136223846793005  # the multiplier of Knuth's MMIX random number generator


def fingerprint(*tensors: Tensor) -> tuple[int, ...]:
    """For each tensor a weighted sum of its elements' bits, modulo 2**64, with odd weights.

    It is the same for the same bits in any run and on any device.  One changed element always
    changes it, because an odd weight has an inverse modulo 2**64.  A NaN is compared by its bits.
    """
    return tuple(_fingerprint(tensor) for tensor in tensors)


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The fingerprint of each tensor, by its name."""
    return {name: _fingerprint(tensor) for name, tensor in tensors.items()}


def changes(before: Mapping[str, int], inputs: Mapping[str, Tensor]) -> str:
    """A phrase that names the inputs whose bits have changed; empty if none has.

    before: the `fingerprints` of the inputs before the call.
    """
    now = fingerprints(inputs)
    changed = [name for name in now if now[name] != before[name]]
    return f"it changes its inputs: {', '.join(changed)}" if changed else ""


def bits_of(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers."""
    return tensor.detach().contiguous().view(_BITS[tensor.element_size()])


def _fingerprint(tensor: Tensor) -> int:
    """The fingerprint of one tensor, in integers of 64 bits that wrap around.

    The sum of each block of elements is added to the sum so far times an odd number.
    """
    bits = bits_of(tensor).flatten()
    weights = torch.arange(min(_BLOCK, len(bits)), device=bits.device) * _ODD | 1
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _BLOCK):
        block = bits[start : start + _BLOCK].long()
        total = total * _ODD + (block * weights[: len(block)]).sum()
    return int(total)
