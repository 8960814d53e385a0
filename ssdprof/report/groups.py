"""Cases of calls that belong together: their times added up, their errors pooled, and both in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ssdprof.core import words as fmt
from ssdprof.core.base import Clock, PrecisionRecord, TensorName
from ssdprof.core.case import Accuracy, Case, Deviation
from ssdprof.core.outcome import exact_answer_is_finite
from ssdprof.core.report import Report
from ssdprof.core.statistics import Estimate, Faster
from ssdprof.core.subject import CallRef, LayerRef

INTERMEDIATES = ("exact", "relaxed")
STATES = ("fp64", "fp32", "fp16", "bf16")


class Summed(NamedTuple):
    """The summed times of some calls by one clock; without a speedup if one of them has none.

    The speedup is the sum of the baseline's times over the sum of ours, over the same calls.  Its interval assumes that
    all calls are at the same end of their intervals, so it covers at least 95 %.  A verdict that all calls share is the
    sum's; otherwise the sum's interval decides.
    """

    us: float
    speedup: Estimate | None
    verdict: Faster | None


@dataclass(frozen=True)
class TotalSpeed:
    """The timed calls of a series.

    workspace_bytes: the largest of a call.  baselines: what the calls are compared with: "unfused exact, fp32 states".
    """

    layers: tuple[int, ...]
    device: Summed
    call: Summed
    floor_pct: float | None
    workspace_bytes: int | None
    baselines: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Series:
    """One implementation at one precision, over the calls of a group."""

    report: Report
    implementation: str
    precision: PrecisionRecord
    cases: tuple[Case, ...]

    @property
    def within_budget(self) -> bool:
        """Whether every case is within the error budget.  False for another library that passed outside of it."""
        return all(case.result == "passed" and not case.outside_budget for case in self.cases)

    @property
    def variant(self) -> str:
        """The kernels that ran, by name; several if layers differ."""
        return "/".join(dict.fromkeys(case.variant for case in self.cases if case.variant))

    @property
    def name(self) -> str:
        """ "fused hopper"."""
        variant = self.variant
        return self.implementation if variant in ("", self.implementation) else f"{self.implementation} {variant}"

    @property
    def label(self) -> str:
        """ "fused, exact, fp32"."""
        return f"{self.implementation}, {self.precision.short}"

    @property
    def results(self) -> str:
        return fmt.words(dict.fromkeys(case.result for case in self.cases))

    def pooled(self, which: Against, tensor: TensorName = "out") -> Pooled | None:
        return pool(self.cases, tensor, which)

    def speed(self) -> TotalSpeed | None:
        """None if no call was timed."""
        timed = [case for case in self.cases if case.device_us and case.call_us]
        if not timed:
            return None
        ceilings = self.report.ceilings
        floors = [floor for case in timed if (floor := case.floor_us(ceilings)) is not None]
        device_us = sum(case.device_us.value for case in timed if case.device_us)
        compared = [rival for case in timed if (rival := self.report.rival(case)) and rival.device_us]
        return TotalSpeed(
            layers=tuple(case.layer.index for case in timed if case.layer),
            device=self._total(timed, "device"),
            call=self._total(timed, "call"),
            floor_pct=100 * sum(floors) / device_us if len(floors) == len(timed) else None,
            workspace_bytes=max((case.memory.workspace_bytes for case in timed if case.memory), default=None),
            baselines=tuple(dict.fromkeys(f"{rival.implementation} {rival.precision}" for rival in compared)),
        )

    def _total(self, timed: Sequence[Case], clock: Clock) -> Summed:
        times = [found.value for case in timed if (found := case.device_us if clock == "device" else case.call_us)]
        ratios = [found for case in timed if (found := self.report.speedup(case, clock))]
        if len(ratios) < len(timed):
            return Summed(math.fsum(times), None, None)
        # a call's ratio is baseline / own time, so its weight is its own time
        bounds = zip(*ratios, strict=True)
        speedup = Estimate(
            *(math.fsum(v * us for v, us in zip(bound, times, strict=True)) / math.fsum(times) for bound in bounds)
        )
        smallest = self.report.smallest_difference
        verdicts = {ratio.verdict(smallest) for ratio in ratios}
        return Summed(math.fsum(times), speedup, verdicts.pop() if len(verdicts) == 1 else speedup.verdict(smallest))


@dataclass(frozen=True, eq=False)
class Group:
    """All cases of one kind of call on one prompt, of one size, which can be compared and added up.

    call: one of these calls; None for calls of a whole prompt.
    """

    report: Report
    cases: tuple[Case, ...]

    @property
    def call(self) -> CallRef | None:
        return self.cases[0].call

    @property
    def seqlen(self) -> int:
        return self.cases[0].seqlen

    @property
    def baseline(self) -> str:
        """Decode steps have their own."""
        named = [case.baseline for case in self.cases if case.baseline]
        return named[0] if named else self.cases[0].implementation

    @property
    def tokens(self) -> str:
        """ "131,072 tokens", "32 x 1,024 tokens"; of the prompt, if the calls are its chunks or decode steps."""
        return self.cases[0].prompt

    @property
    def where(self) -> str:
        """ "at 131,072 tokens", "in decode steps after 512 tokens"."""
        call, size = self.call, fmt.tokens(self.seqlen, self.cases[0].batch)
        if call is None or call.kind == "packed":
            return f"at {size}{f' {call}' if call else ''}"
        return (
            f"in chunks of {size} of {self.tokens}" if call.kind == "chunk" else f"in decode steps after {self.tokens}"
        )

    @property
    def size(self) -> str:
        """`where` without its preposition."""
        return self.where.partition(" ")[2]

    @property
    def steps(self) -> bool:
        """Whether the calls are decode steps."""
        return self.call is not None and self.call.kind == "decode"

    @property
    def noun(self) -> str:
        """What each of a layer's calls is."""
        return "step" if self.steps else "chunk"

    @property
    def calls(self) -> int:
        """Number of calls, in all layers."""
        return len({(case.layer, case.call) for case in self.cases})

    @property
    def extent(self) -> str:
        """ "layer 3", "3 layers", "4 steps in each of 3 layers"; where a run was broken off "11 steps in 3 layers"."""
        layers = len(self.layers)
        of_layers = f"layer {self.layers[0].index}" if layers == 1 else f"{layers} layers"
        calls = {self.at_layer(layer).calls for layer in self.layers}
        if len(calls) > 1:
            return f"{fmt.plural(self.calls, self.noun)} in {of_layers}"
        each = calls.pop()
        return of_layers if each == 1 else f"{fmt.plural(each, self.noun)} in {'each of ' * (layers > 1)}{of_layers}"

    @property
    def layers(self) -> tuple[LayerRef, ...]:
        found = {case.layer.index: case.layer for case in self.cases if case.layer}
        return tuple(found[index] for index in sorted(found))

    @property
    def implementations(self) -> tuple[str, ...]:
        """The baseline first, the others in the order in which they ran."""
        names = dict.fromkeys(case.implementation for case in self.cases)
        return tuple(sorted(names, key=lambda name: name != self.baseline))

    @property
    def compared(self) -> tuple[str, ...]:
        """The compared implementations: all except the baseline."""
        return tuple(name for name in self.implementations if name != self.baseline)

    def series(self, *implementations: str) -> tuple[Series, ...]:
        """Every series, or those of some implementations: exact before relaxed, wide states before narrow ones."""
        found = []
        for name in implementations or self.implementations:
            cases = [case for case in self.cases if case.implementation == name]
            for precision in sorted({case.precision for case in cases}, key=precision_order):
                own = sorted((case for case in cases if case.precision == precision), key=layer_of)
                found.append(Series(self.report, name, precision, tuple(own)))
        return tuple(found)

    def keep(self, wanted: Callable[[Case], bool]) -> Group:
        """The group with only the selected cases."""
        return replace(self, cases=tuple(case for case in self.cases if wanted(case)))

    def at_layer(self, layer: LayerRef) -> Group:
        return self.keep(lambda case: layer_of(case) == layer.index)

    def baseline_of(self, series: Series) -> Series | None:
        """The series that its outputs are compared with; at other precisions of the baseline, its exact one."""
        named = {one.vs_baseline.against for case in series.cases for one in case.accuracy if one.vs_baseline}
        wanted = named or {f"{self.baseline} {series.precision.exact}"}
        return next((own for own in self.series(self.baseline) if f"{self.baseline} {own.precision}" in wanted), None)


