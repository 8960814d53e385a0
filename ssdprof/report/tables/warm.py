"""How fast by the second clock: calls back to back, with a warm cache; the default clocks beside it."""

from __future__ import annotations

from collections.abc import Sequence

from ssdprof.report import format as fmt
from ssdprof.report.groups import Group, Series, common, interval_of, total_speed, weighted
from ssdprof.report.tables.table import Table, columns
from ssdprof.schema import Timing

HEADERS = ("speedup,\nwarm", "verdict,\nwarm", "warm\ntime", "call time,\ncold", "device time,\ncold")
NOTE = (
    "Warm: {} Python calls back to back, without a wait or an eviction of the cache between them, as many papers time. "
    "All other tables show the default clocks, with a cold cache."
)


def total(group: Group) -> Table | None:
    """Every series whose layers were all timed by it, added up; None if there is none."""
    rows, calls = [], 0
    for series in group.series():
        timed = [case.timing for case in series.cases if case.timing]
        speed = total_speed(series)
        if speed is None or not all(timing.warm for timing in timed):
            continue
        calls = max(timing.warm.calls for timing in timed if timing.warm)
        precision = f"{series.precision.intermediates}, {series.precision.state_dtype}"
        cold = (fmt.duration(speed.call_us), fmt.duration(speed.device_us))
        rows.append((series.name, precision, *_cells(series, timed), *cold))
    if not rows:
        return None
    layers = "sum over " * (group.calls > 1) + group.extent
    return Table(
        title=f"Speed by the warm clock {group.where}, {layers}",
        headers=("implementation", "intermediates,\nstates", *HEADERS),
        rows=tuple(rows),
        align=columns(2, len(HEADERS)),
        note=NOTE.format(calls),
        keys=2,
    )


def _cells(series: Series, timed: Sequence[Timing]) -> tuple[str, str, str]:
    """The ratio and its interval, the verdict, the time; summed as the other times are."""
    times = [timing.warm.median_us for timing in timed if timing.warm]
    speedups = [case.speedup for case in series.cases if case.speedup]
    warm = [one.warm for one in speedups if one.warm]
    if len(warm) < len(times):
        return fmt.MISSING, fmt.MISSING, fmt.duration(sum(times))
    interval = interval_of((one.interval for one in warm), times)
    verdict = common((one.verdict for one in warm), interval, max(one.smallest_difference for one in speedups))
    ratio = weighted((one.ratio for one in warm), times)
    return fmt.speedup(ratio, interval), verdict or fmt.MISSING, fmt.duration(sum(times))
