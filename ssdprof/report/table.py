"""The data of a document and its tables, which renderers draw without changing the contents.

A row names its cells by their headings: {"device\ntime": "1.93 ms"}.  `table` lays rows out.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ssdprof.core import words as fmt
from ssdprof.core.base import grouped

PRECISION = "intermediates,\nstates"  # the heading of precisions, in every table
Align = Literal["left", "right"]
Cells = tuple[str, ...]
TableRow = dict[str, str]  # heading -> cell
_GOOD = ("faster", "passed", "yes", "ok")
_BAD = ("missing", "slower", "inaccurate", "nonfinite", "failed", "out of memory")


@dataclass(frozen=True, kw_only=True)
class Table:
    """Strings in rows; a renderer draws them.

    keys: number of leading columns that identify a row; they are repeated if a wide table is split.
    wraps: index of the column whose text may run over several lines.
    A header may hold line breaks.
    """

    title: str
    headers: Cells
    rows: tuple[Cells, ...]
    align: tuple[Align, ...]
    note: str = ""
    keys: int = 1
    wraps: int | None = None

    def __bool__(self) -> bool:
        """Whether it has rows: sections leave out a table without any."""
        return bool(self.rows)

    def only(self, columns: Iterable[int]) -> Table:
        """The table with these columns alone."""
        kept = tuple(columns)
        headers, *rows = (
            tuple(cells[column] for column in kept) for cells in (self.headers, *self.rows)
        )
        align = tuple(self.align[column] for column in kept)
        wraps = kept.index(self.wraps) if self.wraps in kept else None
        return replace(self, headers=headers, rows=tuple(rows), align=align, wraps=wraps)

    def without(self, header: str) -> Table:
        return self.only(column for column, own in enumerate(self.headers) if own != header)

    def without_empty_columns(self) -> Table:
        return self.only(self.full())

    def full(self) -> list[int]:
        """The columns that are not empty."""
        columns = enumerate(zip(*self.rows, strict=True))
        return [number for number, cells in columns if any(map(is_filled, cells))]


def is_filled(cell: str) -> bool:
    return cell not in ("", fmt.MISSING)


def table(
    title: str,
    rows: Iterable[TableRow],
    words: Container[str],
    *,
    keys: int = 1,
    wraps: str = "",
    note: str = "",
) -> Table:
    """A table of rows.

    The row with the most cells has all headings in their order; a dash is where another row lacks
    one.  words: headings of columns of text, which begin at the left; numbers end at the right.
    wraps: the heading of a text that may run over several lines.
    """
    listed = list(rows)
    fullest: TableRow = max(listed, key=len, default={})
    headings = list(fullest)
    texts = [column for column, heading in enumerate(headings) if heading in words]
    cells = [tuple(row.get(heading, fmt.MISSING) for heading in headings) for row in listed]
    column = headings.index(wraps) if wraps in headings else None
    return strings(title, headings, cells, texts, keys=keys, wraps=column, note=note)


def strings(
    title: str,
    headers: Sequence[str],
    rows: Iterable[Cells],
    texts: Container[int] = (0,),
    **fields: Any,
) -> Table:
    """A table of columns whose headers may be equal.

    texts: the numbers of the columns of text.  fields: others of a table.
    """
    align: list[Align] = ["left" if column in texts else "right" for column in range(len(headers))]
    return Table(
        title=title, headers=tuple(headers), rows=tuple(rows), align=tuple(align), **fields
    )


def tone(cell: str) -> str:
    """ "good", "bad" or none: for its colour."""
    if cell.startswith("NO") or cell in _BAD:
        return "bad"
    return "good" if cell in _GOOD else ""


def fold_precisions(rows: Iterable[TableRow]) -> list[TableRow]:
    """Rows that differ only in their precision become one: "exact, fp32/fp16; relaxed, bf16", or
    "all 6 precisions" if no row with the same cells before the precision has another one.
    """
    unfolded = list(rows)

    def before(row: TableRow) -> Cells:
        cells = tuple(row.values())
        return cells[: list(row).index(PRECISION)]

    known = grouped(unfolded, before)
    folded = []
    for equal in grouped(unfolded, _other_cells).values():
        precisions = [row[PRECISION] for row in equal]
        every = {row[PRECISION] for row in known[before(equal[0])]}
        if len(precisions) > 1 and set(precisions) == every:
            words = f"all {len(precisions)} precisions"
        else:
            words = _precision_words(precisions)
        folded.append(equal[0] | {PRECISION: words})
    return folded


def _other_cells(row: TableRow) -> tuple[tuple[str, str], ...]:
    return tuple(item for item in row.items() if item[0] != PRECISION)


def _precision_words(precisions: Iterable[str]) -> str:
    """The states of each kind of intermediates: "exact, fp32/fp16; relaxed, bf16"."""
    states: dict[str, list[str]] = {}
    for precision in filter(None, precisions):
        intermediates, _, dtype = precision.partition(", ")
        states.setdefault(intermediates, []).append(dtype)
    return "; ".join(f"{kind}, {'/'.join(dtypes)}" for kind, dtypes in states.items())


def facts(title: str, headers: tuple[str, str], rows: Iterable[tuple[str, str]]) -> Table:
    """Names and values; those without a value are left out."""
    return strings(title, headers, (row for row in rows if row[1]), (0, 1), wraps=1)


class VerdictLine(NamedTuple):
    """A sentence of the verdict.  good: it says nothing bad."""

    text: str
    good: bool = True


# a text explains the table above it, a tuple is a list of sentences
Content = Table | str | tuple[str, ...]
Picture = tuple[str, str, Table]  # title, SVG, its numbers


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a document.

    folded: it is a detail, which a page folds.  On a page, pictures: before the blocks; level: of
    its heading.
    """

    title: str
    blocks: tuple[Content, ...]
    folded: bool = False
    pictures: tuple[Picture, ...] = ()
    level: int = 2


def section(title: str, *blocks: Content, reading: str = "", folded: bool = False) -> Section:
    """A section of the blocks that are not empty.  reading: explains the blocks, if there are
    any.
    """
    contents = tuple(block for block in blocks if block)
    if contents and reading:
        contents = (*contents, reading)
    return Section(title=title, blocks=contents, folded=folded)


@dataclass(frozen=True, kw_only=True)
class Document:
    """A report as it is shown, on any medium.

    origin: (label, value) pairs shown before all numbers.  Sections without blocks are left out.
    """

    title: str
    version: str = ""  # of ssdprof
    origin: tuple[tuple[str, str], ...] = ()
    verdict: tuple[VerdictLine, ...] = ()
    caveats: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()

    def __post_init__(self) -> None:
        filled = tuple(section for section in self.sections if section.blocks)
        object.__setattr__(self, "sections", filled)


def shortened(items: Sequence[str], most: int) -> str:
    """ "a; b; and 3 cases more"."""
    more = len(items) - most
    rest = [f"and {fmt.plural(more, 'case')} more"] if more > 0 else []
    return "; ".join([*items[:most], *rest])
