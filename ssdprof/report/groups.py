"""Cases that can be compared and added up, in groups and series; the pooled errors of several
calls.
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
from ssdprof.core.base import PRECISIONS, Clock, PrecisionName, TensorName, grouped, short_precision
from ssdprof.core.case import Case, Generated
from ssdprof.core.report import Report
from ssdprof.core.statistics import Estimate, Faster

Against = Literal["vs_oracle", "vs_baseline", "floor"]  # fields of `Accuracy`


@dataclass(frozen=True, eq=False)
class Series:
    """One implementation at one precision, over the calls of a group."""

    group: Group
    implementation: str
    precision: PrecisionName
    cases: Sequence[Case]

    @property
    def key(self) -> tuple[str, PrecisionName]:
        return self.implementation, self.precision

    @property
    def name(self) -> str:
        """ "fused hopper", with all variants that ran."""
        variants = dict.fromkeys(case.variant for case in self.cases)
        others = [name for name in variants if name not in ("", self.implementation)]
        return f"{self.implementation} {'/'.join(others)}".rstrip()

    @property
    def label(self) -> str:
        """ "fused, exact, fp32"."""
        return f"{self.implementation}, {short_precision(self.precision)}"

    @property
    def within_budget(self) -> bool:
        """Whether every case passed within its budget.  A library that was tolerated outside of it
        did not.
        """
        return all(case.result == "passed" and not case.outside_budget for case in self.cases)

    @cached_property
    def over(self) -> str:
        """The implementation that the series is compared with in place of its baseline: `unfused`,
        if a bench did not time the baseline; else empty.
        """
        timed = {case.implementation for case in self.group.cases if case.device_us}
        is_generated = isinstance(self.cases[0].task, Generated)
        return "unfused" if is_generated and self.group.report.baseline not in timed else ""

    @cached_property
    def timed(self) -> list[Case]:
        """The calls with both times."""
        return [case for case in self.cases if case.device_us and case.call_us]

    def times(self, clock: Clock) -> list[float]:
        """The time of each timed call, in us."""
        estimates = (case.by_clock(clock) for case in self.timed)
        return [estimate.value for estimate in estimates if estimate]

    def us(self, clock: Clock) -> float:
        """The summed times of the timed calls."""
        return math.fsum(self.times(clock))

    @property
    def workspace_bytes(self) -> int | None:
        """The largest of the timed calls."""
        sizes = (case.workspace_bytes for case in self.timed)
        return max((size for size in sizes if size is not None), default=None)

    def pooled(self, which: Against, tensor: TensorName = "out") -> Pooled | None:
        return pool(self.cases, tensor, which)

    @cached_property
    def baselines(self) -> tuple[str, ...]:
        """What the timed calls are compared with: "unfused exact, fp32 states"."""
        baselines = (self.group.report.baseline_of(case, self.over) for case in self.timed)
        timed = (baseline for baseline in baselines if baseline and baseline.device_us)
        return tuple(dict.fromkeys(f"{case.implementation} {case.precision}" for case in timed))

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of the prompt by the device time of all timed layers."""
        layers = len({layer_of(case) for case in self.timed})
        tokens = sum(case.batch * case.seqlen for case in self.timed)
        return tokens / layers / self.us("device") * 1e6 if layers else None

    def _ratios(self, clock: Clock, over: str = "") -> list[Estimate]:
        """Speedups of the timed calls; none if one of them has none."""
        over = over or self.over
        speedups = [self.group.report.speedup(case, clock, over) for case in self.timed]
        ratios = [speedup for speedup in speedups if speedup]
        return ratios if len(ratios) == len(speedups) else []

    def speedup(self, clock: Clock = "device", over: str = "") -> Estimate | None:
        """The sum of the times of the baseline, or of another implementation, over the sum of ours,
        over the same calls.

        Its interval assumes that all calls are at the same end of their intervals, so it covers at
        least 95 %.
        """
        # a call's ratio is baseline / own time, so its weight is its own time
        times = self.times(clock)
        total = self.us(clock)
        bounds = zip(*self._ratios(clock, over), strict=True)
        sums = [math.fsum(map(operator.mul, bound, times)) / total for bound in bounds]
        return Estimate(*sums) if sums else None

    @property
    def baseline_us(self) -> float | None:
        """The device time of the baseline, summed over the same calls."""
        speedup = self.speedup()
        return speedup.value * self.us("device") if speedup else None

    @property
    def verdict(self) -> Faster | None:
        """The verdict by device time that all calls share, or else that of their sum."""
        smallest = self.group.report.smallest_difference
        verdicts = {ratio.verdict(smallest) for ratio in self._ratios("device")}
        if len(verdicts) == 1:
            return verdicts.pop()
        total = self.speedup()
        return total.verdict(smallest) if total else None

    @property
    def floor_pct(self) -> float | None:
        """The least time for all bytes and arithmetic of the timed calls, as a share of their
        device time.
        """
        floors = [case.floor_us(self.group.report.ceilings) for case in self.timed]
        known = [floor for floor in floors if floor is not None]
        if not known or len(known) < len(floors):
            return None
        return 100 * sum(known) / self.us("device")


