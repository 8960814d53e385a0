"""A report as data: a document of sections, and their tables.

The renderers (terminal, HTML, Markdown) decide how the data looks and never change it.  The code
that fills a table writes each row as a dictionary of headings and cells, such as
{"device\ntime": "1.93 ms"}; `table` puts these rows into columns.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ssdprof.core import words as fmt
from ssdprof.core.base import grouped

PRECISION = "intermediates,\nstates"  # the heading of the precision's column in every table
Align = Literal["left", "right"]
Cells = tuple[str, ...]
TableRow = dict[str, str]  # heading -> cell
# cells that renderers colour green and red; see also `tone`
_GOOD = ("faster", "passed", "yes", "ok")
_BAD = ("missing", "slower", "inaccurate", "nonfinite", "failed", "out of memory")


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of strings, which a renderer draws.

    headers: one for each column; a header may contain line breaks.
    align: the alignment of each column.
    note: a sentence that is shown below the table.
    keys: the number of leading columns that identify a row.  On a terminal, a table that is too
        wide is split into parts, and each part repeats these columns.
    wraps: the index of the column whose text may run over several lines on a terminal; None if no
        text may.
    """

    title: str
    headers: Cells
    rows: tuple[Cells, ...]
    align: tuple[Align, ...]
    note: str = ""
    keys: int = 1
    wraps: int | None = None

    def __bool__(self) -> bool:
        """Whether the table has rows.  Sections leave out an empty table."""
        return bool(self.rows)

    def only(self, columns: Iterable[int]) -> Table:
        """The table with these columns alone, in this order.

        columns: indices; those of key columns come first.
        """
        chosen = tuple(columns)
        return replace(
            self,
            headers=tuple(self.headers[column] for column in chosen),
            rows=tuple(tuple(row[column] for column in chosen) for row in self.rows),
            align=tuple(self.align[column] for column in chosen),
            keys=sum(column < self.keys for column in chosen),
            wraps=chosen.index(self.wraps) if self.wraps in chosen else None,
        )

    def without(self, header: str) -> Table:
        return self.only(column for column, name in enumerate(self.headers) if name != header)

    def without_empty_columns(self) -> Table:
        return self.only(self.filled_columns())

    def filled_columns(self) -> list[int]:
        """The indices of the columns in which at least one row has a value."""
        columns = enumerate(zip(*self.rows, strict=True))
        return [column for column, cells in columns if any(map(is_filled, cells))]


def is_filled(cell: str) -> bool:
    return cell not in ("", fmt.MISSING)


def table(
    title: str,
    rows: Iterable[TableRow],
    text_headings: Container[str],
    *,
    keys: int = 1,
    wraps: str = "",
    note: str = "",
) -> Table:
    """A table of rows that name their cells.

    The row with the most cells decides which columns there are and in which order; no other row may
    have a further heading.  A row that lacks one of them has a dash there.

    text_headings: of the columns of text, which are aligned to the left.  All other columns are
        numbers, which are aligned to the right.
    keys, note: as in `Table`.
    wraps: the heading of the column whose text may run over several lines; empty if none may.
    """
    all_rows = list(rows)
    fullest: TableRow = max(all_rows, key=len, default={})
    headings = list(fullest)
    texts = [column for column, heading in enumerate(headings) if heading in text_headings]
    cells = [tuple(row.get(heading, fmt.MISSING) for heading in headings) for row in all_rows]
    wrapped = headings.index(wraps) if wraps in headings else None
    return strings(title, headings, cells, texts, keys=keys, wraps=wrapped, note=note)


def strings(
    title: str,
    headers: Sequence[str],
    rows: Iterable[Cells],
    texts: Container[int] = (0,),
    **fields: Any,
) -> Table:
    """A table of rows that are tuples of cells, for columns whose headers may be equal.

    texts: the indices of the columns of text, which are aligned to the left.
    fields: further fields of `Table`.
    """
    align: list[Align] = ["left" if column in texts else "right" for column in range(len(headers))]
    return Table(
        title=title, headers=tuple(headers), rows=tuple(rows), align=tuple(align), **fields
    )