def groups(report: Report) -> tuple[Group, ...]:
    """One group per prompt, kind of call, length and batch: the longest prompt first, decode steps after it."""
    found: dict[tuple[int, bool, int, int], list[Case]] = {}
    for case in report.cases:
        if case.layer:
            call, size = case.call, (case.seqlen, case.batch)
            prompt = call.prompt_seqlen if call else size[0]
            found.setdefault((prompt, not (call and call.kind == "decode"), *size), []).append(case)
    ordered = sorted(found.items(), key=lambda item: item[0], reverse=True)
    return tuple(Group(report, tuple(cases)) for _, cases in ordered)


def layer_of(case: Case) -> int:
    return case.layer.index if case.layer else -1


def precision_order(precision: PrecisionRecord) -> tuple[int, int]:
    return INTERMEDIATES.index(precision.intermediates), STATES.index(precision.state_dtype)


# --- errors of several calls

Against = Literal["vs_oracle", "vs_baseline", "floor"]  # fields of `Accuracy`


def deviation(accuracy: Accuracy, which: Against) -> Deviation | None:
    return {"vs_oracle": accuracy.vs_oracle, "vs_baseline": accuracy.vs_baseline, "floor": accuracy.floor}[which]


@dataclass(frozen=True)
class Pooled:
    """Pooled deviations of several calls: all elements, and the worst maximum.

    largest: the deviation that holds the largest error, of `case`.  rms_ratio: of the worst call; inf if infinite.
    """

    largest: Deviation
    case: Case
    rms_ratio: float
    parts: tuple[Deviation, ...]

    def match_pct(self, tolerance: float) -> float | None:
        """Share of all elements that match; 100 only if all do."""
        found = [(part.match_pct(tolerance), part.elements) for part in self.parts]
        shares = [(share, elements) for share, elements in found if share is not None]
        total = sum(elements for _, elements in shares)
        if not total:
            return None
        if all(share == 100.0 for share, _ in shares):
            return 100.0
        pooled = math.fsum(share * elements for share, elements in shares) / total
        return min(pooled, math.nextafter(100.0, 0.0))


