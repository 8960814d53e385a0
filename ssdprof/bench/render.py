"""The report of a bench for a terminal and as Markdown."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from ssdprof.bench.schema import BenchReport
from ssdprof.bench.tables import READING, tables
from ssdprof.report import markdown
from ssdprof.report.terminal import SplitTable


def terminal(report: BenchReport) -> RenderableType:
    """All tables, and a note that explains them."""
    parts: list[RenderableType] = []
    for table in tables(report):
        parts += [SplitTable(table, rest="--markdown"), ""]
    return Group(*parts, Text(READING, style="dim"))


def as_markdown(report: BenchReport) -> str:
    """The same in GitHub's Markdown."""
    parts = [markdown.draw(table) for table in tables(report)]
    return "\n\n".join([*parts, f"<sub>{markdown.escape(READING)}</sub>"]) + "\n"
