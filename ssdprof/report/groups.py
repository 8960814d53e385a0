"""Cases that can be compared and added up, in groups, and their series; the pooled errors of several calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from ssdprof.core import words as fmt
from ssdprof.core.accuracy import Accuracy, Deviation
from ssdprof.core.base import Clock, PrecisionRecord, TensorName, grouped
from ssdprof.core.case import Case
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


class Series:
    """One implementation at one precision, over the calls of a group.

    variant: the kernels that ran, by name; several if layers differ.  name: "fused hopper".  label: "fused, exact,
    fp32".  within_budget: every case; False for another library that passed outside of its budget.
    layers: of the timed calls.  workspace_bytes: the largest of them.  baselines: what they are compared with: "unfused
    exact, fp32 states".
    """

    def __init__(self, group: Group, implementation: str, precision: PrecisionRecord, cases: Sequence[Case]) -> None:
        self.group, self.implementation, self.precision, self.cases = group, implementation, precision, cases
        self.variant = "/".join(dict.fromkeys(case.variant for case in cases if case.variant))
        self.name = implementation + (f" {self.variant}" if self.variant not in ("", implementation) else "")
        self.label = f"{implementation}, {precision.short}"
        self.within_budget = all(case.result == "passed" and not case.outside_budget for case in cases)
        self.timed = timed = [case for case in cases if case.device_us and case.call_us]
        self.layers = tuple(case.layer.index for case in timed if case.layer)
        self.workspace_bytes = max((case.memory.workspace_bytes for case in timed if case.memory), default=None)
        compared = [rival for case in timed if (rival := group.report.rival(case)) and rival.device_us]
        self.baselines = dict.fromkeys(f"{rival.implementation} {rival.precision}" for rival in compared)

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
    def device(self) -> Summed:
        return self._summed("device")

    @cached_property
    def call(self) -> Summed:
        return self._summed("call")

    def _summed(self, clock: Clock) -> Summed:
        smallest = self.group.report.smallest_difference
        times = [found.value for case in self.timed if (found := case.by_clock(clock))]
        ratios = [found for case in self.timed if (found := self.group.report.speedup(case, clock))]
        total = math.fsum(times)
        if not times or len(ratios) < len(times):
            return Summed(total, None, None)
        # a call's ratio is baseline / own time, so its weight is its own time
        bounds = zip(*ratios, strict=True)
        speedup = Estimate(*(math.fsum(v * us for v, us in zip(bound, times, strict=True)) / total for bound in bounds))
        verdict, *others = {ratio.verdict(smallest) for ratio in ratios}
        return Summed(total, speedup, speedup.verdict(smallest) if others else verdict)

    @property
    def floor_pct(self) -> float | None:
        """The least time for all bytes and arithmetic of the timed calls, as a share of their device time."""
        floors = [floor for case in self.timed if (floor := case.floor_us(self.group.report.ceilings)) is not None]
        return 100 * sum(floors) / self.device.us if self.timed and len(floors) == len(self.timed) else None


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
        self.where = f"in chunks of {size} of {self.tokens}"
        if self.call is None or self.call.kind == "packed":
            self.where = f"at {size}{f' {self.call}' if self.call else ''}"
        elif self.steps:
            self.where = f"in decode steps after {self.tokens}"
        self.size = self.where.partition(" ")[2]

    @property
    def extent(self) -> str:
        """ "layer 3", "3 layers", "4 steps in each of 3 layers"; where a run was broken off "11 steps in 3 layers"."""
        layers = len(self.layers)
        of_layers = f"layer {self.layers[0].index}" if layers == 1 else f"{layers} layers"
        each, *others = {self.at_layer(layer).calls for layer in self.layers}
        if others:
            return f"{fmt.plural(self.calls, self.noun)} in {of_layers}"
        return of_layers if each == 1 else f"{fmt.plural(each, self.noun)} in {'each of ' * (layers > 1)}{of_layers}"

    def series(self, *implementations: str) -> tuple[Series, ...]:
        """Every series, or those of some implementations: exact before relaxed, wide states before narrow ones."""
        found = grouped(sorted(self.cases, key=layer_of), lambda case: (case.implementation, case.precision))
        return tuple(
            Series(self, *key, tuple(found[key]))
            for name in implementations or self.implementations
            for key in sorted((key for key in found if key[0] == name), key=lambda key: precision_order(key[1]))
        )

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

    def key(case: Case) -> tuple[int, bool, int, int]:
        prompt = case.call.prompt_seqlen if case.call else case.seqlen
        return prompt, not (case.call and case.call.kind == "decode"), case.seqlen, case.batch

    found = grouped((case for case in report.cases if case.layer), key)
    return tuple(Group(report, found[key]) for key in sorted(found, reverse=True))


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
        if not shares or all(share == 100.0 for share, _ in shares):
            return 100.0 if shares else None
        pooled = math.fsum(share * elements for share, elements in shares) / sum(elements for _, elements in shares)
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
