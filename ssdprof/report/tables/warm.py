"""Times by the warm clock, calls back to back with a warm cache, next to the default clocks."""

from __future__ import annotations

from ssdprof.core import words as fmt
from ssdprof.report.groups import Group
from ssdprof.report.tables.table import Table, columns
from ssdprof.report.total_speed import total_speed

HEADERS = ("speedup,\nwarm", "verdict,\nwarm", "warm\ntime", "call time,\ncold", "device time,\ncold")
NOTE = (
    "Warm: {} Python calls back to back, without a wait or an eviction of the cache between them, as many papers time. "
    "All other tables show the default clocks, with a cold cache."
)


def total(group: Group) -> Table | None:
    """Every series with all layers timed by the warm clock, summed; None if there is none."""
    rows, calls = [], 0
    for series in group.series():
        speed = total_speed(series)
        if speed is None or (warm := speed.warm) is None:
            continue
        calls = max(case.timing.warm.calls for case in series.cases if case.timing and case.timing.warm)
        rows.append(
            (
                series.name,
                series.precision.short,
                fmt.speedup(warm.ratio, warm.interval),
                warm.verdict or fmt.MISSING,
                *(fmt.duration(clock.us) for clock in (warm, speed.call, speed.device)),
            )
        )
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
