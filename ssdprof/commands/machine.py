"""`ssdprof doctor` and `ssdprof models`: what this machine and this version can do."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table as RichTable
from rich.text import Text

from ssdprof import operators
from ssdprof.checkpoint.names import FAMILIES, Family
from ssdprof.commands import options, terminal
from ssdprof.core.words import MISSING
from ssdprof.environment import doctor as machine
from ssdprof.report.table import Table
from ssdprof.report.terminal import SplitTable

STYLES = {"ok": "green", "warn": "yellow", "missing": "red"}


def doctor(options: options.Doctor) -> None:
    checks = machine.doctor()
    if options.json:
        terminal.print_json([check.model_dump() for check in checks])
        return
    table = RichTable(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        hint = f"  {check.hint}" if check.hint else ""
        table.add_row(Text(check.status, style=STYLES[check.status]), check.name, Text(f"{check.detail}{hint}"))
    terminal.out().print(table)


def models(options: options.Models) -> None:
    if options.json:
        terminal.print_json([asdict(row) for row in FAMILIES])
        return
    for row in FAMILIES:
        terminal.out().print(SplitTable(_table(row)), "")


def _table(row: Family) -> Table:
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
