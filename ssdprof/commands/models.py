"""`ssdprof models`: the supported model families and their checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from ssdprof.commands import options, terminal

if TYPE_CHECKING:
    from ssdprof.checkpoint.names import Family
    from ssdprof.report.tables import Table


def models(as_json: options.Json = False) -> None:
    """List the supported model families and their published checkpoints.

    Other checkpoints of a listed model type work too.
    """
    from ssdprof.checkpoint.names import FAMILIES

    if as_json:
        terminal.print_json([asdict(row) for row in FAMILIES])
        return
    from ssdprof.report.terminal import SplitTable

    console = terminal.out()
    for row in FAMILIES:
        console.print(SplitTable(_table(row)), "")


def _table(row: Family) -> Table:
    from ssdprof import operators
    from ssdprof.core.words import MISSING
    from ssdprof.report.tables import Table

    outline = operators.outline(row.operator)
    return Table(
        title=f"{row.title}: {outline.title}, model type {row.model_type}",
        headers=("checkpoint", "parameters", "layers", "trained on", "operator's sizes"),
        rows=tuple(
            (
                known.repo,
                f"{known.parameters / 1e9:g} B",
                f"{known.operator_layers} of {known.layers}" if known.operator_layers else "?",
                f"{known.trained_context:,}" if known.trained_context else MISSING,
                outline.words.format(**known.dims) if known.dims else "?",
            )
            for known in row.checkpoints
        ),
        align=("left", "right", "right", "right", "left"),
        note=f"{' or '.join(row.typed)} takes {row.flagship}." if row.typed else "",
    )
