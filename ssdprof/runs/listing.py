"""The runs in a folder of runs."""

from __future__ import annotations

from pathlib import Path

from ssdprof.errors import SsdprofError
from ssdprof.runs.folder import REPORT, read
from ssdprof.schema import RunReport
from ssdprof.schema.listing import ListedRun, RunVerdict
from ssdprof.schema.outcome import outcome


def listed(folder: Path) -> tuple[ListedRun, ...]:
    """The runs directly under `folder`, the newest first, unreadable ones last.  Empty if the folder does not exist."""
    if not folder.is_dir():
        return ()
    found = [_listed(entry) for entry in folder.iterdir() if (entry / REPORT).is_file()]
    return tuple(sorted(found, key=lambda run: (run.created, run.name), reverse=True))


def _listed(folder: Path) -> ListedRun:
    try:
        _, report = read(folder)
    except SsdprofError as error:
        return ListedRun(name=folder.name, verdict="unreadable", reason=error.message)
    gpu = report.environment.gpu
    return ListedRun(
        name=folder.name,
        created=report.created,
        model=report.checkpoint.repo_id,
        random_weights=report.checkpoint.random_weights,
        seqlens=tuple(prompt.seqlen for prompt in report.prompts),
        layers=len(report.captured_layers),
        cases=len(report.cases),
        gpu=gpu.name if gpu else None,
        verdict=_verdict(report),
        state=report.state,
    )


def _verdict(report: RunReport) -> RunVerdict:
    found = outcome(report)
    if found.passed:
        return "passed"
    if found.failed or found.broken or found.answers_failed:
        return "failed"
    return "refused" if found.refused else "incomplete"
