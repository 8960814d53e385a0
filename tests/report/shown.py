"""Helpers for tests of reports: what a renderer printed, and cells of tables."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console, RenderableType

from ssdprof.report.table import Table


def printed(renderable: RenderableType, width: int = 100, **options: Any) -> str:
    file = io.StringIO()
    Console(file=file, width=width, highlight=False, **options).print(renderable)
    return file.getvalue()


def there(found: Table | None) -> Table:
    assert found is not None
    return found


def row(table: Table | None, *keys: str) -> dict[str, str]:
    """Header on one line -> cell, of the row that begins with the keys."""
    found = there(table)
    (cells,) = [cells for cells in found.rows if cells[: len(keys)] == keys]
    return {
        header.replace("\n", " "): cell for header, cell in zip(found.headers, cells, strict=True)
    }
