"""The comparator: decides whether an output is within the error budget of its precision.  Kernel tests use it too.

It compares three tensors: `hi`, the fp64 oracle; `lo`, the same operator with every rounding that the precision allows
(`Judgement.rounded`); `ours`, the output under test.  For each head, in the maximum norm and in the RMS norm,

    |ours - hi|  <=  2 * (|lo - hi| + eps * |hi|)

must hold, with eps the relative error of the coarsest rounding on the way (`coarsest_rounding`).
docs/measuring.md says why.  All three are compared in blocks of positions: only the outputs under test are
ever held whole, in their own dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch

from ssdprof import operators, schema
from ssdprof.kernels.precision import Precision
from ssdprof.measure.deviation import HeadNorms, Region, RunningDeviation
from ssdprof.operators import tensors
from ssdprof.operators.dtypes import dtype_name
from ssdprof.operators.operator import Judgement, Output, Span
from ssdprof.operators.rounding import coarsest_rounding

TensorName = Literal["out", "final_states"]
_NAMES: tuple[TensorName, ...] = ("out", "final_states")
K = TypeVar("K")  # of candidates
ORACLE = "fp64 oracle"
SLOPPY = 0.01  # another library's output outside the budget is timed up to this RMS error
_COARSE = (torch.bfloat16, torch.float16)
_WORKING_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}  # of one block and the tensors computed from it


# a GPU may flush numbers below the least normal fp32 number to zero
FLUSHED = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True)
class Candidate(Generic[K]):
    """An output to verify.  baseline: the key of the candidate that it is also compared with.
    name: shown where it is the baseline of another candidate; empty: its key.
    """

    output: Output
    precision: Precision
    baseline: K | None = None
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    status: Literal["passed", "inaccurate", "nonfinite"]
    reason: str  # empty if passed
    tensors: tuple[schema.TensorAccuracy, ...]  # out, final_states

    @property
    def sloppy(self) -> bool:
        """Whether the output is outside the budget, but close enough to be a result of the same operator."""
        return self.status == "inaccurate" and max(one.vs_oracle.rms_ratio for one in self.tensors) <= SLOPPY


def compare(
    inputs: Any, candidates: Mapping[K, Candidate[K]], *, on_progress: Callable[[int], None] | None = None
) -> dict[K, Comparison]:
    """Judge every candidate in one pass over the oracle of the operator that takes these inputs.

    on_progress: called with the number of positions done since the last call; there are b * l.
    Raises ValueError if a candidate's tensors lack the shape or dtype of the operator's output; BadInputError for
    an operator without a judgement.
    """
    for candidate in candidates.values():
        check_output(candidate.output, inputs)
    judgement = operators.of(inputs).judged
    form, device = judgement.forms(inputs)[0], tensors.device(inputs)
    precisions = {candidate.precision for candidate in candidates.values()}
    rounded = {precision: judgement.rounded(inputs, precision) for precision in precisions}
    outs = _TensorSums("out", {key: c.output[0] for key, c in candidates.items()}, candidates)
    states = _TensorSums("final_states", {key: c.output[1] for key, c in candidates.items()}, candidates)
    largest_exponent = torch.zeros(form.shape[2], device=device)
    for block in judgement.blocks(inputs, block_length(judgement, inputs, device)):
        span = Span(sequence=block.sequence, batch=block.batch, start=block.start, stop=block.stop)
        gate = judgement.gate(inputs, span)
        largest_exponent = torch.maximum(largest_exponent, gate.largest_exponent())
        low = {precision: rounded[precision].advance(span, gate) for precision in precisions}
        outs.add(
            _head_first(block.out),
            {precision: _head_first(out) for precision, (out, _) in low.items()},
            Region(shape=outs.shape, row=block.batch, positions=(block.start, block.stop)),
        )
        if block.last:
            states.add(
                block.state.flatten(1),
                {precision: state.flatten(1).double() for precision, (_, state) in low.items()},
                Region(shape=states.shape, row=block.sequence, positions=None),
            )
        if on_progress is not None:
            on_progress(block.stop - block.start)
    comparisons = {}
    for key, candidate in candidates.items():
        eps = coarsest_rounding(form.dtype, candidate.precision, largest_exponent)
        comparisons[key] = _comparison(outs.result(key, eps), states.result(key, eps))
    return comparisons


def assert_passes(output: Output, inputs: Any, precision: Precision) -> None:
    """For tests of kernels: AssertionError with the reason unless the output passes."""
    comparison = compare(inputs, {"output": Candidate(output=output, precision=precision)})["output"]
    if comparison.status != "passed":
        raise AssertionError(f"{comparison.status}: {comparison.reason}")


class _TensorSums(Generic[K]):
    """Running comparison of one output tensor of all candidates."""

    def __init__(
        self, name: TensorName, tensors: Mapping[K, torch.Tensor], candidates: Mapping[K, Candidate[K]]
    ) -> None:
        first = next(iter(tensors.values()))
        heads = first.shape[2] if name == "out" else first.shape[1]
        self.name = name
        self.shape = tuple(first.shape)
        self._dtype = first.dtype
        self._tensors = tensors
        self._candidates = candidates

        def deviation(against: str) -> RunningDeviation:
            return RunningDeviation(against, self.shape, heads, first.device)

        self._floor = deviation(ORACLE)
        self._from_oracle = {key: deviation(ORACLE) for key in candidates}
        self._from_baseline = {
            key: deviation(candidates[c.baseline].name or str(c.baseline))
            for key, c in candidates.items()
            if c.baseline is not None
        }
        self._low = {c.precision: HeadNorms(heads, first.device) for c in candidates.values()}
        self._fits_oracle = {dtype: torch.ones((), dtype=torch.bool, device=first.device) for dtype in _COARSE}

    def add(self, high: torch.Tensor, low: Mapping[Precision, torch.Tensor], place: Region) -> None:
        """A block of the oracle and of every `lo`: (h, elements), fp64."""
        if self.name == "final_states":
            for dtype in _COARSE:
                self._fits_oracle[dtype] &= _fits(high.to(self._dtype), dtype)
        self._floor.add(high.to(self._dtype).double(), high, place)
        for precision, tensor in low.items():
            self._low[precision].add(tensor - high)
        for key, tensor in self._tensors.items():
            ours = place.cut(tensor)
            self._from_oracle[key].add(ours, high, place)
            baseline = self._candidates[key].baseline
            if baseline is not None:
                self._from_baseline[key].add(ours, place.cut(self._tensors[baseline]), place)

    def result(self, key: K, eps: torch.Tensor) -> schema.TensorAccuracy:
        """eps: (h), see the module."""
        from_oracle, floor = self._from_oracle[key].result(), self._floor.result()
        from_baseline = self._from_baseline.get(key)
        reason = self._nonfinite(from_oracle, floor) or self._over_budget(key, eps)
        if not reason and self.name == "final_states":
            reason = self._coarser_than_claimed(key)
        return schema.TensorAccuracy(
            tensor=self.name,
            vs_oracle=from_oracle,
            vs_baseline=None if from_baseline is None else from_baseline.result(),
            floor=floor,
            passed=not reason,
            reason=reason,
        )

    def _nonfinite(self, from_oracle: schema.Deviation, floor: schema.Deviation) -> str:
        if not from_oracle.nonfinite:
            return ""
        where = f"{from_oracle.nonfinite} elements are not finite, the first at {from_oracle.first_nonfinite}"
        if floor.nonfinite:
            return (
                f"{self.name}: {where}; the exact answer, rounded to {dtype_name(self._dtype)}, is itself not finite "
                f"in {floor.nonfinite} elements, the first at {floor.first_nonfinite}"
            )
        return f"{self.name}: {where}; the exact answer is finite everywhere"

    def _over_budget(self, key: K, eps: torch.Tensor) -> str:
        """A sentence on the head that exceeds its budget by the largest factor; empty if none does."""
        deviation, high = self._from_oracle[key], self._floor.other
        low = self._low[self._candidates[key].precision]
        norms: dict[str, Callable[[HeadNorms], torch.Tensor]] = {
            "max": lambda head_norms: head_norms.max,
            "rms": lambda head_norms: head_norms.rms(deviation.elements / len(high.max)),
        }
        for name, norm in norms.items():
            error = norm(deviation.error)
            budget = 2 * (norm(low) + eps * norm(high) + FLUSHED)
            excess = torch.where(error > budget, error / budget, torch.zeros_like(error))
            if excess.any():
                head = int(excess.argmax())
                return (
                    f"{self.name}, head {head}: {name}|ours - oracle| is {float(error[head]):.3g}, its budget "
                    f"{float(budget[head]):.3g}; the largest difference is at {deviation.position_of_max(head)}"
                )
        return ""

    def _coarser_than_claimed(self, key: K) -> str:
        """A sentence on states that are declared as fp32 and hold only 16-bit numbers; empty if they do not.

        With 16-bit inputs the rounding of the operands hides a rounded state from every norm, but not from this check.
        """
        ours, claimed = self._tensors[key], self._candidates[key].precision.state_dtype
        for dtype in _COARSE:
            coarser = torch.finfo(dtype).eps > torch.finfo(claimed).eps
            if coarser and bool(_fits(ours, dtype)) and not bool(self._fits_oracle[dtype]):
                return (
                    f"{self.name}: {dtype_name(claimed)} states are claimed, but every element is a "
                    f"{dtype_name(dtype)} number"
                )
        return ""


def _head_first(out: torch.Tensor) -> torch.Tensor:
    """(l, h, ...) -> (h, elements), fp64."""
    return out.transpose(0, 1).flatten(1).double()


def _fits(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Whether every element survives a rounding to `dtype`; on the device."""
    return (tensor.to(dtype).to(tensor.dtype) == tensor).all()


