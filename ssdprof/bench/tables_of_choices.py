"""The effect of the intermediates and of the chunk size on the times."""

from __future__ import annotations

from collections.abc import Iterator

from ssdprof.bench.grouping import MOST_ROWS, grouped
from ssdprof.bench.schema import BenchCase, BenchCell, BenchReport
from ssdprof.core import words as fmt
from ssdprof.report.tables.table import Table, columns


def relaxed_over_exact(report: BenchReport) -> Iterator[Table]:
    """Speedup of relaxed over exact intermediates, for the same implementation and states."""
    for title, cells in grouped(report):
        rows = [row for cell in cells for case in cell.cases for row in _relaxed(cell, case)]
        smallest = {case.over_exact.smallest_difference for c in cells for case in c.cases if case.over_exact}
        for first in range(0, len(rows), MOST_ROWS):
            yield Table(
                title=f"Relaxed over exact intermediates: {title}",
                headers=(
                    "sequences x\ntokens", "implementation", "states", "speedup,\ndevice", "verdict,\ndevice",
                    "speedup,\ncall", "verdict,\ncall",
                ),
                rows=tuple(rows[first : first + MOST_ROWS]),
                align=columns(3, 4),
                keys=3,
                note=fmt.counts(max(smallest)),
            )  # fmt: skip


def _relaxed(cell: BenchCell, case: BenchCase) -> Iterator[tuple[str, ...]]:
    if over := case.over_exact:
        yield (
            cell.tokens,
            case.kernel,
            case.precision.state_dtype,
            fmt.speedup(over.device_ratio, over.device_interval),
            over.verdict,
            fmt.speedup(over.call_ratio, over.call_interval),
            over.call_verdict or fmt.MISSING,
        )


def chunk_sizes(report: BenchReport) -> Iterator[Table]:
    """Device times at each chunk size, for cases with several."""
    for title, cells in grouped(report):
        tried = [(cell, case) for cell in cells for case in cell.cases if len(case.trials) > 1]
        sizes = sorted({trial.chunk_size for _, case in tried for trial in case.trials})
        rows = [(cell.tokens, case.kernel, case.precision.short, *_times(case, sizes)) for cell, case in tried]
        for first in range(0, len(rows), MOST_ROWS):
            yield Table(
                title=f"Device times by chunk size: {title}",
                headers=(
                    "sequences x\ntokens",
                    "implementation",
                    "intermediates,\nstates",
                    *(f"chunk\n{size}" for size in sizes),
                    "fastest",
                ),
                rows=tuple(rows[first : first + MOST_ROWS]),
                align=columns(3, len(sizes) + 1),
                keys=3,
                note="Medians of a few replays in turns, which choose the chunk size; other tables have more replays.",
            )


def _times(case: BenchCase, sizes: list[int]) -> Iterator[str]:
    trials = {trial.chunk_size: trial for trial in case.trials}
    for size in sizes:
        trial = trials.get(size)
        if trial is None:
            yield fmt.MISSING
        else:
            yield trial.status if trial.device_us is None else fmt.duration(trial.device_us)
    yield fmt.count(case.chunk_size)
