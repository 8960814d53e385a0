"""`ssdprof doctor`: what this machine can do."""

from __future__ import annotations

from ssdprof.commands import options, terminal

STYLES = {"ok": "green", "warn": "yellow", "missing": "red"}


def doctor(as_json: options.Json = False) -> None:
    """Check what this machine can do, and name what is missing.

    Without a GPU, everything works except timing.
    """
    from rich.table import Table
    from rich.text import Text

    from ssdprof.environment import doctor

    checks = doctor.doctor()
    if as_json:
        terminal.print_json([check.model_dump() for check in checks])
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        hint = f"  {check.hint}" if check.hint else ""
        table.add_row(Text(check.status, style=STYLES[check.status]), check.name, Text(f"{check.detail}{hint}"))
    terminal.out().print(table)
