"""Cases that belong together, and what they come to when layers are added up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from ssdprof.report import format as fmt
from ssdprof.report.serving import call_words
from ssdprof.schema import (
    CallRef,
    CaseResult,
    Deviation,
    Interval,
    LayerRef,
    PrecisionRecord,
    RunReport,
    TensorAccuracy,
    Verdict,
)

TensorName = Literal["out", "final_states"]

_INTERMEDIATES = ("exact", "relaxed")
_STATES = ("fp64", "fp32", "fp16", "bf16")


@dataclass(frozen=True)
class Series:
    """One implementation at one precision, over the layers of a group."""

    implementation: str
    precision: PrecisionRecord
    cases: tuple[CaseResult, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(case.layer.index for case in self.cases)

    @property
    def within_budget(self) -> bool:
        """Whether every case passed; another library's may pass outside the error budget, and this is False then."""
        return all(case.status == "passed" and all(one.passed for one in case.accuracy) for case in self.cases)

    @property
    def variant(self) -> str:
        """The kernels that ran, by name; several if layers differ."""
        return "/".join(dict.fromkeys(case.variant for case in self.cases if case.variant))

    @property
    def name(self) -> str:
        """ "fused hopper"; the variant only where it says more than the implementation."""
        if self.variant in ("", self.implementation):
            return self.implementation
        return f"{self.implementation} {self.variant}"


@dataclass(frozen=True)
class Group:
    """All cases of one kind of call on one prompt, of one size: they may be compared and added up.

    call: one of these calls, if they are not those of a whole prompt.
    """

    seqlen: int
    batch: int
    cases: tuple[CaseResult, ...]
    baseline: str
    call: CallRef | None = None

    @property
    def tokens(self) -> str:
        """ "131,072 tokens", "32 x 1,024 tokens"; of the prompt, if the calls are decode steps."""
        if self.steps and self.call:
            return fmt.tokens(self.call.prompt_seqlen, self.batch)
        return fmt.tokens(self.seqlen, self.batch)

    @property
    def where(self) -> str:
        """ "at 131,072 tokens", "in decode steps after 512 tokens"."""
        return call_words(self.call, self.seqlen, self.batch)

    @property
    def steps(self) -> bool:
        """Whether the calls are decode steps."""
        return self.call is not None and self.call.kind == "decode"

    @property
    def calls(self) -> int:
        """Calls of all layers."""
        return len({(case.layer.index, case.call) for case in self.cases})

    @property
    def extent(self) -> str:
        """ "layer 3", "3 layers", "4 steps in each of 3 layers"."""
        layers = len(self.layers)
        of_layers = f"layer {self.layers[0].index}" if layers == 1 else f"{layers} layers"
        each = self.calls // layers
        if self.calls == layers:
            return of_layers
        noun = "step" if self.steps else "chunk"
        return f"{fmt.plural(each, noun)} in {'' if layers == 1 else 'each of '}{of_layers}"

    @property
    def layers(self) -> tuple[LayerRef, ...]:
        by_index = {case.layer.index: case.layer for case in self.cases}
        return tuple(by_index[index] for index in sorted(by_index))

    @property
    def implementations(self) -> tuple[str, ...]:
        """The baseline first, the others in the order in which they ran."""
        names = dict.fromkeys(case.implementation for case in self.cases)
        return tuple(sorted(names, key=lambda name: name != self.baseline))

    @property
    def compared(self) -> tuple[str, ...]:
        """Implementations that a report is about: all but the baseline."""
        return tuple(name for name in self.implementations if name != self.baseline)

    def series(self, implementation: str | None = None) -> tuple[Series, ...]:
        """Every series, or those of one implementation: exact before relaxed, wide states before narrow ones."""
        wanted = self.implementations if implementation is None else (implementation,)
        found = []
        for name in wanted:
            cases = [case for case in self.cases if case.implementation == name]
            for precision in sorted({case.precision for case in cases}, key=precision_order):
                own = (case for case in cases if case.precision == precision)
                found.append(Series(name, precision, tuple(sorted(own, key=lambda case: case.layer.index))))
        return tuple(found)

    def keep(self, wanted: Callable[[CaseResult], bool]) -> Group:
        """The group of the wanted cases alone."""
        return replace(self, cases=tuple(case for case in self.cases if wanted(case)))

    def at_layer(self, layer: LayerRef) -> Group:
        return self.keep(lambda case: case.layer.index == layer.index)

    def baseline_of(self, series: Series) -> Series | None:
        """What a series is compared with: what its cases name; else the baseline, exact, with the same state dtype."""
        named = {one.vs_baseline.against for case in series.cases for one in case.accuracy if one.vs_baseline}
        exact = PrecisionRecord(intermediates="exact", state_dtype=series.precision.state_dtype)
        wanted = named or {f"{self.baseline} {exact}"}
        return next((own for own in self.series(self.baseline) if f"{self.baseline} {own.precision}" in wanted), None)


