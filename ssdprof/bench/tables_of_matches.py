"""The share of each output that matches another implementation and the fp64 oracle, with the floor."""

from __future__ import annotations

from collections.abc import Iterator

from ssdprof.bench.grouping import MOST_ROWS, grouped
from ssdprof.bench.schema import BenchCell, BenchReport
from ssdprof.core import words as fmt
from ssdprof.report.tables.table import Table, columns
from ssdprof.schema import TOLERANCES, Deviation, TensorAccuracy

_SHOWN = {"out": "output", "final_states": "final states"}


def matches(report: BenchReport) -> Iterator[Table]:
    """A row for each implementation, precision and tensor."""
    for title, cells in grouped(report):
        rows = [row for cell in cells for row in _rows(cell)]
        for first in range(0, len(rows), MOST_ROWS):
            yield _table(f"Matches with {report.matched_with}: {title}", rows[first : first + MOST_ROWS])


def _table(title: str, rows: list[tuple[str, ...]]) -> Table:
    against = ("match", "fp64", "floor")
    return Table(
        title=title,
        headers=(
            "sequences x\ntokens",
            "implementation",
            "intermediates,\nstates",
            "tensor",
            "matched with",
            *(f"{what}\n@ {fmt.tolerance(tolerance)}" for what in against for tolerance in TOLERANCES),
        ),
        rows=tuple(rows),
        align=columns(5, len(against) * len(TOLERANCES)),
        note="Match: share of elements with |a - b| <= t + t |b|, rounded down, against the output in the column "
        "before.  Fp64: the same against the fp64 oracle.  Floor: the oracle itself, rounded, against the oracle.",
        keys=4,
    )


def _rows(cell: BenchCell) -> Iterator[tuple[str, ...]]:
    for case in cell.cases:
        for tensor in case.accuracy:
            against = tensor.vs_baseline
            yield (
                cell.tokens,
                case.kernel,
                case.precision.short,
                _SHOWN[tensor.tensor],
                against.against if against else fmt.MISSING,
                *_cells(tensor),
            )


def _cells(tensor: TensorAccuracy) -> Iterator[str]:
    for deviation in (tensor.vs_baseline, tensor.vs_oracle, tensor.floor):
        for tolerance in TOLERANCES:
            yield fmt.percent(_match_pct(deviation, tolerance))


def _match_pct(deviation: Deviation | None, tolerance: float) -> float | None:
    found = deviation.matches if deviation else ()
    return next((match.match_pct for match in found if match.tolerance == tolerance), None)
