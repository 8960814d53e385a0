"""`ssdprof doctor`: what this machine can do."""

from __future__ import annotations

from ssdprof import operators
from ssdprof.commands import terminal
from ssdprof.environment import doctor as machine
from ssdprof.report.table import table
from ssdprof.report.terminal import SplitTable


def doctor(*, as_json: bool) -> None:
    """A line for each requirement; absent libraries say which implementations need them."""
    names: dict[str, list[str]] = {}
    for operator in operators.records():
        for name, library in operator.libraries.items():
            if library.package:
                names.setdefault(library.package, []).append(name)
    choices = {operator.title: operator.served for operator in operators.records()}
    checks = (*machine.doctor(), machine.libraries(names), *machine.served(choices))
    if as_json:
        terminal.print_json([check.model_dump() for check in checks])
        return
    rows = [
        {
            "result": check.status,
            "requirement": check.name,
            "detail": "  ".join(filter(None, (check.detail, check.hint))),
        }
        for check in checks
    ]
    words = ("result", "requirement", "detail")
    if shown := table("", rows, words, keys=2, wraps="detail"):
        terminal.out().print(SplitTable(shown))