def groups(report: RunReport) -> tuple[Group, ...]:
    """One group per prompt, kind of call, length and batch: the longest prompt first, decode steps after it."""
    found: dict[tuple[int, bool, int, int], list[CaseResult]] = {}
    for case in report.cases:
        call, size = case.call, (case.dims.seqlen, case.dims.batch)
        prompt = call.prompt_seqlen if call else size[0]
        found.setdefault((prompt, not (call and call.kind == "decode"), *size), []).append(case)
    steps = report.asked.steps if report.asked else None
    return tuple(
        Group(
            seqlen,
            batch,
            tuple(cases),
            baseline=report.baseline if prompts or steps is None else steps.baseline,
            call=cases[0].call,
        )
        for (_, prompts, seqlen, batch), cases in sorted(found.items(), key=lambda item: item[0], reverse=True)
    )


def baselines(name: str, pairs: Iterable[tuple[PrecisionRecord, str]]) -> str:
    """With what each precision was compared, in words; pairs: a precision and the baseline it names."""
    found = list(pairs)
    if not found:
        return name
    if all(against == f"{name} exact, {precision.state_dtype} states" for precision, against in found):
        return f"{name}, exact, with the same state dtype"
    return " or ".join(dict.fromkeys(against for _, against in found))


def tokens(prompts: Iterable[Group]) -> str:
    """ "131,072, 16,384 and 1,024 tokens"; decode steps are not told, unless there is nothing else."""
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
    return fmt.words([*([f"at {tokens(whole)}"] if whole else []), *others])


def precision_order(precision: PrecisionRecord) -> tuple[int, int]:
    return _INTERMEDIATES.index(precision.intermediates), _STATES.index(precision.state_dtype)


# --- accuracy


@dataclass(frozen=True)
class Pooled:
    """Deviations of several layers as one: elements pooled, the worst of all maxima.

    `largest` is the deviation that holds max_abs, `layer` its layer; rms_ratio is that of the worst layer.
    """

    elements: int
    rms_ratio: float
    max_abs: float
    largest: Deviation
    layer: LayerRef
    parts: tuple[Deviation, ...]

    @property
    def scale_max_abs(self) -> float | None:
        """The largest value of what `max_abs` is an error of; None if it was not recorded."""
        return self.largest.scale_max_abs

    def match_pct(self, tolerance: float) -> float | None:
        """Share of all elements that match; 100 only if all do."""
        shares = [
            (match.match_pct, part.elements)
            for part in self.parts
            for match in part.matches
            if match.tolerance == tolerance
        ]
        total = sum(elements for _, elements in shares)
        if not total:
            return None
        if all(share == 100.0 for share, _ in shares):
            return 100.0
        pooled = math.fsum(share * elements for share, elements in shares) / total
        return min(pooled, math.nextafter(100.0, 0.0))