class Group:
    """Cases that can be compared and added up: all of one kind of call on one prompt, of one size;
    of a bench, those on the same inputs.

    call: one of these calls; None for calls of a whole prompt.
    steps: the calls are decode steps, which have their own baseline.
    noun: what each of a layer's calls is.
    calls: their number, in all layers.
    layers: their indices.
    tokens: "131,072 tokens", "32 x 1,024 tokens"; of the prompt, if the calls are its chunks or
        decode steps.
    where: "at 131,072 tokens", "in decode steps after 512 tokens".
    size: the same without its preposition.
    implementations: the baseline first, the others in the order in which they ran.
    compared: the others.
    """

    def __init__(self, report: Report, cases: Sequence[Case]) -> None:
        """cases: at least one, in the order in which they ran."""
        self.report = report
        self.cases = tuple(cases)
        first = cases[0]
        self.call = first.call
        self.seqlen = first.seqlen
        self.tokens = first.prompt
        self.steps = self.call is not None and self.call.kind == "decode"
        self.noun = "step" if self.steps else "chunk"
        self.calls = len({(case.layer, case.call) for case in cases})
        self.layers = tuple(sorted({layer_of(case) for case in cases}))
        self.baseline = next(
            (case.baseline for case in cases if case.baseline), first.implementation
        )
        names = dict.fromkeys(case.implementation for case in cases)
        self.implementations = tuple(sorted(names, key=lambda name: name != self.baseline))
        self.compared = tuple(name for name in self.implementations if name != self.baseline)
        self.size = first.calls
        whole = self.call is None or self.call.kind == "packed"
        self.where = f"{'at' if whole else 'in'} {self.size}"

    @property
    def extent(self) -> str:
        """ "layer 3", "3 layers", "4 steps in each of 3 layers"; "2 of 3 chunks in layer 0" if the
        last one is shorter; where a run was broken off "11 steps in 3 layers".
        """
        layers = len(self.layers)
        of_layers = f"layer {self.layers[0]}" if layers == 1 else f"{layers} layers"
        calls_per_layer = {layer.calls for layer in self.by_layer()}
        if len(calls_per_layer) > 1:
            return f"{fmt.plural(self.calls, self.noun)} in {of_layers}"
        planned = self.call.count if self.call else 1
        if planned == 1:
            return of_layers
        calls = calls_per_layer.pop()
        number = fmt.plural(calls, self.noun)
        if calls < planned:
            number = f"{calls:,} of {fmt.plural(planned, self.noun)}"
        in_layers = of_layers if layers == 1 else f"each of {of_layers}"
        return f"{number} in {in_layers}"

    def series(self, *implementations: str) -> tuple[Series, ...]:
        """Every series, or those of some implementations: exact before relaxed, wide states before
        narrow ones.
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
        return self.series(*self.compared) if self.compared else ()

    def by_layer(self) -> Iterator[Group]:
        """A group for each layer."""
        for _, cases in sorted(grouped(self.cases, layer_of).items()):
            yield Group(self.report, cases)


def groups(report: Report) -> tuple[Group, ...]:
    """One group per prompt, kind of call, length and batch: the longest prompt first, decode steps
    after it.  For a bench, one for each of its inputs, in their order.
    """

    def key(case: Case) -> tuple[int, bool, int, int]:
        prompt = case.call.prompt_seqlen if case.call else case.seqlen
        return prompt, not (case.call and case.call.kind == "decode"), case.seqlen, case.batch

    generated = (case for case in report.cases if isinstance(case.task, Generated))
    captured = grouped((case for case in report.of_calls if case.layer), key)
    parts = list(grouped(generated, lambda case: case.case_key).values())
    parts += [captured[size] for size in sorted(captured, reverse=True)]
    return tuple(Group(report, cases) for cases in parts)


def layer_of(case: Case) -> int:
    return case.layer.index if case.layer else -1


# --- errors of several calls


def deviation(accuracy: Accuracy | None, which: Against) -> Deviation | None:
    named: Deviation | None = getattr(accuracy, which, None)
    return named


class Pooled(NamedTuple):
    """Pooled deviations of several calls: all elements, and the worst maximum.

    largest: the deviation that holds the largest error, of `case`.  rms_ratio: of the worst call;
    inf if infinite.
    """

    largest: Deviation
    case: Case
    rms_ratio: float
    parts: tuple[Deviation, ...]

    def match_pct(self, tolerance: float, *, of_rms: bool = False) -> float | None:
        """Share of all elements that match; 100 only if all do.

        of_rms: relative to the RMS of the tensor; then None if it is not known of each call.
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
        return min(pooled, math.nextafter(100.0, 0.0))


