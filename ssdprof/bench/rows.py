"""The cases of a bench as rows: see `schema.rows`."""

from __future__ import annotations

from ssdprof.bench.schema import BenchCase, BenchCell, BenchReport
from ssdprof.schema.rows import JUDGED, Row, errors


def of_bench(report: BenchReport) -> tuple[Row, ...]:
    return tuple(_row(report, cell, case) for cell in report.cells for case in cell.cases)


def _row(report: BenchReport, cell: BenchCell, case: BenchCase) -> Row:
    return Row(
        where=where(cell),
        tokens=cell.tokens,
        # without the chunk size: each implementation takes its fastest one
        shape=f"{report.operator}, {cell.dims.words}, {cell.dims.dtype}, {cell.layout}",
        implementation=case.implementation,
        variant=case.variant,
        precision=case.precision,
        status=case.status,
        reason=case.reason or case.sloppy,
        gated=case.implementation == JUDGED,
        timing=case.timing,
        speedup=case.over(report.baseline),
        roofline=case.roofline,
        memory=case.memory,
        launches=tuple(kernel.launch for kernel in case.kernels),
        out=errors(case.accuracy, "out"),
        final_states=errors(case.accuracy, "final_states"),
    )


def where(cell: BenchCell) -> str:
    """ "mamba2-2.7b, bf16"; layouts and draws other than the defaults are named."""
    views = ("views",) if cell.layout == "views" else ()
    return ", ".join((cell.shape, cell.dims.dtype, *views, *cell.drawn))
