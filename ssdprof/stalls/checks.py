"""Self-checks of a stall report, run on every report and shown with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ssdprof.schema.stalls import Launched, SelfCheck  # TODO
from ssdprof.stalls.attribute import Attribution
from ssdprof.stalls.raw import RawKernel, RawReport
from ssdprof.stalls.sources import Sources
from ssdprof.stalls.stages import UNKNOWN

SAMPLE_COUNT = "smsp__pcsamp_sample_count"


def of_kernel(kernel: RawKernel, found: Attribution, sources: Sources) -> tuple[SelfCheck, ...]:
    """Checks of one kernel: sums, and lost samples."""
    count, by_reason = kernel.number(SAMPLE_COUNT), sum(kernel.totals.values())
    by_stage = sum(stage.total for stage in found.stages)
    by_line = sum(line.total for line in found.lines)
    unknown = sum(stage.total for stage in found.stages if stage.name == UNKNOWN)
    return (
        _equal("reasons add up to the samples", by_reason, None if count is None else round(count), kernel.totals),
        _equal("lines add up to the kernel", by_line, by_reason, kernel.points),
        _equal("stages add up to the kernel", by_stage, by_reason, kernel.points),
        _per_reason(kernel),
        _holds("every line has a stage", unknown == 0, f"{unknown:,} samples on lines of unknown stage", kernel.points),
        _holds(
            "the source was recorded",
            not sources.not_recorded,
            f"not in the report: {', '.join(sorted(sources.not_recorded))}",
            kernel.points,
        ),
        _none_dropped(kernel),
    )


def of_reports(reports: Sequence[RawReport], asked: Sequence[Launched] | None) -> tuple[SelfCheck, ...]:
    """Checks of the files, and that only the requested launches were profiled.

    asked: the launches of the call in each report; None for reports made without ssdprof.
    """
    checks = [_whole(report) for report in reports]
    if asked is None:
        detail = "the report does not say which kernels were requested"
        return (*checks, SelfCheck(name="only the wanted launches were profiled", status="not checked", detail=detail))
    for report, launched in zip(reports, asked, strict=True):
        names = Counter(kernel.function for kernel in report.kernels)
        wanted = {launch.kernel for launch in launched.launches}
        missing, foreign = sorted(wanted - set(names)), sorted(set(names) - wanted)
        wrong = [
            *([f"not profiled: {', '.join(missing)}"] if missing else []),
            *([f"not requested: {', '.join(foreign)}"] if foreign else []),
        ]
        if names.total() != launched.launch_count:
            wrong.append(f"{names.total()} launches instead of {launched.launch_count}")
        checks.append(
            SelfCheck(
                name=f"only the wanted launches of {launched.implementation} were profiled",
                status="failed" if wrong else "ok",
                detail="; ".join(wrong) or f"{names.total()} of {launched.launch_count}; compiled before",
            )
        )
    return tuple(checks)


def _whole(report: RawReport) -> SelfCheck:
    name = f"{report.name} is complete"
    if report.whole is None:
        return SelfCheck(name=name, status="not checked", detail="no way to tell")
    if report.whole:
        return SelfCheck(name=name, status="ok", detail="ends at the end of its last block")
    return SelfCheck(name=name, status="failed", detail="does not end at the end of a block")


def _equal(name: str, one: int, other: int | None, collected: object) -> SelfCheck:
    if not collected or other is None:
        return SelfCheck(name=name, status="not checked", detail="not collected")
    missing = f"; {other - one:,} missing" if one != other else ""
    return SelfCheck(name=name, status="ok" if one == other else "failed", detail=f"{one:,} of {other:,}{missing}")


def _holds(name: str, holds: bool, otherwise: str, collected: object) -> SelfCheck:
    if not collected:
        return SelfCheck(name=name, status="not checked", detail="not collected")
    return SelfCheck(name=name, status="ok" if holds else "failed", detail="yes" if holds else otherwise)


def _per_reason(kernel: RawKernel) -> SelfCheck:
    name = "every reason adds up over the lines"
    if not kernel.points or not kernel.totals:
        return SelfCheck(name=name, status="not checked", detail="not collected")
    found = kernel.point_totals
    off = [
        f"{reason} {found[reason]:,} of {count:,}" for reason, count in kernel.totals.items() if found[reason] != count
    ]
    return SelfCheck(
        name=name, status="failed" if off else "ok", detail="; ".join(off) or f"{len(kernel.totals)} reasons"
    )


def _none_dropped(kernel: RawKernel) -> SelfCheck:
    name, dropped = "no sample was dropped", kernel.number("smsp__pcsamp_dropped_bytes")
    if dropped is None:
        return SelfCheck(name=name, status="not checked", detail="not collected")
    return SelfCheck(name=name, status="failed" if dropped else "ok", detail=f"{dropped:,.0f} bytes dropped")
