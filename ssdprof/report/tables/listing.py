"""The runs in a folder."""

from __future__ import annotations

from collections.abc import Sequence

from ssdprof.core import words as fmt
from ssdprof.report.origin import when
from ssdprof.report.tables.table import Table
from ssdprof.schema.listing import ListedRun


def runs(found: Sequence[ListedRun]) -> Table:
    """A row for each run."""
    unreadable = [f"{run.name}: {run.reason}" for run in found if run.verdict == "unreadable"]
    return Table(
        title="Runs",
        headers=("run", "started", "model", "tokens", "GPU", "verdict"),
        rows=tuple(_row(run) for run in found),
        align=("left", "left", "left", "right", "left", "left"),
        note="  ".join(unreadable),
    )


def _row(run: ListedRun) -> tuple[str, ...]:
    if run.verdict == "unreadable":
        return (run.name, *[fmt.MISSING] * 4, run.verdict)
    return (
        run.name,
        when(run.created),
        f"{run.model}, random weights" if run.random_weights else run.model,
        ", ".join(fmt.count(seqlen) for seqlen in run.seqlens),
        run.gpu or "none",
        f"{run.verdict}, partial" if run.state == "partial" else run.verdict,
    )
