"""The report on a terminal.  Tables that are wider than it are split, never cut."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from ssdprof.core.words import MISSING
from ssdprof.report.table import Document, Section, Table, VerdictLine, tone

_GAP = 2  # blanks between columns: one of padding, one of the box
_LEAST_WRAPPED = 30  # least width of a text column, if possible
_STYLES = {"good": "green", "bad": "red", "": ""}


def render(document: Document) -> RenderableType:
    """The whole document; the verdict stands before and after its tables."""
    parts: list[RenderableType] = [
        Text(document.title, style="bold"),
        *map(verdict, document.verdict),
    ]
    parts += [origin(document.origin)] if document.origin else []
    if document.caveats:
        parts += ["", Text("Caveats:", style="yellow"), *map(bullet, document.caveats)]
    for section in document.sections:
        parts += _section(section)
    return Group(*parts, "", *map(verdict, document.verdict))


def origin(pairs: Iterable[tuple[str, str]]) -> RenderableType:
    return Text(", ".join(f"{label}: {value}" for label, value in pairs), style="dim")


def verdict(line: VerdictLine) -> RenderableType:
    return Text(line.text, style="bold green" if line.good else "bold red")


def bullet(text: str) -> RenderableType:
    """A list item; further lines are indented."""
    grid = RichTable.grid(padding=(0, 1, 0, 0))
    grid.add_column()
    grid.add_column(overflow="fold")
    grid.add_row("-", Text(text))
    return grid


@dataclass(frozen=True)
class SplitTable:
    """A table, in several parts with the key columns if the console is too narrow."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The title, the parts, the note."""
        if self.table.title:
            yield Text(self.table.title, style="bold")
        parts = [self.table.only(block) for block in _blocks(self.table, options.max_width)]
        for number, part in enumerate(parts):
            if number:
                yield ""
            yield _drawn(
                part, is_part=len(parts) > 1, squeezed=_taken(_widths(part)) > options.max_width
            )
        if self.table.note:
            yield Text(self.table.note, style="dim")


def _section(section: Section) -> Iterator[RenderableType]:
    """The blocks of a section, each after an empty line."""
    for block in section.blocks:
        yield ""
        match block:
            case Table():
                yield SplitTable(block)
            case str():
                yield Text(block, style="dim")
            case _:
                yield from map(bullet, block)


def _drawn(table: Table, *, is_part: bool, squeezed: bool) -> RenderableType:
    """A table as rich draws it.

    is_part: the table is a part of a wider one, and rows without a value in this part are left
    out.  squeezed: every column may wrap.
    """
    rendered = RichTable(
        box=box.SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), show_edge=False, pad_edge=False
    )
    for column, (header, align) in enumerate(zip(table.headers, table.align, strict=True)):
        rigid = column != table.wraps and not squeezed
        rendered.add_column(
            Text(header), justify=align, no_wrap=rigid, overflow="fold", vertical="top"
        )
    for row in table.rows:
        if not is_part or any(cell != MISSING for cell in row[table.keys :]):
            rendered.add_row(*(Text(cell, style=_STYLES[tone(cell)]) for cell in row))
    return rendered


def _blocks(table: Table, width: int) -> list[tuple[int, ...]]:
    """Columns of each part that fits, the keys first.  A split table loses empty columns."""
    widths = _widths(table)
    keys = range(table.keys)
    if _taken(widths) <= width:
        return [tuple(range(len(widths)))]
    room = width - sum(widths[key] + _GAP for key in keys)
    parts: list[list[int]] = [[]]
    for column in table.full():
        if column < table.keys:
            continue
        if parts[-1] and _taken(widths[each] for each in (*parts[-1], column)) > room:
            parts.append([])
        parts[-1].append(column)
    return [(*keys, *part) for part in parts]


def _widths(table: Table) -> list[int]:
    """The width of each column, if only the text column is wrapped."""
    headers = [header.split("\n") for header in table.headers]
    columns = zip(headers, *table.rows, strict=True)
    widths = [max(map(cell_len, (*header, *cells))) for header, *cells in columns]
    if table.wraps is not None:
        widths[table.wraps] = min(widths[table.wraps], _LEAST_WRAPPED)
    return widths


def _taken(widths: Iterable[int]) -> int:
    return sum(width + _GAP for width in widths) - _GAP