def pool(cases: Iterable[Case], tensor: TensorName, which: Against) -> Pooled | None:
    """The deviations of every case that has one; None if none has."""
    found = [(case, error) for case in cases if (one := case.tensor(tensor)) and (error := deviation(one, which))]
    if not found:
        return None
    worst, largest = max(found, key=lambda pair: pair[1].max_abs)
    rms = max(math.inf if one.rms_ratio is None else one.rms_ratio for _, one in found)
    return Pooled(largest, worst, rms, tuple(deviation for _, deviation in found))


# --- in words


def baselines(name: str, pairs: Iterable[tuple[PrecisionRecord, str]]) -> str:
    """The baselines of all precisions as text.  pairs: (precision, baseline that it names)."""
    found = list(pairs)
    if not found:
        return name
    if all(against == f"{name} {precision.exact}" for precision, against in found):
        return f"{name}, exact, with the same state dtype"
    return " or ".join(dict.fromkeys(against for _, against in found))


def tokens_of(prompts: Iterable[Group]) -> str:
    """ "131,072, 16,384 and 1,024 tokens"; decode steps are named only if there are no prompts."""
    every = list(prompts)
    first, *others = dict.fromkeys(group.tokens for group in [one for one in every if not one.steps] or every)
    if not others:
        return first
    return fmt.words(text.removesuffix("s").removesuffix(" token") for text in (first, *others)) + " tokens"


def places(prompts: Iterable[Group]) -> str:
    """ "at 131,072 and 16,384 tokens", "at 512 tokens and in decode steps after 512 tokens"."""
    every = list(prompts)
    whole = [group for group in every if group.call is None]
    others = [group.where for group in every if group.call is not None]
    return fmt.words([*([f"at {tokens_of(whole)}"] if whole else []), *others])


def case_words(cases: Iterable[Case]) -> str:
    """ "fused (relaxed, bf16 states) inaccurate in layers 9, 18; ..." """
    found: dict[str, list[int]] = {}
    for case in cases:
        result = "" if case.result == "refused" else f" {result_words(case)}"
        found.setdefault(f"{case.implementation} ({case.precision}){result}", []).append(layer_of(case))
    return "; ".join(f"{name} in {layer_words(layers)}" for name, layers in found.items())


def trouble_words(series: Series) -> str:
    """The reason why a series did not pass: "not finite in layer 9"."""
    found: dict[str, list[int]] = {}
    for case in series.cases:
        if case.result != "passed":
            found.setdefault(result_words(case), []).append(layer_of(case))
        elif case.outside_budget:
            found.setdefault("outside the error budget", []).append(layer_of(case))
    return fmt.words(f"{result} in {layer_words(layers)}" for result, layers in found.items())


def result_words(case: Case) -> str:
    """ "not finite"; distinguishes cases whose exact answer is not finite either."""
    if not exact_answer_is_finite(case):
        return "without a finite exact answer"
    return "not finite" if case.result == "nonfinite" else case.result


def precision_words(precision: PrecisionRecord) -> str:
    """ "exact with fp32 states"."""
    return f"{precision.intermediates} with {precision.state_dtype} states"


def layer_words(indices: Sequence[int]) -> str:
    """ "layer 9", "layers 9, 18"."""
    return f"{'layer' if len(set(indices)) == 1 else 'layers'} {fmt.indices(indices)}"
