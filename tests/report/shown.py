"""Helpers for tests of reports: what a renderer printed, and cells of tables."""

import io
from typing import Any

from rich.console import Console, RenderableType

from ssdprof.report.table import Table


def printed(renderable: RenderableType, width: int = 100, **options: Any) -> str:
    file = io.StringIO()
    Console(file=file, width=width, highlight=False, **options).print(renderable)
    return file.getvalue()


def row(table: Table, *keys: str) -> dict[str, str]:
    """Header on one line -> cell, of the row that begins with the keys."""
    (cells,) = [cells for cells in table.rows if cells[: len(keys)] == keys]
    return {
        header.replace("\n", " "): cell for header, cell in zip(table.headers, cells, strict=True)
    }
