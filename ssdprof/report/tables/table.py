"""The data of a table, which renderers draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Align = Literal["left", "right"]


@dataclass(frozen=True)
class Note:
    """An explanation of the table above it."""

    text: str


@dataclass(frozen=True)
class Figure:
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


def columns(left: int, right: int) -> tuple[Align, ...]:
    """Alignment of a table with text columns followed by number columns."""
    words: list[Align] = ["left"] * left
    numbers: list[Align] = ["right"] * right
    return (*words, *numbers)
