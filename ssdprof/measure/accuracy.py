"""The comparator: measures how far an output is from the fp64 oracle, and how much of its error
budget it uses.

It compares three tensors: `hi`, the fp64 oracle; `lo`, the same operator with every rounding that
the precision allows (`OracleSpec.rounded`); `ours`, the output under test.  For each head, in the
maximum norm and in the RMS norm,

    |ours - hi|  <=  2 * (|lo - hi| + eps * |hi|)

must hold, with eps the relative error of the coarsest rounding on the way (`coarsest_rounding`).
The error of a single `lo` may be small by chance, so the largest of several counts: of shorter
chunks, and in which each operand has another error.  docs/measuring.md says why.  All three are
compared in blocks of positions: only the outputs under test are ever held whole, in their own
dtype.

Every sum is in fp64 and every comparison too: a difference of two fp32, fp16 or bf16 numbers is
then exact unless their exponents are more than 29 binary digits apart, so the comparator's own
rounding does not affect a result.  The host reads nothing before `result`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeVar

import torch

from ssdprof import operators
from ssdprof.core.accuracy import Accuracy, BudgetUse, Deviation
from ssdprof.core.base import SLICES, TOLERANCES, DType, TensorName
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.oracle import joined
from ssdprof.kernels.precision import Precision
from ssdprof.measure.rounding_tests import DRAWS, HeadNorms, RoundingTests, finite
from ssdprof.operators.operator import Operator, OracleSpec, Output
from ssdprof.operators.rounding import FLUSHED, Rounded, coarsest_rounding, unit_roundoff
from ssdprof.operators.tensors import dtype_name

_NAMES: tuple[TensorName, ...] = ("out", "final_states")
K = TypeVar("K")  # of candidates
ORACLE = "fp64 oracle"
_COARSE = (torch.bfloat16, torch.float16)
_FINE_DRAWS = 8  # of lo with fp32 inputs
# of one block and the tensors computed from it
_WORKING_BYTES = {"cuda": 5 << 30, "cpu": 256 << 20}
# positions; on a GPU it leaves room for all draws at once
_LONGEST_BLOCK = {"cuda": 1024, "cpu": 2048}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An output to verify.  baseline: the key of the candidate that it is also compared with.
    name: shown where it is the baseline of another candidate; empty: its key.
    cuts: it declares that it cuts the operands of matrix products to tf32.
    """

    output: Output
    precision: Precision
    baseline: Any = None
    name: str = ""
    cuts: bool = False

    @property
    def nulls(self) -> dict[str, bool]:
        """Rounded forms that it may be, and whether they cut operands."""
        return {
            f"{self.precision}, cut" if cuts else str(self.precision): cuts
            for cuts in {False, self.cuts}
        }


