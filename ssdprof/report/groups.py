"""Groups and series: the cases of a report that are shown, compared and added up together.

A group holds all cases of equal size, such as the calls of every layer at 16,384 tokens.  A series
is one implementation at one precision within a group; reports have a row for each series.  Errors
of the calls of a series are pooled (`Pooled`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from ssdprof.core import words as fmt
from ssdprof.core.accuracy import Accuracy, Deviation
from ssdprof.core.base import (
    ENDED,
    PRECISIONS,
    STOPPED,
    Clock,
    PrecisionName,
    TensorName,
    grouped,
    short_precision,
)
from ssdprof.core.case import Case, Generated
from ssdprof.core.outcome import exact_answer_is_finite
from ssdprof.core.report import Report
from ssdprof.core.statistics import Estimate, Faster

Against = Literal["vs_oracle", "vs_baseline", "floor"]  # fields of `Accuracy`


@dataclass(frozen=True, eq=False)
class Series:
    """One implementation at one precision, over the calls of a group.

    cases: at least one, by layer.
    """

    group: Group
    implementation: str
    precision: PrecisionName
    cases: Sequence[Case]

    @property
    def key(self) -> tuple[str, PrecisionName]:
        return self.implementation, self.precision

    @property
    def name(self) -> str:
        """The implementation, with the variants of its kernels that ran: "fused hopper"."""
        variants = dict.fromkeys(case.variant for case in self.cases)
        shown = [variant for variant in variants if variant not in ("", self.implementation)]
        return f"{self.implementation} {'/'.join(shown)}".rstrip()

    @property
    def label(self) -> str:
        """The implementation and the precision: "fused, exact, fp32"."""
        return f"{self.implementation}, {short_precision(self.precision)}"

    @property
    def within_budget(self) -> bool:
        """Whether every case passed and is within its error budget.

        Cases of other libraries, and of a server, may pass although they are outside of it.
        """
        return all(case.result == "passed" and not case.accuracy_faults for case in self.cases)

    @cached_property
    def over(self) -> str:
        """The implementation that the series is compared with instead of its baseline.

        `unfused` if a bench has no device time of the baseline on the group's inputs; otherwise
        empty, for the baseline.
        """
        timed = {case.implementation for case in self.group.cases if case.device_us}
        is_generated = isinstance(self.cases[0].task, Generated)
        return "unfused" if is_generated and self.group.report.baseline not in timed else ""

    @cached_property
    def timed(self) -> list[Case]:
        """The calls with a device time and a call time."""
        return [case for case in self.cases if case.device_us and case.call_us]

    def times(self, clock: Clock) -> list[float]:
        """The time of each timed call, in microseconds."""
        estimates = (case.by_clock(clock) for case in self.timed)
        return [estimate.value for estimate in estimates if estimate]

    def us(self, clock: Clock) -> float:
        """The sum of the times of the timed calls, in microseconds."""
        return math.fsum(self.times(clock))

    @property
    def workspace_bytes(self) -> int | None:
        """The largest workspace of a timed call; None if no workspace was measured."""
        sizes = (case.workspace_bytes for case in self.timed)
        return max((size for size in sizes if size is not None), default=None)

    def pooled(self, which: Against, tensor: TensorName = "out") -> Pooled | None:
        """The pooled deviations of a tensor in the calls; None if no call has one."""
        return pool(self.cases, tensor, which)

    @cached_property
    def baselines(self) -> tuple[str, ...]:
        """The implementations and precisions that the timed calls are compared with, each once:
        "unfused exact, fp32 states".

        Baselines without a device time are left out.
        """
        baselines = (self.group.report.baseline_of(case, self.over) for case in self.timed)
        timed = (baseline for baseline in baselines if baseline and baseline.device_us)
        return tuple(dict.fromkeys(f"{case.implementation} {case.precision}" for case in timed))

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of the timed calls per second of device time of all timed layers together; None if
        no call was timed.
        """
        layer_count = len({layer_of(case) for case in self.timed})
        # the sum counts each token once in each layer
        tokens = sum(case.batch * case.seqlen for case in self.timed)
        return tokens / layer_count / self.us("device") * 1e6 if layer_count else None

    def _ratios(self, clock: Clock, over: str = "") -> list[Estimate]:
        """The speedup of each timed call; empty if one of them has no speedup.

        over: another implementation, in place of the baseline.
        """
        speedups = [
            self.group.report.speedup(case, clock, over or self.over) for case in self.timed
        ]
        known = [speedup for speedup in speedups if speedup]
        return known if len(known) == len(speedups) else []

    def speedup(self, clock: Clock = "device", over: str = "") -> Estimate | None:
        """The summed time of the baseline divided by the summed time of this series.

        Both sums are over the timed calls.  The interval assumes that all calls are at the same end
        of their intervals, so it covers at least 95 %.  None if no call was timed, or if a timed
        call has no speedup.

        over: another implementation, in place of the baseline.
        """
        ratios = self._ratios(clock, over)
        if not ratios:
            return None
        # A call's speedup is baseline time / series time.  Weighted by the series' time, the
        # speedups add up to the summed time of the baseline.
        times = self.times(clock)
        total = self.us(clock)
        # the values of all calls, then the low ends, then the high ends
        columns = zip(*ratios, strict=True)
        return Estimate(
            *(math.fsum(map(operator.mul, column, times)) / total for column in columns)
        )

    @property
    def baseline_us(self) -> float | None:
        """The device time of the baseline, summed over the same calls."""
        speedup = self.speedup()
        return speedup.value * self.us("device") if speedup else None

    @property
    def verdict(self) -> Faster | None:
        """The verdict by device time: that of all calls if they agree, else that of their sum; None
        without a speedup.
        """
        smallest = self.group.report.smallest_difference
        verdicts = {ratio.verdict(smallest) for ratio in self._ratios("device")}
        if len(verdicts) == 1:
            return verdicts.pop()
        total = self.speedup()
        return total.verdict(smallest) if total else None

    @property
    def floor_pct(self) -> float | None:
        """The least time in which the GPU could do the timed calls, as a percentage of their device
        time.

        None if no call was timed, or if this least time is not known for one of the timed calls.
        """
        floors = [case.floor_us(self.group.report.ceilings) for case in self.timed]
        known = [floor for floor in floors if floor is not None]
        if not known or len(known) < len(floors):
            return None
        return 100 * sum(known) / self.us("device")


