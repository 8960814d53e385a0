"""Stalls, put together: the kernels of one implementation as one, each weighed by its time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from ssdprof.stall_records import KernelStalls, StallReport


@dataclass
class Share:
    """A part of an implementation's busy time, in percent of it: in all, and by stall reason."""

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
    """The kernels that do the work together.

    stages: in the algorithm's order, "stage" or "stage.part".  idle: in percent of all samples.
    """

    name: str
    kernels: tuple[KernelStalls, ...]
    stages: dict[str, Share]
    idle: dict[str, float]
    duration_us: float | None

    @property
    def is_sampled(self) -> bool:
        return bool(self.stages)

    def us(self, share: Share) -> float | None:
        return None if self.duration_us is None else self.duration_us * share.pct / 100

    def whole(self) -> dict[str, Share]:
        """Stages with their parts added up."""
        found: dict[str, Share] = defaultdict(Share)
        for name, share in self.stages.items():
            found[name.split(".")[0]].add(share)
        return dict(found)

    def all(self) -> Share:
        """Every stage together: 100 %."""
        found = Share()
        for share in self.stages.values():
            found.add(share)
        return found


def designs(report: StallReport) -> tuple[Design, ...]:
    """One for each implementation; every foreign kernel is one of its own."""
    found: dict[str, list[KernelStalls]] = {}
    for kernel in report.kernels:
        found.setdefault(kernel.implementation or kernel.kernel, []).append(kernel)
    return tuple(_design(name, tuple(kernels)) for name, kernels in found.items())


def _design(name: str, kernels: tuple[KernelStalls, ...]) -> Design:
    stages: dict[str, Share] = defaultdict(Share)
    idle: dict[str, float] = defaultdict(float)
    for kernel, weight in _weights(kernels):
        samples = sum(kernel.samples.values())
        busy = samples - kernel.idle_samples
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
        duration_us=sum(known) if len(known) == len(kernels) else None,
    )


def _weights(kernels: tuple[KernelStalls, ...]) -> Iterator[tuple[KernelStalls, float]]:
    """Each sampled kernel's part of the whole: by duration, else by samples."""
    sampled = [kernel for kernel in kernels if kernel.stages]
    times = [kernel.throughput.duration_us for kernel in sampled]
    sizes = [
        sum(kernel.samples.values()) if None in times else time or 0.0
        for kernel, time in zip(sampled, times, strict=True)
    ]
    for kernel, size in zip(sampled, sizes, strict=True):
        yield kernel, size / sum(sizes)
