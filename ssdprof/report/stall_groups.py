"""Combines the stalls of an implementation's kernels, weighted by their durations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ssdprof.schema.stalls import KernelStalls, Line, StallReport

_WORTH_PCT = 4.0
_LARGE_PCT = 30.0
_MOST_HINTS = 6


@dataclass
class StageShare:
    """A share of an implementation's busy time in percent: in total, and by stall reason."""

    pct: float = 0.0
    reasons: dict[str, float] = field(default_factory=dict)

    @property
    def most(self) -> list[tuple[str, float]]:
        """Reasons, the largest first."""
        return sorted(self.reasons.items(), key=lambda item: (-item[1], item[0]))

    def add(self, other: StageShare) -> None:
        self.pct += other.pct
        for reason, pct in other.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0.0) + pct


@dataclass(frozen=True)
class KernelGroup:
    """The kernels of one implementation.

    stages: in the algorithm's order, "stage" or "stage.part".  idle: in percent of all samples.
    hints: each with its kernel, the largest first; only those with enough effect on the whole.
    words: of parts of stages.
    lines: those that are not idle, each with its percent of the busy time, the hottest first.
    """

    name: str
    kernels: tuple[KernelStalls, ...]
    stages: dict[str, StageShare]
    idle: dict[str, float]
    hints: tuple[tuple[KernelStalls, str], ...]
    lines: tuple[tuple[float, Line], ...]
    duration_us: float | None
    words: Mapping[str, str]

    @property
    def is_sampled(self) -> bool:
        return bool(self.stages)

    def part(self, stage: str) -> str:
        """The name of a part of a stage, as text."""
        return self.words.get(stage, stage.split(".", 1)[-1].replace("_", " "))

    def us(self, share: StageShare) -> float | None:
        return None if self.duration_us is None else self.duration_us * share.pct / 100

    def whole(self) -> dict[str, StageShare]:
        """Stages with their parts added up."""
        found: dict[str, StageShare] = defaultdict(StageShare)
        for name, share in self.stages.items():
            found[name.split(".")[0]].add(share)
        return dict(found)

    def all(self) -> StageShare:
        """The sum of all stages: 100 %."""
        found = StageShare()
        for share in self.stages.values():
            found.add(share)
        return found


def groups(report: StallReport) -> tuple[KernelGroup, ...]:
    """One group for each implementation, and one for each kernel of no implementation."""
    found: dict[str, list[KernelStalls]] = {}
    for kernel in report.kernels:
        found.setdefault(kernel.implementation or kernel.kernel, []).append(kernel)
    return tuple(_group(name, tuple(kernels), report.words) for name, kernels in found.items())


def _group(name: str, kernels: tuple[KernelStalls, ...], words: Mapping[str, str]) -> KernelGroup:
    weights = list(_weights(kernels))
    stages: dict[str, StageShare] = defaultdict(StageShare)
    idle: dict[str, float] = defaultdict(float)
    for kernel, weight in weights:
        samples = sum(kernel.samples.values())
        busy = kernel.busy_samples
        for stage, by_reason in kernel.stages.items():
            total = sum(by_reason.values())
            if stage in kernel.idle:
                idle[stage] += 100 * weight * total / samples
            else:
                part = {reason: 100 * weight * count / busy for reason, count in by_reason.items()}
                stages[stage].add(StageShare(100 * weight * total / busy, part))
    durations = [kernel.duration_us for kernel in kernels]
    known = [duration for duration in durations if duration is not None]
    return KernelGroup(
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
        busy = kernel.busy_samples
        for line in kernel.lines:
            if line.stage not in kernel.idle:
                yield 100 * weight * line.total / busy, line


def _hints(weights: list[tuple[KernelStalls, float]]) -> Iterator[tuple[KernelStalls, str]]:
    """Hints on stages of at least _WORTH_PCT of the group, then hints on kernels of at least _LARGE_PCT."""
    ranked = [
        (weight * share_pct, kernel, hint)
        for kernel, weight in weights
        for hint, share_pct in kernel.hints.items()
        if share_pct is not None and weight * share_pct >= _WORTH_PCT
    ]
    for _, kernel, hint in sorted(ranked, key=lambda one: -one[0])[:_MOST_HINTS]:
        yield kernel, hint
    for kernel, weight in weights:
        if 100 * weight >= _LARGE_PCT:
            yield from ((kernel, hint) for hint, share_pct in kernel.hints.items() if share_pct is None)


def _weights(kernels: tuple[KernelStalls, ...]) -> Iterator[tuple[KernelStalls, float]]:
    """Each sampled kernel's share of the whole: by duration, else by samples."""
    sampled = [kernel for kernel in kernels if kernel.busy_samples]
    times = [kernel.duration_us for kernel in sampled]
    sizes = [
        sum(kernel.samples.values()) if None in times else time or 0.0
        for kernel, time in zip(sampled, times, strict=True)
    ]
    for kernel, size in zip(sampled, sizes, strict=True):
        yield kernel, size / sum(sizes)
