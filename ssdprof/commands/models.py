"""`ssdprof models`: which model families are supported, and what is known of each."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from ssdprof.commands import options, terminal

if TYPE_CHECKING:
    from rich.table import Table

    from ssdprof.checkpoint.families import FamilyRow


def models(as_json: options.Json = False) -> None:
    """List the supported model families and their published checkpoints.

    Other checkpoints of a listed model type work too.
    """
    from ssdprof import operators
    from ssdprof.checkpoint.families import FAMILIES

    if as_json:
        terminal.print_json([asdict(row) for row in FAMILIES])
        return
    console = terminal.out()
    for row in FAMILIES:
        console.print(f"[bold]{row.title}[/bold]  {operators.outline(row.operator).title}, model type {row.model_type}")
        if row.typed:
            console.print(f"  {' or '.join(row.typed)} takes {row.flagship}")
        console.print(_table(row), "")


def _table(row: FamilyRow) -> Table:
    from rich.padding import Padding
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("checkpoint", no_wrap=True, min_width=44)
    for name in ("parameters", "layers", "trained on"):
        table.add_column(name, justify="right")
    table.add_column("operator's sizes")
    for known in row.checkpoints:
        table.add_row(
            known.repo,
            f"{known.parameters / 1e9:g} B",
            f"{known.operator_layers} of {known.layers}" if known.operator_layers else "?",
            f"{known.trained_context:,}" if known.trained_context else "",
            str(known.dims) if known.dims else "?",
        )
    return Padding(table, (0, 0, 0, 2))  # type: ignore[return-value]
