"""Times by the warm clock, next to the default ones."""

from __future__ import annotations

from collections.abc import Iterator

from ssdprof.bench.grouping import MOST_ROWS, grouped
from ssdprof.bench.schema import BenchCase, BenchReport
from ssdprof.report import format as fmt
from ssdprof.report.tables import warm
from ssdprof.report.tables.table import Table, columns
from ssdprof.schema import WarmTiming


def by_warm_clock(report: BenchReport) -> Iterator[Table]:
    """One row for each implementation that the warm clock timed; speedups are over the baseline."""
    for title, cells in grouped(report):
        timed = [(cell, case, case.timing.warm) for cell in cells for case in cell.cases if case.timing]
        rows = [(cell.tokens, *_row(case, found, report.baseline)) for cell, case, found in timed if found]
        calls = max((found.calls for _, _, found in timed if found), default=0)
        for first in range(0, len(rows), MOST_ROWS):
            yield Table(
                title=f"Warm clock, over {report.baseline}: {title}",
                headers=("sequences x\ntokens", "implementation", "intermediates,\nstates", *warm.HEADERS),
                rows=tuple(rows[first : first + MOST_ROWS]),
                align=columns(3, len(warm.HEADERS)),
                note=warm.NOTE.format(calls),
                keys=3,
            )


def _row(case: BenchCase, found: WarmTiming, baseline: str) -> tuple[str, ...]:
    over = case.over(baseline)
    speedup = over.warm if over else None
    assert case.timing is not None
    return (
        case.kernel,
        case.precision.short,
        fmt.speedup(speedup.ratio, speedup.interval) if speedup else fmt.MISSING,
        speedup.verdict if speedup else fmt.MISSING,
        fmt.duration(found.median_us),
        fmt.duration(case.timing.call_median_us),
        fmt.duration(case.timing.device_median_us),
    )