class Group:
    """Cases that can be compared and added up.

    In a run these are the cases of one kind of call, on one prompt and of one size, in all layers;
    in a bench, the cases on the same inputs.

    call: one of the calls; None if the calls are whole prompts or generated inputs.
    are_steps: whether the calls are decode steps, which have their own baseline.
    noun: the word for one of several calls of a layer: "chunk", "step" or "forward pass"; "call" if
        `call` is None.
    calls: the number of calls in all layers; 1 in a bench.
    layers: the indices of the decoder layers; (-1,) in a bench.
    tokens: the size of the prompt in words: "131,072 tokens", "32 x 1,024 tokens".
    size: the size of the calls in words: "131,072 tokens", "decode steps after 512 tokens"; in a
        bench, that of the inputs: "8 x 4,096".
    where: the size with its preposition: "at 131,072 tokens", "in decode steps after 512 tokens".
    baseline: the implementation that the others are compared with, even if it has no case here.
    implementations: the baseline, if it has a case, then the others in the order in which they ran.
    compared: the implementations without the baseline.
    """

    def __init__(self, report: Report, cases: Sequence[Case]) -> None:
        """cases: at least one, in the order in which they ran."""
        self.report = report
        self.cases = tuple(cases)
        first = cases[0]
        self.call = first.call
        self.seqlen = first.seqlen
        self.tokens = first.prompt
        self.are_steps = self.call is not None and self.call.kind == "decode"
        # a call of packed sequences is one of several only in a server, once in each forward pass
        nouns = {"decode": "step", "packed": "forward pass"}
        self.noun = nouns.get(self.call.kind, "chunk") if self.call else "call"
        self.calls = len({(case.layer, case.call) for case in cases})
        self.layers = tuple(sorted({layer_of(case) for case in cases}))
        # Cases of the baseline itself may name none.  If no case names one, the first case counts
        # as a case of the baseline.
        named_baselines = (case.baseline for case in cases if case.baseline)
        self.baseline = next(named_baselines, first.implementation)
        names = dict.fromkeys(case.implementation for case in cases)
        self.implementations = tuple(sorted(names, key=lambda name: name != self.baseline))
        self.compared = tuple(name for name in self.implementations if name != self.baseline)
        self.size = first.calls
        # "in chunks of 8 tokens", "in decode steps", but "at 8 tokens"
        size_names_calls = self.call is not None and self.call.kind in ("chunk", "decode")
        self.where = f"{'in' if size_names_calls else 'at'} {self.size}"

    @property
    def extent(self) -> str:
        """The calls and layers of the group in words.

        "layer 3", "3 layers": one call in each layer.
        "4 steps in each of 3 layers": several calls in each layer.
        "2 of 3 chunks in layer 0": the layer has calls of another size, or some did not run.
        "11 steps in 3 layers": the layers have different numbers of calls, as in a run that was
            interrupted.
        """
        layers = len(self.layers)
        of_layers = f"layer {self.layers[0]}" if layers == 1 else f"{layers} layers"
        calls_per_layer = {layer.calls for layer in self.by_layer()}
        if len(calls_per_layer) > 1:
            return f"{fmt.plural(self.calls, self.noun)} in {of_layers}"
        calls_of_any_size = self.call.count if self.call else 1  # of this kind in each layer
        if calls_of_any_size == 1:
            return of_layers
        calls = calls_per_layer.pop()
        calls_in_words = fmt.plural(calls, self.noun)
        if calls < calls_of_any_size:
            calls_in_words = f"{calls:,} of {fmt.plural(calls_of_any_size, self.noun)}"
        in_layers = of_layers if layers == 1 else f"each of {of_layers}"
        return f"{calls_in_words} in {in_layers}"

    def series(self, *implementations: str) -> tuple[Series, ...]:
        """The series of some implementations, or of all if none is named.

        The series of an implementation are in the order of `PRECISIONS`: exact before relaxed, then
        states in fp32, fp16 and bf16.  An implementation without a case has no series.
        """
        by_name = grouped(sorted(self.cases, key=layer_of), lambda case: case.implementation)
        series = []
        for name in implementations or self.implementations:
            by_precision = grouped(by_name.get(name, ()), lambda case: case.precision)
            for precision in sorted(by_precision, key=PRECISIONS.index):
                series.append(Series(self, name, precision, tuple(by_precision[precision])))
        return tuple(series)

    def others(self) -> tuple[Series, ...]:
        """The series of the compared implementations."""
        # without a name, `series` would return those of the baseline
        return self.series(*self.compared) if self.compared else ()

    def by_layer(self) -> Iterator[Group]:
        """A group for each layer, in the order of the layers."""
        for _, cases in sorted(grouped(self.cases, layer_of).items()):
            yield Group(self.report, cases)