def compare(
    inputs: Inputs,
    candidates: Mapping[K, Candidate],
    *,
    on_progress: Callable[[int], None] = lambda _: None,
) -> dict[K, tuple[Accuracy, ...]]:
    """The accuracy of out and final_states of every candidate, in one pass over the oracle.

    on_progress: called with the number of positions done since the last call; there are b * l.
    Raises ValueError if a candidate's tensors lack the shape or dtype of the operator's output;
    BadInputError for an operator without a oracle.
    """
    for candidate in candidates.values():
        check_output(candidate.output, inputs)
    operator, device = operators.get(inputs.operator), inputs.device
    oracle = operator.oracle
    form, length = oracle.forms(inputs)[0], block_length(oracle, inputs, device)
    coarse = form.dtype in _COARSE
    count = DRAWS if coarse else _FINE_DRAWS
    together = _drawn_together(operator, inputs, length, count)
    shorter = oracle.shorter_chunks(inputs) if coarse else ()
    rounded = {
        null: [
            *(oracle.rounded(inputs, candidate.precision) for _ in (None, *shorter)),
            *(
                oracle.rounded(inputs, candidate.precision).perturbed(one, cuts=cuts)
                for one in range(count // together)
            ),
        ]
        for candidate in candidates.values()
        for null, cuts in candidate.nulls.items()
    }
    outs = _TensorSums(
        "out",
        {key: c.output[0] for key, c in candidates.items()},
        candidates,
        coarse,
        1 + len(shorter),
    )
    states = _TensorSums(
        "final_states",
        {key: c.output[1] for key, c in candidates.items()},
        candidates,
        coarse,
        1 + len(shorter),
    )
    largest_exponent = torch.zeros(form.shape[2], device=device)
    sequence, origin = -1, 0
    for span, exact_out, exact_state, row in oracle.blocks(inputs, length):
        if span.sequence != sequence:
            sequence, origin = span.sequence, span.start
        gate = oracle.gate(inputs, span)
        largest_exponent = torch.maximum(largest_exponent, gate.largest_exponent())
        wide, whole = operator.repeated(inputs, span, together)
        given = [
            (inputs, span, gate),
            *((inputs, span, oracle.gate(inputs, span, chunk)) for chunk in shorter),
            (wide, whole, gate if wide is inputs else oracle.gate(wide, whole)),
        ]
        outs.add(
            _head_first(exact_out).double(),
            {null: _advanced(several, given, together) for null, several in rounded.items()},
            Region(
                shape=outs.shape, row=span.batch, positions=(span.start, span.stop), origin=origin
            ),
        )
        if row is not None:
            states.add(
                _rows(exact_state),
                {
                    null: map(
                        _rows,
                        (
                            *(form.state for form in forms[: 1 + len(shorter)]),
                            *(
                                state
                                for form in forms[1 + len(shorter) :]
                                for state in form.state.chunk(together)
                            ),
                        ),
                    )
                    for null, forms in rounded.items()
                },
                Region(shape=states.shape, row=row, positions=None),
            )
        on_progress(span.length)
    comparisons: dict[K, tuple[Accuracy, ...]] = {}
    unit = unit_roundoff(form.dtype)
    for key, candidate in candidates.items():
        eps = coarsest_rounding(form.dtype, candidate.precision, largest_exponent)
        comparisons[key] = (outs.result(key, eps, unit), states.result(key, eps, unit))
    return comparisons


def assert_passes(output: Output, inputs: Inputs, precision: Precision) -> None:
    """For tests of kernels: AssertionError with the reason unless the output passes."""
    found = compare(inputs, {"output": Candidate(output=output, precision=precision)})["output"]
    if why := "; ".join(one.reason for one in found if one.reason):
        raise AssertionError(why)


def _advanced(forms: list[Rounded], given: list[Any], together: int) -> Iterator[torch.Tensor]:
    """out of a span (h, l, ...) by each evaluation: without random errors, in chunks of each
    length, then several draws at a time.
    """
    *exact, wide = given
    for form, each in zip(forms, exact, strict=False):
        yield _head_first(form.advance(*each)[0])
    for form in forms[len(exact) :]:
        yield from map(_head_first, form.advance(*wide)[0].chunk(together, 1))


class _TensorSums:
    """Running comparison of one output tensor of all candidates."""

    def __init__(
        self,
        name: TensorName,
        tensors: Mapping[Any, torch.Tensor],
        candidates: Mapping[Any, Candidate],
        coarse: bool,
        exact: int,
    ) -> None:
        first = next(iter(tensors.values()))
        heads = first.shape[2] if name == "out" else first.shape[1]
        self.name = name
        self.shape = tuple(first.shape)
        self._dtype = first.dtype
        self._tensors = tensors
        self._candidates = candidates

        scale = _rms(first)  # of all comparisons, so that their shares compare

        def deviation(against: str) -> RunningDeviation:
            return RunningDeviation(against, self.shape, heads, scale)

        baselines = {key: c.baseline for key, c in candidates.items() if c.baseline is not None}
        self._floor = deviation(ORACLE)
        self._from_oracle = {key: deviation(ORACLE) for key in candidates}
        self._from_baseline = {
            key: deviation(candidates[b].name or str(b)) for key, b in baselines.items()
        }
        self._rounding_tests = RoundingTests(
            self.shape[1] if name == "out" else None, tested=coarse, exact=exact
        )
        self._fits_oracle = {
            dtype: torch.ones(heads, dtype=torch.bool, device=first.device) for dtype in _COARSE
        }

    def add(
        self, high: torch.Tensor, rounded: Mapping[str, Iterable[torch.Tensor]], region: Region
    ) -> None:
        """A block of the oracle, in fp64, and of the rounded forms: `lo`, then draws of it; (h,
        rows, width).
        """
        floor = high.to(self._dtype)
        if self.name == "final_states":
            for dtype in _COARSE:
                self._fits_oracle[dtype] &= _fits(floor, dtype)
        self._floor.add(floor.double(), high, region)
        cut = {key: region.cut(tensor) for key, tensor in self._tensors.items()}
        start = region.positions[0] if region.positions else 0
        errors = {null: (tensor - high for tensor in several) for null, several in rounded.items()}
        self._rounding_tests.add(
            high, floor.double(), dict(enumerate(cut.values())), errors, start, region.origin
        )
        for key, ours in cut.items():
            self._from_oracle[key].add(ours, high, region)
            baseline = self._candidates[key].baseline
            if baseline is not None:
                self._from_baseline[key].add(ours, cut[baseline], region)

    def result(self, key: Any, eps: torch.Tensor, unit: float) -> Accuracy:
        """eps: (h), see the module.  unit: unit roundoff of the inputs' dtype."""
        from_baseline = self._from_baseline.get(key)
        claimed = self._candidates[key].precision.state_dtype
        of_states = self.name == "final_states"
        return Accuracy(
            tensor=self.name,
            dtype=dtype_name(self._dtype),
            vs_oracle=self._from_oracle[key].result(),
            vs_baseline=None if from_baseline is None else from_baseline.result(),
            floor=self._floor.result(),
            checks=self._rounding_tests.checks(
                list(self._tensors).index(key), [*self._candidates[key].nulls], unit, eps
            ),
            budget=tuple(
                use for norm in ("max", "rms") if (use := self._budget_use(key, eps, norm))
            ),
            coarser=self._coarser_than(key, claimed) if of_states else None,
            claimed=dtype_name(claimed) if of_states else None,
        )

    def _budget_use(
        self, key: Any, eps: torch.Tensor, norm: Literal["max", "rms"]
    ) -> BudgetUse | None:
        """Errors of the head that uses most of its budget.  None without a budget: the exact output
        is not finite.
        """
        deviation, high = self._from_oracle[key], self._floor.other
        low = self._rounding_tests.norms([*self._candidates[key].nulls])

        def size(norms: HeadNorms) -> torch.Tensor:
            return norms.max if norm == "max" else norms.rms(deviation.elements / len(high.max))

        error = size(deviation.error)
        largest = torch.stack([size(one) for one in low]).amax(0)
        budget = 2 * (largest + eps * size(high) + FLUSHED)
        head = int((error / budget).argmax())
        if not bool(budget[head].isfinite()):
            return None
        used = float(error[head])
        most = float(budget[head])
        position = deviation.position_of_max(head)
        return BudgetUse(norm=norm, head=head, error=used, budget=most, position=position)

    def _coarser_than(self, key: Any, claimed: torch.dtype) -> DType | None:
        """The dtype of fp32 states that hold only 16-bit numbers in a head, which no norm shows;
        None if none does.
        """
        for dtype in _COARSE:
            coarser = torch.finfo(dtype).eps > torch.finfo(claimed).eps
            if coarser and bool(
                (_fits(self._tensors[key].transpose(0, 1), dtype) & ~self._fits_oracle[dtype]).any()
            ):
                return dtype_name(dtype)
        return None


def _head_first(out: torch.Tensor) -> torch.Tensor:
    """(l, h, ...) -> (h, l, ...)."""
    return out.transpose(0, 1).contiguous()


def _rows(state: torch.Tensor) -> torch.Tensor:
    """(h, ...) -> (h, rows, width)."""
    return state.reshape(len(state), -1, state.shape[-1])


def _fits(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Whether every element of a head survives a rounding to `dtype`, or is near zero: (h, ...) ->
    (h).
    """
    fits = (tensor.to(dtype).to(tensor.dtype) == tensor) | (tensor.abs() < FLUSHED)
    return fits.flatten(1).all(1)


def check_output(output: Output, inputs: Inputs) -> None:
    """ValueError unless the tensors have the shapes, dtypes and device of the operator's output for
    these inputs.
    """
    device = inputs.device
    for name, tensor, form in zip(
        _NAMES, output, operators.get(inputs.operator).oracle.forms(inputs), strict=True
    ):
        if (
            tuple(tensor.shape) != form.shape
            or tensor.dtype != form.dtype
            or tensor.device != device
        ):
            raise ValueError(
                f"{name} must be {form.dtype} of shape {tuple(form.shape)} on {device}, "
                f"not {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
            )


def block_length(oracle: OracleSpec[Any], inputs: Inputs, device: torch.device) -> int:
    """Positions per block: whole chunks, at most `_LONGEST_BLOCK`, within the working memory."""
    chunk = oracle.chunk_size(inputs)
    fitting = _WORKING_BYTES[device.type] // oracle.bytes_per_position(inputs)
    length: int = max(chunk, min(fitting, _LONGEST_BLOCK[device.type]) // chunk * chunk)
    return length


def _drawn_together(operator: Operator, inputs: Inputs, block: int, count: int) -> int:
    """The number of draws that are evaluated at once, a divisor of `count`: on a GPU as many as fit
    into the memory of a block, since small operations take the time of their launches.  A rounded
    form takes a third of it at most.
    """
    if inputs.device.type == "cpu" or not operator.divided:
        return 1
    fitting = (
        3
        * _WORKING_BYTES["cuda"]
        // (operator.oracle.bytes_per_position(inputs) * min(block, inputs.length))
    )
    return max(
        some for some in range(1, count + 1) if some <= max(1, fitting) and count % some == 0
    )


# --- the difference of two tensors, block by block

_NOWHERE = torch.iinfo(torch.int64).max
_LARGEST = 1e145  # of a difference: the squares of whole tensors of larger ones overflow in fp64


@dataclass(frozen=True, kw_only=True)
class Region:
    """The region of a block in its tensor: positions start..stop of a row of `out`, or a sequence
    of `final_states`.

    Blocks are compared with the head first, as (h, rows, width): rows are positions, or those of a
    state.
    """

    shape: tuple[int, ...]  # of the tensor: (b, l, h, ...), or (sequences, h, ...)
    row: int  # batch or sequence
    positions: tuple[int, int] | None  # (start, stop); None for states
    origin: int = 0  # first position of the sequence

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """The block of a tensor of `shape`, head first, in fp64."""
        block = tensor[self.row]
        if self.positions is not None:
            block = _head_first(block[slice(*self.positions)])
        return _rows(block).double()

    def flat(self, head: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        """Row-major index in the tensor of element (head, j) of the block."""
        if self.positions is None:
            _, heads, *rest = self.shape
            return (self.row * heads + head) * prod(rest) + j
        _, length, heads, *rest = self.shape
        width = prod(rest)
        return (
            (self.row * length + self.positions[0] + j // width) * heads + head
        ) * width + j % width


class RunningDeviation:
    """Accumulates a `Deviation`.  scale: RMS of the tensor, fp64, on its device."""

    def __init__(
        self, against: str, shape: tuple[int, ...], heads: int, scale: torch.Tensor
    ) -> None:
        device = scale.device
        self.against = against
        self.shape = shape
        self._scale = scale
        self.error = HeadNorms(heads, device)
        self.other = HeadNorms(heads, device)
        # of error and other in slices of the positions: (2, slices), fp64
        self._squares: torch.Tensor | None = None
        self._worst_index = torch.zeros(heads, dtype=torch.int64, device=device)
        self._matches = torch.zeros(2 * len(TOLERANCES) - 1, dtype=torch.int64, device=device)
        self._nonfinite = torch.zeros((), dtype=torch.int64, device=device)
        self._first_nonfinite = torch.full((), _NOWHERE, dtype=torch.int64, device=device)
        self.elements = 0

    def add(self, ours: torch.Tensor, other: torch.Tensor, region: Region) -> None:
        """Compare a block; both (h, rows, width), fp64.

        An element matches if it equals the other one or if both are finite and |ours - other| <=
        atol + rtol |other|.  So a NaN never matches, and an infinity matches only the same
        infinity.
        """
        if ours.numel() == 0:
            return
        head = torch.arange(len(ours), device=ours.device)
        distance = (ours - other).abs()
        bad = ~(distance < _LARGEST)
        error, other_finite = distance.masked_fill(bad, 0.0), other.masked_fill(bad, 0.0).abs()

        block_max, block_argmax = error.flatten(1).max(1)
        worse = (block_max > self.error.max) | (self.elements == 0)
        self._worst_index = torch.where(worse, region.flat(head, block_argmax), self._worst_index)
        _, errors = self.error.add(error)
        _, others = self.other.add(other_finite)
        if region.positions is not None:
            self._add_slices((errors, others), *region.positions)

        equal = ours == other
        absolute, relative = (distance / (unit + other_finite) for unit in (1.0, self._scale))
        shares = [(absolute, one) for one in TOLERANCES] + [
            (relative, one) for one in TOLERANCES[1:]
        ]
        for i, (share, tolerance) in enumerate(shares):
            self._matches[i] += (equal | (share <= tolerance)).sum()

        bad = bad.flatten(1)
        first_in_head = bad.to(torch.uint8).argmax(1)
        first = torch.where(bad.any(1), region.flat(head, first_in_head), _NOWHERE).min()
        self._first_nonfinite = torch.minimum(self._first_nonfinite, first)
        self._nonfinite += bad.sum()
        self.elements += ours.numel()

    def _add_slices(self, rows: tuple[torch.Tensor, ...], start: int, stop: int) -> None:
        """rows: sums of squares (h, rows), of error and other."""
        slices, device = min(SLICES, self.shape[1]), self._scale.device
        if self._squares is None:
            self._squares = torch.zeros(2, slices, dtype=torch.float64, device=device)
        index = torch.arange(start, stop, device=device) * slices // self.shape[1]
        in_slice = torch.arange(slices, device=device)[:, None] == index
        for sums, squares in zip(self._squares, rows, strict=True):
            # index_add_ has no fixed order of additions
            sums += torch.where(in_slice, squares.sum(0), 0.0).sum(1)

    def result(self) -> Deviation:
        """worst_head: the one with the largest RMS ratio of its own; worst_position: that of
        max_abs, in any head.

        Waits for the device.
        """
        ratios = rms_ratio(self.error.square_sum, self.other.square_sum)
        nonfinite = int(self._nonfinite)
        shares = (100.0 * count / max(self.elements, 1) for count in self._matches.tolist())
        zero, small, large, small_rms, large_rms = shares
        return Deviation(
            against=self.against,
            elements=self.elements,
            matches=(zero, small, large),
            matches_rms=(small_rms, large_rms),
            rms_ratio=_finite(
                float(rms_ratio(self.error.square_sum.sum(), self.other.square_sum.sum()))
            ),
            max_abs=float(self.error.max.max()),
            worst_head=int(ratios.argmax()),
            worst_position=self.position_of_max(int(self.error.max.argmax())),
            nonfinite=nonfinite,
            first_nonfinite=unravel(int(self._first_nonfinite), self.shape) if nonfinite else None,
            scale_max_abs=float(self.other.max.max()),
            along=()
            if self._squares is None
            else tuple(map(_finite, rms_ratio(*self._squares).tolist())),
        )

    def position_of_max(self, head: int) -> tuple[int, ...]:
        """The position of the largest difference in `head`."""
        return unravel(int(self._worst_index[head]), self.shape)


def _rms(tensor: torch.Tensor) -> torch.Tensor:
    """RMS of the finite elements, fp64."""
    norm: torch.Tensor = torch.linalg.vector_norm(finite(tensor), dtype=torch.float64)
    return norm / math.sqrt(max(tensor.numel(), 1))


def rms_ratio(error_squares: torch.Tensor, other_squares: torch.Tensor) -> torch.Tensor:
    """sqrt(error / other); 0 where there is no error, infinity where only `other` is 0."""
    return torch.where(error_squares == 0, 0.0, (error_squares / other_squares).sqrt())


def _finite(ratio: float) -> float | None:
    return ratio if math.isfinite(ratio) else None


def unravel(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The position of a row-major index."""
    position = []
    for size in reversed(shape):
        index, coordinate = divmod(index, size)
        position.append(coordinate)
    return tuple(reversed(position))


# --- outputs


def oracle_output(inputs: Inputs) -> Output:
    """The oracle's out, in the dtype of the operator's output, and final states in fp32, computed
    in blocks.
    """
    oracle = operators.get(inputs.operator).oracle
    blocks = oracle.blocks(inputs, block_length(oracle, inputs, inputs.device))
    return joined(inputs, blocks, inputs.values.dtype, torch.float32)


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 22  # elements widened to int64 at a time
_ODD = 6364136223846793005  # Knuth's multiplier


def fingerprint(*tensors: torch.Tensor) -> tuple[int, ...]:
    """For each tensor a weighted sum of its elements' bits, modulo 2**64, with odd weights.

    The same for the same bits in any run and on any device.  One changed element always changes it,
    because an odd weight has an inverse; a NaN is compared by its bits.
    """
    return tuple(_fingerprint(tensor) for tensor in tensors)


def _fingerprint(tensor: torch.Tensor) -> int:
    bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()]).flatten()
    weights = torch.arange(min(_BLOCK, len(bits)), device=bits.device) * _ODD | 1
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _BLOCK):
        block = bits[start : start + _BLOCK].long()
        total = total * _ODD + (block * weights[: len(block)]).sum()
    return int(total)
