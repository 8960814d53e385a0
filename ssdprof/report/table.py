"""The data of a document and its tables, which renderers draw without changing the contents.

A column is a header and a function of a row's item: a case, a series of cases, or a pair of two
reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from ssdprof.core import words as fmt
from ssdprof.core.base import grouped

T = TypeVar("T")
Part = TypeVar("Part")
Align = Literal["left", "right"]
Row = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Strings in rows; a renderer draws them.

    keys: number of leading columns that identify a row; they are repeated if a wide table is split.
    wraps: index of the column whose text may run over several lines.
    A header may hold line breaks.
    """

    title: str
    headers: Row
    rows: tuple[Row, ...]
    align: tuple[Align, ...]
    note: str = ""
    keys: int = 1
    wraps: int | None = None

    def __post_init__(self) -> None:
        if len(self.align) != len(self.headers) or any(
            len(row) != len(self.headers) for row in self.rows
        ):
            raise ValueError(
                f"{self.title!r}: every row must have {len(self.headers)} cells, as the header has"
            )

    def only(self, columns: Iterable[int]) -> Table:
        """With some of its columns."""
        kept = tuple(columns)
        headers, *rows = (
            tuple(cells[column] for column in kept) for cells in (self.headers, *self.rows)
        )
        align = tuple(self.align[column] for column in kept)
        wraps = kept.index(self.wraps) if self.wraps in kept else None
        return replace(self, headers=headers, rows=tuple(rows), align=align, wraps=wraps)

    def full(self) -> list[int]:
        """The columns that are not empty."""
        columns = enumerate(zip(*self.rows, strict=True))
        return [
            number
            for number, cells in columns
            if any(cell not in ("", fmt.MISSING) for cell in cells)
        ]


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
    return strings(
        title, [column.header for column in columns], rows, sides, keys=keys, wraps=wraps, note=note
    )


def strings(
    title: str, headers: Sequence[str], rows: Iterable[Row], align: str, **fields: Any
) -> Table | None:
    """A table of given cells; None without rows.  align: a letter for each column, such as "llrr".
    fields: others of a table.
    """
    found = tuple(rows)
    if not found:
        return None
    return Table(title=title, headers=tuple(headers), rows=found, align=aligned(align), **fields)


def filled(found: Table | None) -> Table | None:
    """The table without its empty columns."""
    return found and found.only(found.full())


def tone(cell: str) -> str:
    """ "good", "bad" or none: for its colour."""
    if cell.startswith("NO") or cell in (
        "slower",
        "inaccurate",
        "nonfinite",
        "failed",
        "out of memory",
    ):
        return "bad"
    return "good" if cell in ("faster", "passed", "yes", "ok") else ""


def aligned(letters: str) -> tuple[Align, ...]:
    """ "lr" -> ("left", "right")."""
    return tuple("left" if letter == "l" else "right" for letter in letters)


def folded(rows: Iterable[Row], column: int) -> list[Row]:
    """Rows that differ only in the precision in a column become one: "exact, fp32/fp16; relaxed,
    bf16", or "all 6 precisions" if the rows with the same cells before that column have no other.
    """
    every = list(rows)
    kinds = grouped(every, lambda row: row[:column])
    found = []
    for (before, after), own in grouped(
        every, lambda row: (row[:column], row[column + 1 :])
    ).items():
        cells = [row[column] for row in own]
        each = grouped(cells, lambda cell: cell.partition(", ")[0]).items()
        states = {
            kind: "/".join(cell.removeprefix(f"{kind}, ") for cell in of)
            for kind, of in each
            if kind
        }
        words = "; ".join(f"{kind}, {one}" for kind, one in states.items())
        whole = len(cells) > 1 and set(cells) == {row[column] for row in kinds[before]}
        found.append((*before, f"all {len(cells)} precisions" if whole else words, *after))
    return found


def facts(title: str, headers: tuple[str, str], rows: Iterable[tuple[str, str]]) -> Table | None:
    """Names and values; those without a value are left out."""
    return strings(title, headers, (row for row in rows if row[1]), "ll", wraps=1)


class VerdictLine(NamedTuple):
    """good: it says nothing bad."""

    text: str
    good: bool


# a text explains the table above it, a tuple is a list of sentences
Block = Table | str | tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Section:
    """folded: it is a detail, which a page folds."""

    title: str
    blocks: tuple[Block, ...]
    folded: bool = False


def section(title: str, *blocks: Block | None, reading: str = "", folded: bool = False) -> Section:
    """reading: explains the blocks, if there are any."""
    found = tuple(block for block in blocks if block)
    return Section(
        title=title, blocks=(*found, reading) if found and reading else found, folded=folded
    )


@dataclass(frozen=True, kw_only=True)
class Document:
    """origin: (label, value) pairs shown before all numbers.  Sections without blocks are left
    out.
    """

    title: str
    version: str = ""  # of ssdprof
    origin: tuple[tuple[str, str], ...] = ()
    verdict: tuple[VerdictLine, ...] = ()
    caveats: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sections", tuple(one for one in self.sections if one.blocks))


def shortened(items: Sequence[str], most: int) -> str:
    """ "a; b; and 3 cases more"."""
    more = len(items) - most
    return "; ".join(items[:most]) + (f"; and {fmt.plural(more, 'case')} more" if more > 0 else "")
