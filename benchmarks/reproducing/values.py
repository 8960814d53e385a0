"""Computes the values of a document from reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from reproducing.published import EndToEnd, Match, Published, Ratio, Stall
from reproducing.reports import Case, Report, cases
from ssdprof.schema.prefill import PrefillReport
from ssdprof.schema.stalls import KernelStalls, StallReport

PICKS: dict[str, Any] = {"least": min, "greatest": max, "mean": fmean}


def values(document: Published, reports: Mapping[str, Report]) -> dict[str, float]:
    """The measured values by name."""
    found: dict[str, float] = {}
    for value in document.value:
        report = reports.get(value.measure)
        if report is None:
            continue
        if isinstance(value, Ratio | Match):
            found |= _of_cells(value, cases(report))
            continue
        number = _stall(value, report) if isinstance(value, Stall) else _end_to_end(value, report)
        if number is not None:
            found[_named(value.name, value.key)] = number
    return found


def _named(name: str, *keys: str) -> str:
    words = ", ".join(key for key in keys if key)
    return f"{name}[{words}]" if words else name


def _of_cells(value: Ratio | Match, everything: Sequence[Case]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for cell in dict.fromkeys(case.cell for case in everything):
        if value.cells and cell not in value.cells:
            continue
        own = [case for case in everything if case.cell == cell]
        number = _time(value, own) if isinstance(value, Ratio) else _match(value, own)
        if number is not None:
            numbers[cell] = number
    if value.pick:
        return {_named(value.name, value.key): PICKS[value.pick](numbers.values())} if numbers else {}
    single = len(value.cells) == 1
    return {_named(value.name, value.key, "" if single else cell): number for cell, number in numbers.items()}


def _time(value: Ratio, own: Iterable[Case]) -> float | None:
    time = (value.clock, value.statistic)

    def least(words: str) -> float | None:
        return min((case.us[time] for case in own if case.fits(words) and time in case.us), default=None)

    of = least(value.of)
    if not value.over or of is None:
        return of
    over = least(value.over)
    return None if over is None else over / of


def _match(value: Match, own: Iterable[Case]) -> float | None:
    out = next((case.out for case in own if case.fits(value.of)), None)
    if out is None:
        return None
    if value.kind == "error over floor":
        return out.over_floor
    matches = out.against_baseline if value.kind == "match" else out.against_oracle
    return next((one.match_pct for one in matches if one.tolerance == value.tolerance), None)


def _stall(value: Stall, report: Report) -> float | None:
    assert isinstance(report, StallReport)
    own = [kernel for kernel in report.kernels if kernel.implementation == value.of]
    if not own:
        return None
    kernel = max(own, key=lambda one: one.duration_us or 0)
    if value.resource:
        found: float | None = getattr(kernel, value.resource)
        return found
    return _share(value, kernel)


def _share(value: Stall, kernel: KernelStalls) -> float | None:
    """None if no warp was sampled, or if the kernel's source has other stages."""
    counted = [stage for stage in kernel.stages if stage not in kernel.idle]
    inside = [stage for stage in counted if _within(stage, value.stages or (stage,), value.without)]
    if not kernel.busy_samples or not inside:
        return None
    samples = sum(
        count
        for stage in inside
        for reason, count in kernel.stages[stage].items()
        if not value.reasons or reason in value.reasons
    )
    return 100 * samples / kernel.busy_samples


def _within(stage: str, names: Iterable[str], without: Iterable[str]) -> bool:
    def is_part(of: str) -> bool:
        return stage == of or stage.startswith(f"{of}.")

    return any(map(is_part, names)) and not any(map(is_part, without))


def _end_to_end(value: EndToEnd, report: Report) -> float | None:
    assert isinstance(report, PrefillReport)
    cases = {
        case.implementation: case
        for length in report.prefill.lengths
        for case in length.cases
        if (length.seqlen, case.surroundings) == (value.seqlen, value.surroundings)
    }
    of, over = cases.get(value.of), cases.get(value.over)
    if of is None or of.call is None:
        return None
    if value.over:
        return 100 * (over.call.median_us / of.call.median_us - 1) if over and over.call else None
    if value.part == "call":
        return of.call.median_us / 1e3
    if not of.parts:
        return None
    if value.part == "operator":
        return of.part_us("operator") / 1e3
    return None if of.idle_us is None else 100 * of.idle_us / of.call.median_us
