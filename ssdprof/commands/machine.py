"""`ssdprof doctor`: what this machine can do."""

from __future__ import annotations

from rich.table import Table as RichTable
from rich.text import Text

from ssdprof import operators
from ssdprof.commands import terminal
from ssdprof.environment import doctor as machine

STYLES = {"ok": "green", "warn": "yellow", "missing": "red"}


def doctor(*, as_json: bool) -> None:
    """A line for each requirement; absent libraries say which implementations need them."""
    names: dict[str, list[str]] = {}
    for operator in operators.records():
        for name, library in operator.libraries.items():
            if library.package:
                names.setdefault(library.package, []).append(name)
    checks = (*machine.doctor(), machine.libraries(names))
    if as_json:
        terminal.print_json([check.model_dump() for check in checks])
        return
    table = RichTable(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        hint = f"  {check.hint}" if check.hint else ""
        table.add_row(
            Text(check.status, style=STYLES[check.status]),
            check.name,
            Text(f"{check.detail}{hint}"),
        )
    terminal.out().print(table)