def pool(
    cases: Iterable[CaseResult], tensor: TensorName, which: Callable[[TensorAccuracy], Deviation | None]
) -> Pooled | None:
    """The deviations that `which` picks out of every case that has one; None if none has."""
    found = [
        (case.layer, deviation)
        for case in cases
        for accuracy in case.accuracy
        if accuracy.tensor == tensor and (deviation := which(accuracy)) is not None
    ]
    if not found:
        return None
    layer, largest = max(found, key=lambda pair: nan_is_worst(pair[1].max_abs))
    return Pooled(
        elements=sum(deviation.elements for _, deviation in found),
        rms_ratio=max((deviation.rms_ratio for _, deviation in found), key=nan_is_worst),
        max_abs=largest.max_abs,
        largest=largest,
        layer=layer,
        parts=tuple(deviation for _, deviation in found),
    )


def nan_is_worst(value: float) -> float:
    """A key to sort errors by."""
    return math.inf if math.isnan(value) else value


# --- speed


@dataclass(frozen=True)
class TotalSpeed:
    """Times of the timed layers of a series, added up.

    A ratio is the sum of the baseline's times over the sum of ours, over the same layers.  Its interval takes every
    layer at its own bound, as if all erred the same way: it covers at least 95 %.  If all layers have the same
    verdict, it is the sum's; otherwise the sum's interval decides.
    """

    layers: tuple[int, ...]
    device_us: float
    call_us: float
    device_ratio: float | None
    device_interval: Interval | None
    call_ratio: float | None
    call_interval: Interval | None
    device_verdict: Verdict | None
    call_verdict: Verdict | None
    smallest_difference: float
    floor_pct: float | None
    workspace_bytes: int | None
    baselines: tuple[str, ...]


def total_speed(series: Series) -> TotalSpeed | None:
    """None if no layer was timed."""
    timed = [(case, case.timing) for case in series.cases if case.timing is not None]
    if not timed:
        return None
    device = [timing.device_median_us for _, timing in timed]
    call = [timing.call_median_us for _, timing in timed]
    speedups = [case.speedup for case, _ in timed if case.speedup is not None]
    floors = [case.roofline.floor_us for case, _ in timed if case.roofline is not None]
    workspaces = [case.memory.workspace_bytes for case, _ in timed if case.memory is not None]
    device_ratio = call_ratio = device_interval = call_interval = device_verdict = call_verdict = None
    smallest = max((s.smallest_difference for s in speedups), default=0.0)
    if len(speedups) == len(timed):
        device_ratio = weighted((s.device_ratio for s in speedups), device)
        device_interval = interval_of((s.device_interval for s in speedups), device)
        call_ratio = weighted((s.call_ratio for s in speedups), call)
        call_interval = interval_of((s.call_interval for s in speedups), call)
        device_verdict = common((s.verdict for s in speedups), device_interval, smallest)
        call_verdict = common((s.call_verdict for s in speedups), call_interval, smallest)
    return TotalSpeed(
        layers=tuple(case.layer.index for case, _ in timed),
        device_us=sum(device),
        call_us=sum(call),
        device_ratio=device_ratio,
        device_interval=device_interval,
        call_ratio=call_ratio,
        call_interval=call_interval,
        device_verdict=device_verdict,
        call_verdict=call_verdict,
        smallest_difference=smallest,
        floor_pct=100 * sum(floors) / sum(device) if len(floors) == len(timed) else None,
        workspace_bytes=max(workspaces, default=None),
        baselines=tuple(dict.fromkeys(s.baseline for s in speedups)),
    )


def weighted(values: Iterable[float], weights: list[float]) -> float:
    """A layer's ratio is baseline / own time, so its weight is its own time."""
    return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / math.fsum(weights)


def interval_of(intervals: Iterable[Interval], weights: list[float]) -> Interval:
    bounds = list(intervals)
    return Interval(
        low=weighted((bound.low for bound in bounds), weights),
        high=weighted((bound.high for bound in bounds), weights),
    )


def common(verdicts: Iterable[Verdict | None], interval: Interval, smallest_difference: float) -> Verdict | None:
    """The verdict that all layers share; otherwise that of the sum's interval, by the rule of `measure.statistics`."""
    different = set(verdicts)
    if len(different) == 1:
        return different.pop()
    if None in different:
        return None
    if interval.low > 1 + smallest_difference:
        return "faster"
    return "slower" if interval.high < 1 / (1 + smallest_difference) else "no difference"