def _comparison(*tensors: schema.TensorAccuracy) -> Comparison:
    status: Literal["passed", "inaccurate", "nonfinite"] = "passed"
    if any(tensor.vs_oracle.nonfinite for tensor in tensors):
        status = "nonfinite"
    elif not all(tensor.passed for tensor in tensors):
        status = "inaccurate"
    return Comparison(
        status=status, reason="; ".join(tensor.reason for tensor in tensors if tensor.reason), tensors=tensors
    )


def check_output(output: Output, inputs: Any) -> None:
    """ValueError unless the tensors have the shapes, dtypes and device of the operator's output for these inputs."""
    device = tensors.device(inputs)
    for name, tensor, form in zip(_NAMES, output, operators.of(inputs).judged.forms(inputs), strict=True):
        if tuple(tensor.shape) != form.shape or tensor.dtype != form.dtype or tensor.device != device:
            raise ValueError(
                f"{name} must be {form.dtype} of shape {form.shape} on {device}, "
                f"not {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
            )


def block_length(judgement: Judgement[Any], inputs: Any, device: torch.device) -> int:
    """Positions per block: whole chunks, at most 2048 positions, within the working memory."""
    chunk = judgement.chunk_size(inputs)
    fitting = _WORKING_BYTES[device.type] // judgement.bytes_per_position(inputs)
    return max(chunk, min(fitting, 2048) // chunk * chunk)
