"""Adds up the times of several layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ssdprof.report.groups import Series
from ssdprof.schema import Interval, Verdict

Comparison = tuple[float, Interval, Verdict | None]  # of one layer: ratio, its interval, verdict


@dataclass(frozen=True)
class Total:
    """The summed times of some layers by one clock; without a ratio if a layer has none.

    The ratio is the sum of the baseline's times over the sum of ours, over the same layers.  Its interval assumes
    that all layers are at the same end of their intervals, so it covers at least 95 %.  If all layers have the same
    verdict, it is the sum's; otherwise the sum's interval decides.
    """

    us: float
    ratio: float | None = None
    interval: Interval | None = None
    verdict: Verdict | None = None


@dataclass(frozen=True)
class TotalSpeed:
    """The timed layers of a series.  warm: by the warm clock; None unless it timed all of them.

    workspace_bytes: the largest of a layer.  baselines: what the layers are compared with, as their records name it.
    """

    layers: tuple[int, ...]
    device: Total
    call: Total
    warm: Total | None
    smallest_difference: float
    floor_pct: float | None
    workspace_bytes: int | None
    baselines: tuple[str, ...]


def total_speed(series: Series) -> TotalSpeed | None:
    """None if no layer was timed."""
    timed = [(case, case.timing) for case in series.cases if case.timing is not None]
    if not timed:
        return None
    speedups = [case.speedup for case, _ in timed if case.speedup is not None]
    smallest = max((s.smallest_difference for s in speedups), default=0.0)
    device_us = [timing.device_median_us for _, timing in timed]
    call_us = [timing.call_median_us for _, timing in timed]
    warm_us = [timing.warm.median_us for _, timing in timed if timing.warm]
    warm = [(s.warm.ratio, s.warm.interval, s.warm.verdict) for s in speedups if s.warm]
    floors = [case.roofline.floor_us for case, _ in timed if case.roofline is not None]
    workspaces = [case.memory.workspace_bytes for case, _ in timed if case.memory is not None]
    return TotalSpeed(
        layers=tuple(case.layer.index for case, _ in timed),
        device=_total(device_us, [(s.device_ratio, s.device_interval, s.verdict) for s in speedups], smallest),
        call=_total(call_us, [(s.call_ratio, s.call_interval, s.call_verdict) for s in speedups], smallest),
        warm=_total(warm_us, warm, smallest) if len(warm_us) == len(timed) else None,
        smallest_difference=smallest,
        floor_pct=100 * sum(floors) / sum(device_us) if len(floors) == len(timed) else None,
        workspace_bytes=max(workspaces, default=None),
        baselines=tuple(dict.fromkeys(s.baseline for s in speedups)),
    )


def _total(times_us: Sequence[float], compared: Sequence[Comparison], smallest_difference: float) -> Total:
    if len(compared) < len(times_us):
        return Total(sum(times_us))
    ratios, intervals, verdicts = zip(*compared, strict=True)
    interval = Interval(
        low=_weighted([bound.low for bound in intervals], times_us),
        high=_weighted([bound.high for bound in intervals], times_us),
    )
    verdict = _common(verdicts, interval, smallest_difference)
    return Total(sum(times_us), _weighted(ratios, times_us), interval, verdict)


def _weighted(values: Sequence[float], times_us: Sequence[float]) -> float:
    """A layer's ratio is baseline / own time, so its weight is its own time."""
    return math.fsum(v * w for v, w in zip(values, times_us, strict=True)) / math.fsum(times_us)


def _common(verdicts: Iterable[Verdict | None], interval: Interval, smallest_difference: float) -> Verdict | None:
    """The verdict that all layers share; otherwise that of the sum's interval."""
    different = set(verdicts)
    if len(different) == 1:
        return different.pop()
    if None in different:
        return None
    return interval.verdict(smallest_difference)
