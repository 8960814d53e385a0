"""Combines the stalls of an implementation's kernels, weighted by their durations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ssdprof.schema.stalls import Hint, KernelStalls, Line, StallReport

_WORTH_PCT = 4.0
_LARGE_PCT = 30.0
_MOST_HINTS = 6


@dataclass
class Share:
    """A share of an implementation's busy time in percent: in total, and by stall reason."""

    pct: float = 0.0
    reasons: dict[str, float] = field(default_factory=dict)

    @property
    def most(self) -> list[tuple[str, float]]:
        """Reasons, the largest first."""
        return sorted(self.reasons.items(), key=lambda item: (-item[1], item[0]))

    def add(self, other: Share) -> None:
        self.pct += other.pct
        for reason, pct in other.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0.0) + pct


@dataclass(frozen=True)
class Design:
    """The kernels of one implementation.

    stages: in the algorithm's order, "stage" or "stage.part".  idle: in percent of all samples.
    hints: each with its kernel, the largest first; only those with enough effect on the whole.
    words: of parts of stages.
    lines: those that are not idle, each with its percent of the busy time, the hottest first.
    """

    name: str
    kernels: tuple[KernelStalls, ...]
    stages: dict[str, Share]
    idle: dict[str, float]
    hints: tuple[tuple[KernelStalls, Hint], ...]
    lines: tuple[tuple[float, Line], ...]
    duration_us: float | None
    words: Mapping[str, str]

    @property
    def is_sampled(self) -> bool:
        return bool(self.stages)

    def part(self, stage: str) -> str:
        """The name of a part of a stage, as text."""
        return self.words.get(stage, stage.split(".", 1)[-1].replace("_", " "))

    def us(self, share: Share) -> float | None:
        return None if self.duration_us is None else self.duration_us * share.pct / 100

    def whole(self) -> dict[str, Share]:
        """Stages with their parts added up."""
        found: dict[str, Share] = defaultdict(Share)
        for name, share in self.stages.items():
            found[name.split(".")[0]].add(share)
        return dict(found)

    def all(self) -> Share:
        """The sum of all stages: 100 %."""
        found = Share()
        for share in self.stages.values():
            found.add(share)
        return found


def designs(report: StallReport) -> tuple[Design, ...]:
    """One design for each implementation, and one for each kernel of no implementation."""
    found: dict[str, list[KernelStalls]] = {}
    for kernel in report.kernels:
        found.setdefault(kernel.implementation or kernel.kernel, []).append(kernel)
    return tuple(_design(name, tuple(kernels), report.words) for name, kernels in found.items())


def _design(name: str, kernels: tuple[KernelStalls, ...], words: Mapping[str, str]) -> Design:
    weights = list(_weights(kernels))
    stages: dict[str, Share] = defaultdict(Share)
    idle: dict[str, float] = defaultdict(float)
    for kernel, weight in weights:
        samples = sum(kernel.samples.values())
        busy = kernel.busy_samples
        for stage in kernel.stages:
            if stage.idle:
                idle[stage.name] += 100 * weight * stage.total / samples
            else:
                part = {reason: 100 * weight * count / busy for reason, count in stage.samples.items()}
                stages[stage.name].add(Share(100 * weight * stage.total / busy, part))
    durations = [kernel.throughput.duration_us for kernel in kernels]
    known = [duration for duration in durations if duration is not None]
    return Design(
        name=name,
        kernels=kernels,
        stages=dict(stages),
        idle=dict(idle),
        hints=tuple(_hints(weights)),
        lines=tuple(sorted(_lines(weights), key=lambda one: -one[0])),
        duration_us=sum(known) if len(known) == len(kernels) else None,
        words=words,
    )


def _lines(weights: list[tuple[KernelStalls, float]]) -> Iterator[tuple[float, Line]]:
    for kernel, weight in weights:
        idle = {stage.name for stage in kernel.stages if stage.idle}
        busy = kernel.busy_samples
        for line in kernel.lines:
            if line.stage not in idle:
                yield 100 * weight * line.total / busy, line


def _hints(weights: list[tuple[KernelStalls, float]]) -> Iterator[tuple[KernelStalls, Hint]]:
    """Hints on stages of at least _WORTH_PCT of the design, then hints on kernels of at least _LARGE_PCT."""
    ranked = [
        (weight * hint.share_pct, kernel, hint)
        for kernel, weight in weights
        for hint in kernel.hints
        if hint.share_pct is not None and weight * hint.share_pct >= _WORTH_PCT
    ]
    for _, kernel, hint in sorted(ranked, key=lambda one: -one[0])[:_MOST_HINTS]:
        yield kernel, hint
    for kernel, weight in weights:
        if 100 * weight >= _LARGE_PCT:
            for hint in kernel.hints:
                if hint.share_pct is None:
                    yield kernel, hint


def _weights(kernels: tuple[KernelStalls, ...]) -> Iterator[tuple[KernelStalls, float]]:
    """Each sampled kernel's share of the whole: by duration, else by samples."""
    sampled = [kernel for kernel in kernels if kernel.busy_samples]
    times = [kernel.throughput.duration_us for kernel in sampled]
    sizes = [
        sum(kernel.samples.values()) if None in times else time or 0.0
        for kernel, time in zip(sampled, times, strict=True)
    ]
    for kernel, size in zip(sampled, sizes, strict=True):
        yield kernel, size / sum(sizes)
