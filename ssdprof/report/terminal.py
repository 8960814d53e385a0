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


def render(document: Document, *, rest: str = WHOLE_REPORT, verdict_last: bool = False) -> RenderableType:
    """The whole document.

    rest: the command that shows all rows of a long table.  verdict_last: repeat the verdict at the end.
    """
    parts: list[RenderableType] = [Text(document.title, style="bold"), *map(verdict, document.verdict)]
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
        yield Text(self.table.title, style="bold")
        rows = self.table.rows[:_MOST_ROWS]
        blocks = _blocks(self.table, options.max_width)
        for number, block in enumerate(blocks):
            if number:
                yield ""
            squeezed = _taken(self.table, block) > options.max_width
            yield _drawn(self.table, rows, block, part=len(blocks) > 1, squeezed=squeezed)
        hidden = len(self.table.rows) - len(rows)
        if hidden:
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


def _drawn(
    table: Table, rows: Sequence[tuple[str, ...]], block: Sequence[int], *, part: bool, squeezed: bool
) -> RenderableType:
    """The columns of a block; a part of a table has no empty rows.  squeezed: every column may wrap."""
    drawn = RichTable(box=box.SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), show_edge=False, pad_edge=False)
    for column in block:
        drawn.add_column(
            Text(table.headers[column]),
            justify=table.align[column],
            no_wrap=column != table.wraps and not squeezed,
            overflow="fold",
            vertical="top",
        )
    for row in rows:
        if part and all(row[column] == MISSING for column in block[table.keys :]):
            continue
        drawn.add_row(*(Text(row[column], style=_STYLES[tone(row[column])]) for column in block))
    return drawn


def _blocks(table: Table, width: int) -> list[tuple[int, ...]]:
    """Columns of each part: the fewest parts that fit, of similar widths.  A split table loses empty columns."""
    keys, rest = tuple(range(table.keys)), tuple(range(table.keys, len(table.headers)))
    if _taken(table, (*keys, *rest)) <= width:
        return [(*keys, *rest)]
    rest = tuple(column for column in rest if any(row[column] not in ("", MISSING) for row in table.rows))

    def fits(block: tuple[int, ...]) -> bool:
        return len(block) == table.keys + 1 or _taken(table, block) <= width

    for parts in range(1, len(rest) + 1):
        splits = []
        for cuts in combinations(range(1, len(rest)), parts - 1):
            edges = (0, *cuts, len(rest))
            splits.append([(*keys, *rest[low:high]) for low, high in pairwise(edges)])
        if possible := [split for split in splits if all(map(fits, split))]:
            return min(possible, key=lambda split: max(_taken(table, block) for block in split))
    return [keys]


def _taken(table: Table, block: Sequence[int]) -> int:
    """Width of a block in which only the text column is wrapped."""
    return sum(_width(table, column) + _GAP for column in block) - _GAP


def _width(table: Table, column: int) -> int:
    cells = [*table.headers[column].split("\n"), *(row[column] for row in table.rows)]
    widest = max(cell_len(cell) for cell in cells)
    return min(widest, _LEAST_WRAPPED) if column == table.wraps else widest
