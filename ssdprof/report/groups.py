"""Cases that can be compared and added up, in groups and series; the pooled errors of several
calls.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from ssdprof.core import words as fmt
from ssdprof.core.accuracy import Accuracy, Deviation
from ssdprof.core.base import (
    CLOCKS,
    PRECISIONS,
    Clock,
    PrecisionName,
    TensorName,
    grouped,
    short_precision,
)
from ssdprof.core.case import Case, Drawn
from ssdprof.core.report import Report
from ssdprof.core.statistics import Estimate, Faster

Against = Literal["vs_oracle", "vs_baseline", "floor"]  # fields of `Accuracy`


class Series:
    """One implementation at one precision, over the calls of a group.

    name: "fused hopper", with all variants that ran.  label: "fused, exact, fp32".
    within_budget: every case; False for another library that passed outside of its budget.
    us: the summed times of the timed calls by each clock.  workspace_bytes: the largest of them.
    over: what they are compared with instead of their baseline: `unfused`, where a bench did not
    time that.
    """

    def __init__(
        self, group: Group, implementation: str, precision: PrecisionName, cases: Sequence[Case]
    ) -> None:
        self.group = group
        self.implementation = implementation
        self.precision = precision
        self.cases = cases
        variants = "/".join(
            dict.fromkeys(
                case.variant for case in cases if case.variant not in ("", implementation)
            )
        )
        self.name = f"{implementation} {variants}".rstrip()
        self.label = f"{implementation}, {short_precision(precision)}"
        self.within_budget = all(
            case.result == "passed" and not case.outside_budget for case in cases
        )
        there = {case.implementation for case in group.cases if case.device_us}
        self.over = (
            "unfused"
            if isinstance(cases[0].task, Drawn) and group.report.baseline not in there
            else ""
        )
        self.timed = [case for case in cases if case.device_us and case.call_us]
        self._us = {
            clock: [us.value for case in self.timed if (us := case.by_clock(clock))]
            for clock in CLOCKS
        }
        self.us = {clock: math.fsum(own) for clock, own in self._us.items()}
        spaces = [case.workspace_bytes for case in self.timed if case.workspace_bytes is not None]
        self.workspace_bytes = max(spaces, default=None)

    def pooled(self, which: Against, tensor: TensorName = "out") -> Pooled | None:
        return pool(self.cases, tensor, which)

    @cached_property
    def rivals(self) -> tuple[str, ...]:
        """What the timed calls are compared with: "unfused exact, fp32 states"."""
        found = (self.group.report.rival(case, self.over) for case in self.timed)
        return tuple(
            dict.fromkeys(
                f"{one.implementation} {one.precision}" for one in found if one and one.device_us
            )
        )

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of the prompt by the device time of all timed layers."""
        layers = len({layer_of(case) for case in self.timed})
        tokens = sum(case.batch * case.seqlen for case in self.timed)
        return tokens / layers / self.us["device"] * 1e6 if layers else None

    def _ratios(self, clock: Clock) -> list[Estimate]:
        """Speedups of the timed calls; none if one of them has none."""
        found = [
            one for case in self.timed if (one := self.group.report.speedup(case, clock, self.over))
        ]
        return found if len(found) == len(self.timed) else []

    def speedup(self, clock: Clock = "device") -> Estimate | None:
        """The sum of the baseline's times over the sum of ours, over the same calls.

        Its interval assumes that all calls are at the same end of their intervals, so it covers at
        least 95 %.
        """
        # a call's ratio is baseline / own time, so its weight is its own time
        bounds = zip(*self._ratios(clock), strict=True)
        sums = [
            math.fsum(map(operator.mul, bound, self._us[clock])) / self.us[clock]
            for bound in bounds
        ]
        return Estimate(*sums) if sums else None

    @property
    def verdict(self) -> Faster | None:
        """By device time: the verdict that all calls share, else that of the sum."""
        smallest, total = self.group.report.smallest_difference, self.speedup()
        shared = {one.verdict(smallest) for one in self._ratios("device")}
        return shared.pop() if len(shared) == 1 else total and total.verdict(smallest)

    @property
    def floor_pct(self) -> float | None:
        """The least time for all bytes and arithmetic of the timed calls, as a share of their
        device time.
        """
        floors = [
            floor
            for case in self.timed
            if (floor := case.floor_us(self.group.report.ceilings)) is not None
        ]
        return (
            100 * sum(floors) / self.us["device"]
            if self.timed and len(floors) == len(self.timed)
            else None
        )


