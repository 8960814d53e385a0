"""Cases that can be compared and added up, in groups, and their series; the pooled errors of several calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from ssdprof.core import words as fmt
from ssdprof.core.accuracy import Accuracy, Deviation
from ssdprof.core.base import Clock, PrecisionRecord, TensorName
from ssdprof.core.case import Case
from ssdprof.core.outcome import exact_answer_is_finite
from ssdprof.core.report import Report
from ssdprof.core.statistics import Estimate, Faster
from ssdprof.core.subject import LayerRef

INTERMEDIATES = ("exact", "relaxed")
STATES = ("fp64", "fp32", "fp16", "bf16")
Against = Literal["vs_oracle", "vs_baseline", "floor"]  # fields of `Accuracy`


class Summed(NamedTuple):
    """The summed times of some calls by one clock; without a speedup if one of them has none.

    The speedup is the sum of the baseline's times over the sum of ours, over the same calls.  Its interval assumes that
    all calls are at the same end of their intervals, so it covers at least 95 %.  A verdict that all calls share is the
    sum's; otherwise the sum's interval decides.
    """

    us: float
    speedup: Estimate | None
    verdict: Faster | None


class TotalSpeed(NamedTuple):
    """The timed calls of a series.

    workspace_bytes: the largest of a call.  baselines: what the calls are compared with: "unfused exact, fp32 states".
    """

    layers: tuple[int, ...]
    device: Summed
    call: Summed
    floor_pct: float | None
    workspace_bytes: int | None
    baselines: tuple[str, ...]


class Series:
    """One implementation at one precision, over the calls of a group.

    variant: the kernels that ran, by name; several if layers differ.  name: "fused hopper".  label: "fused, exact,
    fp32".  within_budget: every case; False for another library that passed outside of its budget.
    """

    def __init__(self, group: Group, implementation: str, precision: PrecisionRecord, cases: Sequence[Case]) -> None:
        self.group, self.implementation, self.precision, self.cases = group, implementation, precision, cases
        self.variant = "/".join(dict.fromkeys(case.variant for case in cases if case.variant))
        self.name = implementation + (f" {self.variant}" if self.variant not in ("", implementation) else "")
        self.label = f"{implementation}, {precision.short}"
        self.within_budget = all(case.result == "passed" and not case.outside_budget for case in cases)

    def pooled(self, which: Against, tensor: TensorName = "out") -> Pooled | None:
        return pool(self.cases, tensor, which)

    @property
    def original(self) -> Series | None:
        """The series that its outputs are compared with; at other precisions of the baseline, its exact one."""
        name = self.group.baseline
        named = {one.vs_baseline.against for case in self.cases for one in case.accuracy if one.vs_baseline}
        wanted = named or {f"{name} {self.precision.exact}"}
        return next((own for own in self.group.series(name) if f"{name} {own.precision}" in wanted), None)

    @cached_property
    def speed(self) -> TotalSpeed | None:
        """None if no call was timed."""
        report = self.group.report
        timed = [case for case in self.cases if case.device_us and case.call_us]
        if not timed:
            return None
        floors = [floor for case in timed if (floor := case.floor_us(report.ceilings)) is not None]
        device = self._total(timed, "device")
        compared = [rival for case in timed if (rival := report.rival(case)) and rival.device_us]
        return TotalSpeed(
            layers=tuple(case.layer.index for case in timed if case.layer),
            device=device,
            call=self._total(timed, "call"),
            floor_pct=100 * sum(floors) / device.us if len(floors) == len(timed) else None,
            workspace_bytes=max((case.memory.workspace_bytes for case in timed if case.memory), default=None),
            baselines=tuple(dict.fromkeys(f"{rival.implementation} {rival.precision}" for rival in compared)),
        )

    def _total(self, timed: Sequence[Case], clock: Clock) -> Summed:
        times = [found.value for case in timed if (found := case.device_us if clock == "device" else case.call_us)]
        ratios = [found for case in timed if (found := self.group.report.speedup(case, clock))]
        total = math.fsum(times)
        if len(ratios) < len(timed):
            return Summed(total, None, None)
        # a call's ratio is baseline / own time, so its weight is its own time
        bounds = zip(*ratios, strict=True)
        speedup = Estimate(*(math.fsum(v * us for v, us in zip(bound, times, strict=True)) / total for bound in bounds))
        smallest = self.group.report.smallest_difference
        verdicts = {ratio.verdict(smallest) for ratio in ratios}
        return Summed(total, speedup, verdicts.pop() if len(verdicts) == 1 else speedup.verdict(smallest))


class Group:
    """All cases of one kind of call on one prompt, of one size, which can be compared and added up.

    call: one of these calls; None for calls of a whole prompt.  steps: the calls are decode steps, which have their own
    baseline.  noun: what each of a layer's calls is.  calls: their number, in all layers.
    tokens: "131,072 tokens", "32 x 1,024 tokens"; of the prompt, if the calls are its chunks or decode steps.
    where: "at 131,072 tokens", "in decode steps after 512 tokens"; size: the same without its preposition.
    implementations: the baseline first, the others in the order in which they ran; compared: the others.
    """

    def __init__(self, report: Report, cases: Sequence[Case]) -> None:
        self.report, self.cases, first = report, tuple(cases), cases[0]
        self.call, self.seqlen, self.tokens = first.call, first.seqlen, first.prompt
        self.steps = self.call is not None and self.call.kind == "decode"
        self.noun = "step" if self.steps else "chunk"
        self.calls = len({(case.layer, case.call) for case in cases})
        layers = {case.layer.index: case.layer for case in cases if case.layer}
        self.layers = tuple(layers[index] for index in sorted(layers))
        self.baseline = next((case.baseline for case in cases if case.baseline), first.implementation)
        names = dict.fromkeys(case.implementation for case in cases)
        self.implementations = tuple(sorted(names, key=lambda name: name != self.baseline))
        self.compared = tuple(name for name in self.implementations if name != self.baseline)
        size = fmt.tokens(self.seqlen, first.batch)
        if self.call is None or self.call.kind == "packed":
            self.where = f"at {size}{f' {self.call}' if self.call else ''}"
        else:
            self.where = (
                f"in decode steps after {self.tokens}" if self.steps else f"in chunks of {size} of {self.tokens}"
            )
        self.size = self.where.partition(" ")[2]

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

    def series(self, *implementations: str) -> tuple[Series, ...]:
        """Every series, or those of some implementations: exact before relaxed, wide states before narrow ones."""
        found = []
        for name in implementations or self.implementations:
            cases = [case for case in self.cases if case.implementation == name]
            for precision in sorted({case.precision for case in cases}, key=precision_order):
                own = sorted((case for case in cases if case.precision == precision), key=layer_of)
                found.append(Series(self, name, precision, tuple(own)))
        return tuple(found)

    def others(self) -> tuple[Series, ...]:
        """The series of the compared implementations."""
        return self.series(*self.compared) if self.compared else ()

    def keep(self, wanted: Callable[[Case], bool]) -> Group:
        """The group with only the selected cases."""
        return Group(self.report, [case for case in self.cases if wanted(case)])

    def at_layer(self, layer: LayerRef) -> Group:
        return self.keep(lambda case: layer_of(case) == layer.index)


def groups(report: Report) -> tuple[Group, ...]:
    """One group per prompt, kind of call, length and batch: the longest prompt first, decode steps after it."""
    found: dict[tuple[int, bool, int, int], list[Case]] = {}
    for case in report.cases:
        if case.layer:
            call, size = case.call, (case.seqlen, case.batch)
            prompt = call.prompt_seqlen if call else size[0]
            found.setdefault((prompt, not (call and call.kind == "decode"), *size), []).append(case)
    ordered = sorted(found.items(), key=lambda item: item[0], reverse=True)
    return tuple(Group(report, cases) for _, cases in ordered)


def layer_of(case: Case) -> int:
    return case.layer.index if case.layer else -1


def precision_order(precision: PrecisionRecord) -> tuple[int, int]:
    return INTERMEDIATES.index(precision.intermediates), STATES.index(precision.state_dtype)


# --- errors of several calls


def deviation(accuracy: Accuracy, which: Against) -> Deviation | None:
    return {"vs_oracle": accuracy.vs_oracle, "vs_baseline": accuracy.vs_baseline, "floor": accuracy.floor}[which]


class Pooled(NamedTuple):
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
    if found and all(against == f"{name} {precision.exact}" for precision, against in found):
        return f"{name}, exact, with the same state dtype"
    return " or ".join(dict.fromkeys(against for _, against in found)) or name


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
        result = "" if case.result == "refused" else f" {_result_words(case)}"
        found.setdefault(f"{case.implementation} ({case.precision}){result}", []).append(layer_of(case))
    return "; ".join(f"{name} in {layer_words(layers)}" for name, layers in found.items())


def trouble_words(series: Series) -> str:
    """The reason why a series did not pass: "not finite in layer 9"."""
    found: dict[str, list[int]] = {}
    for case in series.cases:
        if case.result != "passed" or case.outside_budget:
            why = "outside the error budget" if case.result == "passed" else _result_words(case)
            found.setdefault(why, []).append(layer_of(case))
    return fmt.words(f"{why} in {layer_words(layers)}" for why, layers in found.items())


def _result_words(case: Case) -> str:
    """Distinguishes cases whose exact answer is not finite either."""
    if not exact_answer_is_finite(case):
        return "without a finite exact answer"
    return "not finite" if case.result == "nonfinite" else case.result


def precision_words(precision: PrecisionRecord) -> str:
    """ "exact with fp32 states"."""
    return f"{precision.intermediates} with {precision.state_dtype} states"


def layer_words(indices: Sequence[int]) -> str:
    """ "layer 9", "layers 9, 18"."""
    return f"{'layer' if len(set(indices)) == 1 else 'layers'} {fmt.indices(indices)}"
