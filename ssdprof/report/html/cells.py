"""Tables of a page: the appearance of cells, and their sort keys."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ssdprof.report.tables import Table

_UNITS = {
    "µs": 1.0, "ms": 1e3, "s": 1e6,
    "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
}  # fmt: skip
_NUMBER = re.compile(r"<?(-?[\d,]*\.?\d+(?:e[+-]?\d+)?)(?:\s*([A-Za-zµ%]+))?(?:\s*\[.*\])?$")
_TONES = {
    "faster": "good", "passed": "good", "yes": "good", "ok": "good",
    "slower": "bad", "inaccurate": "bad", "nonfinite": "bad", "failed": "bad", "out of memory": "bad",
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """key: the sort key; empty: the text.  tone: "good", "bad" or none."""

    text: str
    key: str
    align: str
    tone: str


@dataclass(frozen=True)
class Row:
    cells: tuple[Cell, ...]
    heading: bool


@dataclass(frozen=True)
class View:
    """grouped: rows are under headings and keep their order.  sortable: not grouped, and a cell has a number."""

    title: str
    headers: tuple[tuple[str, str], ...]  # text, alignment
    rows: tuple[Row, ...]
    note: str
    grouped: bool
    sortable: bool


def view(table: Table, section: str = "") -> View:
    """The table, without its title if the section has the same title."""
    rows = tuple(Row(_cells(table, row), index in table.headings) for index, row in enumerate(table.rows))
    grouped = bool(table.headings)
    return View(
        title="" if table.title == section else table.title,
        headers=tuple(
            (" ".join(header.split()), align) for header, align in zip(table.headers, table.align, strict=True)
        ),
        rows=rows,
        note=table.note,
        grouped=grouped,
        sortable=not grouped and len(rows) > 1 and any(cell.key for row in rows for cell in row.cells),
    )


def _cells(table: Table, row: tuple[str, ...]) -> tuple[Cell, ...]:
    return tuple(Cell(text, sort_key(text), align, tone(text)) for text, align in zip(row, table.align, strict=True))


def sort_key(text: str) -> str:
    """The number at the start of a cell, in its smallest unit, if there is one: "12.4 ms" -> "12400.0"."""
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        return ""
    return repr(float(found[1].replace(",", "")) * _UNITS.get(found[2] or "", 1.0))


def tone(text: str) -> str:
    return "bad" if text.startswith("NO") else _TONES.get(text, "")