def tone(cell: str) -> str:
    """How a renderer colours a cell: "good", "bad", or "" for no colour.

    "NO" and "NO: 2/3", of error budgets and self-checks, are bad.
    """
    if cell in _BAD or cell.split(":")[0] == "NO":
        return "bad"
    return "good" if cell in _GOOD else ""


def fold_precisions(rows: Iterable[TableRow]) -> list[TableRow]:
    """The rows, with those that differ only in their precision merged into one.

    The cell of a merged row lists its precisions: "exact, fp32/fp16; relaxed, bf16".  It says "all
    6 precisions" if the merged rows have the precisions of all rows with the same cells before the
    precision.
    """
    all_rows = list(rows)
    same_subject = grouped(all_rows, _cells_before_precision)
    folded = []
    for equal in grouped(all_rows, _other_cells).values():
        precisions = [row[PRECISION] for row in equal]
        of_subject = {row[PRECISION] for row in same_subject[_cells_before_precision(equal[0])]}
        if len(precisions) > 1 and set(precisions) == of_subject:
            words = f"all {len(precisions)} precisions"
        else:
            words = _precision_words(precisions)
        folded.append(equal[0] | {PRECISION: words})
    return folded


def _cells_before_precision(row: TableRow) -> Cells:
    """The cells on the left of the precision, which say what the row is about."""
    cells = tuple(row.values())
    return cells[: list(row).index(PRECISION)]


def _other_cells(row: TableRow) -> tuple[tuple[str, str], ...]:
    """All cells except the precision, with their headings."""
    return tuple((heading, cell) for heading, cell in row.items() if heading != PRECISION)


def _precision_words(precisions: Iterable[str]) -> str:
    """Precisions grouped by their intermediates: "exact, fp32/fp16; relaxed, bf16"."""
    state_dtypes: dict[str, list[str]] = {}
    for precision in filter(None, precisions):
        intermediates, _, state_dtype = precision.partition(", ")
        state_dtypes.setdefault(intermediates, []).append(state_dtype)
    return "; ".join(f"{kind}, {'/'.join(dtypes)}" for kind, dtypes in state_dtypes.items())


def facts(title: str, headers: tuple[str, str], rows: Iterable[tuple[str, str]]) -> Table:
    """A table of names and values.  Names without a value are left out."""
    with_value = ((name, value) for name, value in rows if value)
    return strings(title, headers, with_value, (0, 1), wraps=1)


class VerdictLine(NamedTuple):
    """A sentence of the verdict.  good: whether the sentence is good news, or at least not bad."""

    text: str
    good: bool = True


# A block of a section: a table, a text that explains the table above it, or a list of sentences.
Content = Table | str | tuple[str, ...]
Picture = tuple[str, str, Table]  # its title, the SVG, and the plotted numbers


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a document.

    folded: whether the section is a detail, which HTML and Markdown show only on request.
    pictures: shown before the blocks, on an HTML page only.
    level: the level of the section's heading on an HTML page.
    """

    title: str
    blocks: tuple[Content, ...]
    folded: bool = False
    pictures: tuple[Picture, ...] = ()
    level: int = 2


def section(title: str, *blocks: Content, reading: str = "", folded: bool = False) -> Section:
    """A section of the blocks that are not empty.

    reading: a text after the blocks that explains them; left out if all blocks are empty.
    """
    contents = tuple(block for block in blocks if block)
    if contents and reading:
        contents = (*contents, reading)
    return Section(title=title, blocks=contents, folded=folded)


@dataclass(frozen=True, kw_only=True)
class Document:
    """A report as every renderer shows it.

    origin: (label, value) pairs, shown before the caveats and the sections.
    sections: those without blocks are dropped on construction.
    """

    title: str
    version: str = ""  # of ssdprof; empty where the output does not name it
    origin: tuple[tuple[str, str], ...] = ()
    verdict: tuple[VerdictLine, ...] = ()
    caveats: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()

    def __post_init__(self) -> None:
        filled = tuple(section for section in self.sections if section.blocks)
        object.__setattr__(self, "sections", filled)


def shortened(items: Sequence[str], most: int) -> str:
    """The first `most` items of a list, and the number of the others: "a; b; and 3 more"."""
    shown = list(items[:most])
    left_out = len(items) - len(shown)
    if left_out:
        shown.append(f"and {left_out:,} more")
    return "; ".join(shown)