def groups(report: Report) -> tuple[Group, ...]:
    """The groups of a report, without cases of decoded states and of the whole model.

    A bench has a group for each of its inputs, in their order.  Other reports have a group for each
    length of a prompt, and within it for the decode steps, and for the other calls of each length,
    batch and number of sequences.  The longest prompt is first, its decode steps after its other
    calls.
    """

    def key(case: Case) -> tuple[int, bool, int, int, int]:
        prompt_seqlen = case.call.prompt_seqlen if case.call else case.seqlen
        sequences = case.call.sequences if case.call else case.batch
        is_step = case.call is not None and case.call.kind == "decode"
        return prompt_seqlen, not is_step, case.seqlen, case.batch, sequences

    generated = (case for case in report.cases if isinstance(case.task, Generated))
    cases_of_groups = list(grouped(generated, lambda case: case.case_key).values())
    captured = grouped((case for case in report.of_calls if case.layer), key)
    cases_of_groups += [captured[size] for size in sorted(captured, reverse=True)]
    return tuple(Group(report, cases) for cases in cases_of_groups)


def layer_of(case: Case) -> int:
    """The index of the case's decoder layer; -1 if the case is not of a single layer."""
    return case.layer.index if case.layer else -1


# --- errors of several calls


def deviation(accuracy: Accuracy | None, which: Against) -> Deviation | None:
    """The tensor's deviation from the oracle or the baseline, or the floor; None if it is not
    known, as without an accuracy.
    """
    if accuracy is None:
        return None
    error: Deviation | None = getattr(accuracy, which)
    return error


class Pooled(NamedTuple):
    """The deviations of one tensor in several calls, as if the calls were one.

    largest: the deviation with the largest error of a single finite element.
    case: the case of `largest`.
    rms_ratio: the relative RMS error of the worst call; infinite if an element is not finite, or if
        the error itself is infinite.
    parts: the deviation in each call.
    """

    largest: Deviation
    case: Case
    rms_ratio: float
    parts: tuple[Deviation, ...]

    @property
    def largest_value(self) -> float | None:
        """The largest magnitude of the other tensor in any call; None if no record has it, as in
        old reports.
        """
        known = [part.scale_max_abs for part in self.parts if part.scale_max_abs is not None]
        return max(known, default=None)

    def match_pct(self, tolerance: float, *, of_rms: bool = False) -> float | None:
        """The percentage of elements, of all calls, within the tolerance.

        It is 100 only if every element is.

        tolerance: one of `TOLERANCES`; not 0 if `of_rms`.
        of_rms: whether the tolerance is relative to an RMS: see `Deviation.match_rms_pct`.  The
            result is then None if one of the calls has no such share.
        """
        shares = [
            part.match_rms_pct(tolerance) if of_rms else part.match_pct(tolerance)
            for part in self.parts
        ]
        known = [share for share in shares if share is not None]
        if len(known) < len(self.parts):
            return None
        if min(known) == 100.0:
            return 100.0
        elements = [part.elements for part in self.parts]
        pooled = math.fsum(map(operator.mul, known, elements)) / sum(elements)
        return min(pooled, math.nextafter(100.0, 0.0))  # rounding must not make it 100


