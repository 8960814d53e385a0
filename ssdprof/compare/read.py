"""Reads a run, a bench or a prefill result for a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ssdprof import runs
from ssdprof.bench.file import is_bench
from ssdprof.bench.file import read as read_bench
from ssdprof.runs import prefill_file
from ssdprof.schema import CheckpointRef, RunReport
from ssdprof.schema.comparison import Side
from ssdprof.schema.outcome import outcome
from ssdprof.schema.prefill_rows import of_prefill, of_report
from ssdprof.schema.rows import Row, of_answers, of_run
from ssdprof.schema.serving import tokens
from ssdprof.schema.stalls import StallReport


@dataclass(frozen=True, kw_only=True)
class Subject:
    """inputs: the inputs of the cases of a prompt, by `Row.prompt`; empty for a bench, which has a fixed seed, and for
    prefill times, which depend on shapes."""

    side: Side
    rows: tuple[Row, ...]
    inputs: Mapping[str, str] = field(default_factory=dict)
    stalls: StallReport | None = None


def read(where: str) -> Subject:
    """A run's folder or name, its report as JSON, or a result of `ssdprof bench` or `ssdprof prefill --out`.

    Raises BadInputError.
    """
    file = Path(where)
    if file.is_file() and is_bench(file):
        return _bench(file)
    if file.is_file() and prefill_file.is_prefill(file):
        return _prefill(file)
    folder, report = runs.read(where)
    from ssdprof.jobs import stall_files

    return _run(where, report, stall_files.of_run(folder) if not file.is_file() else None)


def _bench(file: Path) -> Subject:
    from ssdprof.bench.rows import of_bench  # torch comes with it

    report = read_bench(file)
    side = Side(
        name=str(file),
        kind="bench",
        created=report.created,
        ssdprof_version=report.ssdprof_version,
        subject=f"{report.operator} on drawn inputs",
        environment=report.environment,
        unfinished="" if report.state == "complete" else "this bench did not reach its end",
    )
    return Subject(side=side, rows=of_bench(report))


def _prefill(file: Path) -> Subject:
    report = prefill_file.read(file)
    side = Side(
        name=str(file),
        kind="prefill",
        created=report.created,
        ssdprof_version=report.ssdprof_version,
        subject=_model(report.checkpoint),
        environment=report.environment,
        unfinished="" if report.state == "complete" else "the command did not reach its end",
    )
    return Subject(side=side, rows=of_report(report))


def _run(where: str, report: RunReport, stalls: StallReport | None) -> Subject:
    model, found = _model(report.checkpoint), outcome(report)
    missing = f"{found.missing} of the requested cases are missing" if found.missing else ""
    side = Side(
        name=where,
        kind="run",
        created=report.created,
        ssdprof_version=report.ssdprof_version,
        subject=model,
        environment=report.environment,
        unfinished=found.broken_off or missing,
    )
    inputs = {
        tokens(prompt.seqlen, prompt.batch): f"{model}, prompt {prompt.token_sha256[:16]}" for prompt in report.prompts
    }
    prefills = of_prefill(report.prefill, report.checkpoint, report.environment) if report.prefill else ()
    return Subject(side=side, rows=(*of_run(report), *of_answers(report), *prefills), inputs=inputs, stalls=stalls)


def _model(checkpoint: CheckpointRef) -> str:
    return f"{checkpoint.repo_id}{f'@{checkpoint.revision[:12]}' if checkpoint.revision else ''}"
