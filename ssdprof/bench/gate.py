"""What makes a bench end with exit code 1."""

from __future__ import annotations

from collections.abc import Iterator

from ssdprof.bench.schema import BenchCase, BenchReport


def wrong(report: BenchReport) -> tuple[str, ...]:
    """Cases of ours that were refused or not right, each in a sentence; or that there was no case of ours at all.

    Cells that the budget or the memory left out are named in the report and are no failure.
    """
    ours = [(cell, case) for cell in report.cells for case in cell.cases if case.implementation not in report.peers]
    if not ours:
        return ("Nothing was compared.",)
    return tuple(
        f"{_where(cell.shape, cell.tokens, cell.dims.dtype)}: {case.name}: {case.status}: {case.reason}"
        for cell, case in ours
        if case.status != "passed"
    )


def too_slow(report: BenchReport, least: float) -> tuple[str, ...]:
    """Where `fused` is not `least` times as fast as the baseline, by device time.

    A case or a cell that was to be measured and has no speedup does not hold either.
    """
    return (*_slow_cases(report, least), *(f"{one.cell}: left out: {one.reason}" for one in report.left_out))


def _slow_cases(report: BenchReport, least: float) -> Iterator[str]:
    for cell in report.cells:
        for case in cell.cases:
            if case.implementation != "fused":
                continue
            where = _where(cell.shape, cell.tokens, cell.dims.dtype)
            speedup = case.over(report.baseline)
            if speedup is None:
                yield f"{where}: {case.name}: {_why_none(case, report.baseline)}"
            elif speedup.device_ratio < least:
                yield f"{where}: {case.name}: {speedup.device_ratio:.2f}x over {report.baseline}, not {least:g}x"


def _why_none(case: BenchCase, baseline: str) -> str:
    if case.timing is None:
        return f"not timed: {case.status}{': ' if case.reason else ''}{case.reason}"
    return f"{baseline} was not timed"


def _where(shape: str, tokens: str, dtype: str) -> str:
    return f"{shape}, {tokens}, {dtype}"
