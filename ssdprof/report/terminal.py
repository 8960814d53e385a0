"""A document on a terminal.

A table that is wider than the terminal is split into parts, so that no cell is cut.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from ssdprof.report.table import Document, Section, Table, VerdictLine, is_filled, tone

_GAP = 2  # blanks between columns: one of padding, one of the box
_LEAST_WRAPPED = 30  # characters, to which the column that wraps may be narrowed
_STYLES = {"good": "green", "bad": "red", "": ""}  # of cells, by their tone


def render(document: Document) -> RenderableType:
    """The whole document.  The verdict is shown before the tables and again after them."""
    parts: list[RenderableType] = [
        Text(document.title, style="bold"),
        *map(verdict, document.verdict),
    ]
    if document.origin:
        parts.append(origin(document.origin))
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
    """An item of a list.  Lines after the first one are indented."""
    grid = RichTable.grid(padding=(0, 1, 0, 0))
    grid.add_column()
    grid.add_column(overflow="fold")
    grid.add_row("-", Text(text))
    return grid


@dataclass(frozen=True)
class SplitTable:
    """A table that rich can print.

    On a console that is too narrow it has several parts, each of which repeats the key columns.  In
    a part that is still too wide, the text of every cell may run over several lines.
    """

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The title, the parts with empty lines between them, and the note."""
        if self.table.title:
            yield Text(self.table.title, style="bold")
        parts = [self.table.only(columns) for columns in _split(self.table, options.max_width)]
        for number, part in enumerate(parts):
            if number:
                yield ""
            is_too_wide = _total_width(_widths(part)) > options.max_width
            yield _drawn(part, is_part=len(parts) > 1, squeezed=is_too_wide)
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
    """A table of rich.

    is_part: whether the table is a part of a wider one.  Rows that have no value in the part's
        columns, apart from the key columns, are left out.
    squeezed: whether every column may wrap, because even this part is too wide.
    """
    rendered = RichTable(
        box=box.SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), show_edge=False, pad_edge=False
    )
    for column, (header, align) in enumerate(zip(table.headers, table.align, strict=True)):
        no_wrap = column != table.wraps and not squeezed
        rendered.add_column(
            Text(header), justify=align, no_wrap=no_wrap, overflow="fold", vertical="top"
        )
    for row in table.rows:
        if not is_part or any(map(is_filled, row[table.keys :])):
            rendered.add_row(*(Text(cell, style=_STYLES[tone(cell)]) for cell in row))
    return rendered


def _split(table: Table, width: int) -> list[tuple[int, ...]]:
    """The columns of each part of a table, chosen so that each part fits into `width` characters.

    A table that fits is its only part.  Otherwise each part begins with the key columns, and empty
    columns are left out.  A column that does not fit beside the key columns is alone with them, in
    a part that is too wide.
    """
    widths = _widths(table)
    keys = range(table.keys)
    if _total_width(widths) <= width:
        return [tuple(range(len(widths)))]
    room = width - sum(widths[key] + _GAP for key in keys)
    parts: list[list[int]] = [[]]
    for column in table.filled_columns():
        if column < table.keys:
            continue
        widened = [*parts[-1], column]
        if parts[-1] and _total_width(widths[number] for number in widened) > room:
            parts.append([column])
        else:
            parts[-1] = widened
    return [(*keys, *part) for part in parts]


def _widths(table: Table) -> list[int]:
    """The width of each column in characters, where the column that wraps is as narrow as it may
    be.
    """
    header_lines = [header.split("\n") for header in table.headers]
    columns = zip(header_lines, *table.rows, strict=True)
    widths = [max(map(cell_len, (*lines, *cells))) for lines, *cells in columns]
    if table.wraps is not None:
        widths[table.wraps] = min(widths[table.wraps], _LEAST_WRAPPED)
    return widths


def _total_width(widths: Iterable[int]) -> int:
    """The width of at least one column, with the gaps between them."""
    return sum(width + _GAP for width in widths) - _GAP