def pool(cases: Iterable[Case], tensor: TensorName, which: Against) -> Pooled | None:
    """The pooled deviations of the cases that have one; None if no case has one."""
    errors = [(case, deviation(case.tensor(tensor), which)) for case in cases]
    known = [(case, error) for case, error in errors if error]
    if not known:
        return None
    case_of_largest, largest = max(known, key=lambda pair: pair[1].max_abs)
    parts = tuple(error for _, error in known)
    rms = max(part.rms_of_all for part in parts)
    return Pooled(largest, case_of_largest, rms, parts)


# --- in words


def tokens_of(shown_groups: Sequence[Group]) -> str:
    """The sizes of the prompts of at least one group in words: "131,072, 16,384 and 1,024 tokens".

    The prompts of decode steps are named only if there are no other groups.
    """
    without_steps = [group for group in shown_groups if not group.are_steps]
    return joined_sizes(group.tokens for group in without_steps or shown_groups)


def joined_sizes(sizes: Iterable[str]) -> str:
    """At least one size of a prompt in words, each once: "131,072, 16,384 and 1,024 tokens"."""
    first, *others = dict.fromkeys(sizes)
    if not others:
        return first
    numbers = (size.removesuffix("s").removesuffix(" token") for size in (first, *others))
    return f"{fmt.words(numbers)} tokens"


def group_words(shown_groups: Sequence[Group]) -> str:
    """At least one group of a run in words; whole prompts come first.

    "at 131,072 and 16,384 tokens", "at 512 tokens and in decode steps after 512 tokens".
    """
    whole_prompts = [group for group in shown_groups if group.call is None]
    words = [f"at {tokens_of(whole_prompts)}"] if whole_prompts else []
    words += [group.where for group in shown_groups if group.call is not None]
    return fmt.words(words)


def layer_words(cases: Iterable[Case]) -> str:
    """The layers of the cases: "layer 9", "layers 9, 18"; cases of no single layer are left out.
    If all are, the keys of the cases.
    """
    all_cases = list(cases)
    indices = {layer_of(case) for case in all_cases if case.layer}
    if not indices:
        return "; ".join(dict.fromkeys(case.case_key for case in all_cases))
    return numbered_layers(indices)


def numbered_layers(indices: Iterable[int]) -> str:
    """Layers with their indices: "layer 9", "layers 9, 18"."""
    distinct_indices = set(indices)
    noun = "layer" if len(distinct_indices) == 1 else "layers"
    return f"{noun} {fmt.indices(distinct_indices)}"


def case_words(cases: Iterable[Case]) -> str:
    """Cases with their faults: "fused (relaxed, bf16 states) inaccurate in layers 9, 18; ...".

    Cases that passed, and cases that were refused, are named without a word for that.
    """

    def words(case: Case) -> str:
        fault = "" if case.result in ("passed", "refused") else f" {fault_words(case)}"
        return f"{case.implementation} ({case.precision}){fault}"

    by_words = grouped(cases, words)
    return "; ".join(f"{words} in {layer_words(equal)}" for words, equal in by_words.items())


def trouble_words(series: Series) -> str:
    """Why a series is not within its error budget: "not finite in layer 9"."""
    outside = [case for case in series.cases if case.result != "passed" or case.accuracy_faults]
    by_fault = grouped(outside, fault_words)
    return fmt.words(f"{fault} in {layer_words(cases)}" for fault, cases in by_fault.items())


def fault_words(case: Case) -> str:
    """What is wrong with a case that did not pass, or is outside its budget: "not finite", "crashed
    in the law edge inputs", "outside the error budget".

    If it has no finite exact answer, that alone is said.  "Inaccurate" are errors of a case that
    did not pass.
    """
    if not exact_answer_is_finite(case):
        return "without a finite exact answer"
    if case.result == "nonfinite":
        return "not finite"
    if case.result not in ("passed", "inaccurate"):
        return case.result
    if case.later_fault:
        return "found wrong after it was timed"
    if any(tensor.reason for tensor in case.accuracy):
        return "inaccurate" if case.result == "inaccurate" else "outside the error budget"
    for law in case.broken_laws:
        if law.detail.startswith(ENDED):
            did = "did not return" if STOPPED in law.detail else "crashed"
            return f"{did} in the law {law.name}"
    return f"breaks a law ({fmt.words(law.name for law in case.broken_laws)})"
