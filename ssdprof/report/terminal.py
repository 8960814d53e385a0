"""The report on a terminal.  Tables that are wider than it are split, never cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from ssdprof.core.words import MISSING
from ssdprof.report.table import Document, Section, Table, VerdictLine, tone

WHOLE_REPORT = "ssdprof export --format markdown"
_GAP = 2  # blanks between columns: one of padding, one of the box
_LEAST_WRAPPED = 30  # least width of a text column, if possible
_MOST_ROWS = 60  # of a table with one row per case
_STYLES = {"good": "green", "bad": "red", "": ""}


def render(
    document: Document, *, rest: str = WHOLE_REPORT, verdict_last: bool = False
) -> RenderableType:
    """The whole document.

    rest: the command that shows all rows of a long table.  verdict_last: repeat the verdict at the
    end.
    """
    parts: list[RenderableType] = [
        Text(document.title, style="bold"),
        *map(verdict, document.verdict),
    ]
    parts += [origin(document.origin)] if document.origin else []
    if document.caveats:
        parts += ["", Text("Caveats:", style="yellow"), *map(bullet, document.caveats)]
    for section in document.sections:
        parts += _section(section, rest)
    return Group(*parts, *(["", *map(verdict, document.verdict)] if verdict_last else []))


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
    """A table that is split into several if the console is too narrow, each with the key columns.

    rest: the command that shows all rows of a long table.
    """

    table: Table
    rest: str = WHOLE_REPORT

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The title, the parts, the note."""
        yield Text(self.table.title, style="bold")
        parts = [self.table.only(block) for block in _blocks(self.table, options.max_width)]
        for number, part in enumerate(parts):
            if number:
                yield ""
            yield _drawn(
                part, is_part=len(parts) > 1, squeezed=_taken(_widths(part)) > options.max_width
            )
        if (hidden := len(self.table.rows) - _MOST_ROWS) > 0:
            yield Text(f"{hidden:,} more rows: {self.rest}", style="dim")
        if self.table.note:
            yield Text(self.table.note, style="dim")


def _section(section: Section, rest: str) -> Iterator[RenderableType]:
    for block in section.blocks:
        yield ""
        match block:
            case Table():
                yield SplitTable(block, rest)
            case str():
                yield Text(block, style="dim")
            case _:
                yield from map(bullet, block)


def _drawn(table: Table, *, is_part: bool, squeezed: bool) -> RenderableType:
    """is_part: of a table, without empty rows.  squeezed: every column may wrap."""
    rendered = RichTable(
        box=box.SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), show_edge=False, pad_edge=False
    )
    for column, (header, align) in enumerate(zip(table.headers, table.align, strict=True)):
        rigid = column != table.wraps and not squeezed
        rendered.add_column(
            Text(header), justify=align, no_wrap=rigid, overflow="fold", vertical="top"
        )
    for row in table.rows[:_MOST_ROWS]:
        if not is_part or any(cell != MISSING for cell in row[table.keys :]):
            rendered.add_row(*(Text(cell, style=_STYLES[tone(cell)]) for cell in row))
    return rendered


def _blocks(table: Table, width: int) -> list[tuple[int, ...]]:
    """Columns of each part: the fewest parts that fit, of similar widths.  A split table loses
    empty columns.
    """
    widths = _widths(table)
    whole, keys = tuple(range(len(widths))), tuple(range(table.keys))
    rest = [column for column in table.full() if column >= table.keys]

    def taken(block: Sequence[int]) -> int:
        return _taken(widths[column] for column in block)

    def fits(block: Sequence[int]) -> bool:
        return len(block) == len(keys) + 1 or taken(block) <= width

    if taken(whole) <= width:
        return [whole]
    for parts in range(1, len(rest) + 1):
        cuts = combinations(range(1, len(rest)), parts - 1)
        splits = (_split(keys, rest, borders) for borders in cuts)
        if possible := [split for split in splits if all(map(fits, split))]:
            return min(possible, key=lambda split: max(map(taken, split)))
    return [keys]


def _split(
    keys: Sequence[int], rest: Sequence[int], borders: Sequence[int]
) -> list[tuple[int, ...]]:
    """The other columns cut at the borders, each part behind the keys."""
    edges = (0, *borders, len(rest))
    return [(*keys, *rest[low:high]) for low, high in pairwise(edges)]


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
