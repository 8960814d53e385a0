"""The document of `ssdprof tune`."""

from __future__ import annotations

from collections.abc import Sequence

from ssdprof.core import words as fmt
from ssdprof.core.base import grouped
from ssdprof.core.case import Case
from ssdprof.core.report import Report
from ssdprof.core.tuned import PlannedSearches
from ssdprof.report.table import Column, Document, Table, section, strings, table, text

_MOST_ROWS = 12  # of the candidates that were timed, the fastest
_READING = (
    "Device: the time on the GPU alone, replayed from a CUDA graph.  Ratio: the committed configuration's time over "
    "the candidate's, sampled in turns, with its 95 % interval.  A configuration that is kept was compared with the "
    "fp64 oracle on the timed inputs, and is more than 1 % faster with 95 % confidence."
)


def compose(report: Report) -> Document:
    """All searches, then what they found."""
    searches = grouped(report.cases, lambda case: (case.place, case.precision)).values()
    left = (f"{one.place}: left out: {one.reason}." for one in report.left_out)
    return Document(
        title=f"ssdprof tune: {report.subject}",
        name="tune",
        version=report.ssdprof_version,
        sections=(
            section("Searches", *(_search(report, own) for own in searches), (*report.remarks, *left), _READING),
        ),
    )


def candidates(searches: PlannedSearches) -> Table | None:
    """The table of a dry run."""
    rows = ((search, "; ".join(found) or "none") for search, found in searches.items())
    title = "Candidates, by what they change in the committed configuration"
    return strings(title, ("search", "candidates"), rows, "ll", wraps=1)


def _search(report: Report, cases: Sequence[Case]) -> Table | None:
    committed = next(one for one in cases if one.implementation == report.baseline)
    timed = sorted((one for one in cases if one.device_us), key=lambda one: one.device_us or (0.0,))
    shown = [one for place, one in enumerate(timed) if place < _MOST_ROWS or one is committed]

    def verdict(case: Case) -> str:
        said = "" if case is committed and case.device_us else report.faster(case) or case.result
        return f"{said}: {case.why}" if case.why else said

    return table(
        f"{committed.place}, {committed.precision.intermediates}: {committed.variant} kernel",
        (
            text("candidate", lambda case: case.implementation),
            Column("device", lambda case: fmt.duration(case.device_us.value if case.device_us else None)),
            Column("ratio", lambda case: fmt.speedup(report.speedup(case))),
            text("verdict", verdict, wraps=True),
        ),
        (*shown, *(one for one in cases if not one.device_us)),
        note=f"Committed: {committed.plan}.  {len(cases)} tried.",
    )
