"""The data of a document and its tables, which renderers draw without changing the contents.

A column is a header and a function of a row's item: a case, a series of cases, or a pair of two reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from ssdprof.core import words as fmt

T = TypeVar("T")
Part = TypeVar("Part")
Align = Literal["left", "right"]
Depth = Literal["main", "detail", "file"]


class Note(NamedTuple):
    """An explanation of the table above it."""

    text: str


class Figure(NamedTuple):
    """A picture next to the document; not shown on a terminal."""

    title: str
    file: str


@dataclass(frozen=True, kw_only=True)
class Table:
    """Strings in rows; a renderer draws them.

    keys: number of leading columns that identify a row; they are repeated if a wide table is split.
    headings: indices of rows that are titles of the rows below; all cells except the first are empty.
    wraps: index of the column whose text may run over several lines.
    A header may hold line breaks.
    """

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: tuple[Align, ...]
    note: str = ""
    keys: int = 1
    headings: frozenset[int] = frozenset()
    wraps: int | None = None

    def __post_init__(self) -> None:
        if len(self.align) != len(self.headers) or any(len(row) != len(self.headers) for row in self.rows):
            raise ValueError(f"{self.title!r}: every row must have {len(self.headers)} cells, as the header has")


class Column(NamedTuple, Generic[T]):
    """of: (item of a row) -> the cell.  wraps: its text may run over several lines."""

    header: str
    of: Callable[[T], str]
    align: Align = "right"
    wraps: bool = False


def text(header: str, of: Callable[[T], str], *, wraps: bool = False) -> Column[T]:
    """A column of words."""
    return Column(header, of, "left", wraps)


def lifted(part: Callable[[T], Part | None], *columns: Column[Part]) -> tuple[Column[T], ...]:
    """Columns of a part of each item: a dash where the item has no such part."""

    def cell(of: Callable[[Part], str]) -> Callable[[T], str]:
        return lambda item: fmt.MISSING if (found := part(item)) is None else of(found)

    return tuple(Column(one.header, cell(one.of), one.align, one.wraps) for one in columns)


def table(
    title: str, columns: Sequence[Column[T]], items: Iterable[T], *, keys: int = 1, note: str = ""
) -> Table | None:
    """A row for each item; None without items."""
    rows = (tuple(column.of(item) for column in columns) for item in items)
    sides = "".join(column.align[0] for column in columns)
    wraps = next((number for number, column in enumerate(columns) if column.wraps), None)
    return strings(title, [column.header for column in columns], rows, sides, keys=keys, wraps=wraps, note=note)


def strings(
    title: str,
    headers: Sequence[str],
    rows: Iterable[tuple[str, ...]],
    align: str,
    *,
    headings: Iterable[int] = (),
    **fields: Any,
) -> Table | None:
    """A table of given cells; None without rows.  align: a letter for each column, such as "llrr".  fields: others of
    a table."""
    found, sides = tuple(rows), aligned(align)
    if not found:
        return None
    return Table(title=title, headers=tuple(headers), rows=found, align=sides, headings=frozenset(headings), **fields)


def aligned(letters: str) -> tuple[Align, ...]:
    """ "lr" -> ("left", "right")."""
    return tuple("left" if letter == "l" else "right" for letter in letters)


def facts(title: str, headers: tuple[str, str], rows: Iterable[tuple[str, str]]) -> Table:
    """Names and values; those without a value are left out."""
    found = tuple((name, value) for name, value in rows if value)
    return Table(title=title, headers=headers, rows=found, align=("left", "left"), wraps=1)


Statement = tuple[str, str]  # the subject of sentences, shown in bold, and the sentences


class VerdictLine(NamedTuple):
    """good: it says nothing bad."""

    text: str
    good: bool


@dataclass(frozen=True, kw_only=True)
class Section:
    """depth: "main" is always visible; "detail" is folded if possible; "file" is too long for a terminal."""

    title: str
    blocks: tuple[Table | Figure | Note | str, ...]
    depth: Depth = "main"


def section(
    title: str, *blocks: Table | Figure | Note | str | None, reading: Note | None = None, depth: Depth = "main"
) -> Section:
    """reading: explains the blocks, if there are any."""
    found = tuple(block for block in blocks if block)
    return Section(title=title, blocks=(*found, reading) if found and reading else found, depth=depth)


@dataclass(frozen=True, kw_only=True)
class Document:
    """origin: (label, value) pairs shown before all numbers.  name: of the report.

    tables_only: on a terminal and in Markdown, the blocks of the sections are all of it.
    """

    title: str
    name: str
    version: str = ""  # of ssdprof
    origin: tuple[tuple[str, str], ...] = ()
    verdict: tuple[VerdictLine, ...] = ()
    summary: tuple[Statement, ...] = ()
    caveats: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()
    tables_only: bool = False


def shortened(items: Sequence[str], most: int, noun: str = "case") -> str:
    """ "a; b; and 3 cases more"."""
    more = len(items) - most
    return "; ".join(items[:most]) + (f"; and {fmt.plural(more, noun)} more" if more > 0 else "")
