"""How the tables of a bench group cells."""

from __future__ import annotations

from collections.abc import Iterator

from ssdprof.bench.schema import BenchCell, BenchReport

MOST_ROWS = 50  # of a table, so that no renderer cuts it


def grouped(report: BenchReport) -> Iterator[tuple[str, list[BenchCell]]]:
    """(title, cells) for each shape, dtype, draw and layout, in the order in which they ran."""
    found: dict[str, list[BenchCell]] = {}
    for cell in report.cells:
        dims = cell.dims
        inputs = ", ".join((dims.dtype, *cell.drawn, f"{cell.layout} inputs"))
        found.setdefault(f"{cell.shape} ({cell.sizes}), {inputs}", []).append(cell)
    yield from found.items()