class Group:
    """Cases that can be compared and added up: all of one kind of call on one prompt, of one size;
    of a bench, those on the same inputs.

    call: one of these calls; None for calls of a whole prompt.  steps: the calls are decode steps,
    which have their own
    baseline.  noun: what each of a layer's calls is.  calls: their number, in all layers.  layers:
    their indices.
    tokens: "131,072 tokens", "32 x 1,024 tokens"; of the prompt, if the calls are its chunks or
    decode steps.
    where: "at 131,072 tokens", "in decode steps after 512 tokens"; size: the same without its
    preposition.
    implementations: the baseline first, the others in the order in which they ran; compared: the
    others.
    """

    def __init__(self, report: Report, cases: Sequence[Case]) -> None:
        self.report, self.cases, first = report, tuple(cases), cases[0]
        self.call, self.seqlen, self.tokens = first.call, first.seqlen, first.prompt
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
        self.where = (
            f"{'at' if self.call is None or self.call.kind == 'packed' else 'in'} {self.size}"
        )

    @property
    def extent(self) -> str:
        """ "layer 3", "3 layers", "4 steps in each of 3 layers"; where a run was broken off "11
        steps in 3 layers".
        """
        layers = len(self.layers)
        of_layers = f"layer {self.layers[0]}" if layers == 1 else f"{layers} layers"
        each, *others = {own.calls for own in self.by_layer()}
        if others:
            return f"{fmt.plural(self.calls, self.noun)} in {of_layers}"
        return (
            of_layers
            if each == 1
            else f"{fmt.plural(each, self.noun)} in {'each of ' * (layers > 1)}{of_layers}"
        )

    def series(self, *implementations: str) -> tuple[Series, ...]:
        """Every series, or those of some implementations: exact before relaxed, wide states before
        narrow ones.
        """
        found = grouped(
            sorted(self.cases, key=layer_of), lambda case: (case.implementation, case.precision)
        )
        return tuple(
            Series(self, *key, tuple(found[key]))
            for name in implementations or self.implementations
            for key in sorted(
                (key for key in found if key[0] == name), key=lambda key: PRECISIONS.index(key[1])
            )
        )

    def others(self) -> tuple[Series, ...]:
        """The series of the compared implementations."""
        return self.series(*self.compared) if self.compared else ()

    def by_layer(self) -> Iterator[Group]:
        """A group for each layer."""
        yield from (
            Group(self.report, own) for _, own in sorted(grouped(self.cases, layer_of).items())
        )


def groups(report: Report) -> tuple[Group, ...]:
    """One group per prompt, kind of call, length and batch: the longest prompt first, decode steps
    after it.  For a bench, one for each of its inputs, in their order.
    """

    def key(case: Case) -> tuple[int, bool, int, int]:
        prompt = case.call.prompt_seqlen if case.call else case.seqlen
        return prompt, not (case.call and case.call.kind == "decode"), case.seqlen, case.batch

    drawn = grouped(
        (case for case in report.cases if isinstance(case.task, Drawn)), lambda case: case.place
    )
    found = grouped((case for case in report.cases if case.layer), key)
    return tuple(
        Group(report, own)
        for own in (*drawn.values(), *(found[one] for one in sorted(found, reverse=True)))
    )


def layer_of(case: Case) -> int:
    return case.layer.index if case.layer else -1


# --- errors of several calls


def deviation(accuracy: Accuracy | None, which: Against) -> Deviation | None:
    found: Deviation | None = getattr(accuracy, which, None)
    return found


class Pooled(NamedTuple):
    """Pooled deviations of several calls: all elements, and the worst maximum.

    largest: the deviation that holds the largest error, of `case`.  rms_ratio: of the worst call;
    inf if infinite.
    """

    largest: Deviation
    case: Case
    rms_ratio: float
    parts: tuple[Deviation, ...]

    def match_pct(self, tolerance: float) -> float:
        """Share of all elements that match; 100 only if all do."""
        return self._share([(part.match_pct(tolerance), part.elements) for part in self.parts])

    def match_rms_pct(self, tolerance: float) -> float | None:
        """The same, relative to the RMS of the tensor."""
        found = [
            (share, one.elements)
            for one in self.parts
            if (share := one.match_rms_pct(tolerance)) is not None
        ]
        return self._share(found) if len(found) == len(self.parts) else None

    @staticmethod
    def _share(shares: Sequence[tuple[float, int]]) -> float:
        if all(share == 100.0 for share, _ in shares):
            return 100.0
        pooled = math.fsum(share * elements for share, elements in shares) / sum(
            elements for _, elements in shares
        )
        return min(pooled, math.nextafter(100.0, 0.0))


def pool(cases: Iterable[Case], tensor: TensorName, which: Against) -> Pooled | None:
    """The deviations of every case that has one; None if none has."""
    found = [(case, error) for case in cases if (error := deviation(case.tensor(tensor), which))]
    if not found:
        return None
    worst, largest = max(found, key=lambda pair: pair[1].max_abs)
    rms = max(math.inf if one.rms_ratio is None else one.rms_ratio for _, one in found)
    return Pooled(largest, worst, rms, tuple(deviation for _, deviation in found))


# --- in words


def tokens_of(prompts: Iterable[Group]) -> str:
    """ "131,072, 16,384 and 1,024 tokens"; decode steps are named only if there are no prompts."""
    every = list(prompts)
    first, *others = dict.fromkeys(
        group.tokens for group in [one for one in every if not one.steps] or every
    )
    if not others:
        return first
    return (
        fmt.words(text.removesuffix("s").removesuffix(" token") for text in (first, *others))
        + " tokens"
    )


def places(prompts: Iterable[Group]) -> str:
    """ "at 131,072 and 16,384 tokens", "at 512 tokens and in decode steps after 512 tokens"."""
    every = list(prompts)
    whole = [group for group in every if group.call is None]
    others = [group.where for group in every if group.call is not None]
    return fmt.words([*([f"at {tokens_of(whole)}"] if whole else []), *others])


def layer_words(cases: Iterable[Case]) -> str:
    """ "layer 9", "layers 9, 18"; of another kind of case its place."""
    every = list(cases)
    indices = {layer_of(case) for case in every if case.layer}
    if not indices:
        return "; ".join(dict.fromkeys(case.place for case in every))
    return f"{'layer' if len(indices) == 1 else 'layers'} {fmt.indices(indices)}"