def pool(cases: Iterable[Case], tensor: TensorName, which: Against) -> Pooled | None:
    """The deviations of every case that has one; None if none has."""
    errors = [(case, deviation(case.tensor(tensor), which)) for case in cases]
    known = [(case, error) for case, error in errors if error]
    if not known:
        return None
    worst, largest = max(known, key=lambda pair: pair[1].max_abs)
    parts = tuple(error for _, error in known)
    rms = max(math.inf if part.rms_ratio is None else part.rms_ratio for part in parts)
    return Pooled(largest, worst, rms, parts)


# --- in words


def tokens_of(prompts: Iterable[Group]) -> str:
    """ "131,072, 16,384 and 1,024 tokens"; decode steps are named only if there are no prompts."""
    groups = list(prompts)
    shown = [group for group in groups if not group.steps] or groups
    sizes = list(dict.fromkeys(group.tokens for group in shown))
    if len(sizes) == 1:
        return sizes[0]
    numbers = (size.removesuffix("s").removesuffix(" token") for size in sizes)
    return f"{fmt.words(numbers)} tokens"


def places(prompts: Iterable[Group]) -> str:
    """ "at 131,072 and 16,384 tokens", "at 512 tokens and in decode steps after 512 tokens"."""
    groups = list(prompts)
    whole = [group for group in groups if group.call is None]
    of_whole = [f"at {tokens_of(whole)}"] if whole else []
    return fmt.words([*of_whole, *(group.where for group in groups if group.call is not None)])


def layer_words(cases: Iterable[Case]) -> str:
    """ "layer 9", "layers 9, 18"; of another kind of case its place."""
    listed = list(cases)
    indices = {layer_of(case) for case in listed if case.layer}
    if not indices:
        return "; ".join(dict.fromkeys(case.case_key for case in listed))
    return f"{'layer' if len(indices) == 1 else 'layers'} {fmt.indices(indices)}"
