"""What the tables of a bench have in common: which cells share one, and how cases are named in it."""

from __future__ import annotations

from collections.abc import Iterator

from ssdprof.bench.schema import BenchCell, BenchReport

MOST_ROWS = 50  # of a table, so that no renderer cuts it


def grouped(report: BenchReport) -> Iterator[tuple[str, list[BenchCell]]]:
    """Cells of one shape, dtype, draw and layout, under these in words, in the order in which they ran."""
    found: dict[str, list[BenchCell]] = {}
    for cell in report.cells:
        dims = cell.dims
        inputs = ", ".join((dims.dtype, *cell.drawn, f"{cell.layout} inputs"))
        found.setdefault(f"{cell.shape} ({cell.sizes}), {inputs}", []).append(cell)
    yield from found.items()
