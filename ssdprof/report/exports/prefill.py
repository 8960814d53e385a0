"""Prefill times in the form that exports read."""

from __future__ import annotations

from collections.abc import Iterator

from ssdprof.report import markdown, prefill_document
from ssdprof.report.exports.exported import Exported
from ssdprof.report.tables import prefill as tables
from ssdprof.schema.prefill import PrefillReport
from ssdprof.schema.prefill_rows import broken_gates, of_report

_PLACE = ("prefill", "model", "GPU", "layers", "tokens", "batch", "segment length", "surroundings")


def from_prefill(report: PrefillReport) -> Exported:
    rows, errors = of_report(report), tuple(_errors(report))
    document = prefill_document.compose(report)
    return Exported(
        kind="prefill",
        identity=f"{report.checkpoint.repo_id} {report.created}",
        subject=report.checkpoint.repo_id,
        created=report.created,
        ssdprof_version=report.ssdprof_version,
        environment=report.environment,
        gates=report.gates,
        rows=rows,
        place=_PLACE,
        places=tuple(_places(report)),
        excused=frozenset(number for number, row in enumerate(rows) if row.status == "refused"),
        passed=not errors,
        broken=broken_gates(report),
        incomplete=_incomplete(report),
        verdict=document.verdict,
        errors=errors,
        caveats=(*report.notes, *tables.failures(report.prefill)),
        markdown=lambda _limit: markdown.render_document(document),
    )


def _places(report: PrefillReport) -> Iterator[tuple[object, ...]]:
    found, gpu = report.prefill, report.environment.gpu
    for length in found.lengths:
        for case in length.cases:
            yield (
                report.created,
                report.checkpoint.repo_id,
                gpu.name if gpu else "none",
                found.layers,
                length.seqlen,
                length.batch,
                length.segment_length,
                case.surroundings,
            )


def _errors(report: PrefillReport) -> Iterator[str]:
    if incomplete := _incomplete(report):
        yield incomplete
    for row in of_report(report):
        if row.status not in ("passed", "refused"):
            yield f"{row.name}: {row.status}: {row.reason}"
    for one in broken_gates(report):
        yield f"GATE FAILED: {one}"


def _incomplete(report: PrefillReport) -> str:
    if not report.prefill.lengths:
        return "Nothing was timed."
    return "" if report.state == "complete" else "The command did not reach its end."
