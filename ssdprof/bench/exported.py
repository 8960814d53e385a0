"""A bench in the form that exports read."""

from __future__ import annotations

from collections.abc import Iterator

from ssdprof.bench import gate, render
from ssdprof.bench.rows import of_bench
from ssdprof.bench.schema import BenchReport
from ssdprof.core import words as fmt
from ssdprof.report.exports.exported import Exported

_PLACE = (
    "bench", "operator", "GPU", "shape", "inputs", "sequences x tokens", "tokens", "batch", "dimensions", "chunk size",
)  # fmt: skip


def from_bench(report: BenchReport) -> Exported:
    rows = of_bench(report)
    errors = (*gate.wrong(report), *gate.failed(report))
    passed = sum(row.status == "passed" for row in rows)
    gpu = report.environment.gpu
    return Exported(
        kind="bench",
        identity=f"{report.operator} {report.created}",
        subject=f"{report.operator} on drawn inputs",
        created=report.created,
        ssdprof_version=report.ssdprof_version,
        environment=report.environment,
        gates=report.gates,
        rows=rows,
        place=_PLACE,
        places=tuple(_places(report, gpu.name if gpu else "none")),
        excused=frozenset(
            number for number, row in enumerate(rows) if row.status != "passed" and row.implementation in report.peers
        ),
        passed=not errors,
        broken=gate.broken_gates(report),
        incomplete=_incomplete(report),
        verdict=errors or (f"PASSED: {fmt.plural(passed, 'case')} compared with the fp64 oracle.",),
        errors=errors,
        caveats=tuple(f"{one.cell} was left out: {one.reason}" for one in report.left_out),
        markdown=lambda _limit: render.as_markdown(report),
    )


def _places(report: BenchReport, gpu: str) -> Iterator[tuple[object, ...]]:
    for cell in report.cells:
        inputs = ", ".join((cell.dims.dtype, *cell.drawn, cell.layout))
        for case in cell.cases:
            yield (
                report.created,
                report.operator,
                gpu,
                cell.shape,
                inputs,
                cell.tokens,
                cell.dims.seqlen,
                cell.dims.batch,
                str(cell.dims),
                case.chunk_size,
            )


def _incomplete(report: BenchReport) -> str:
    if not report.cells:
        return "Nothing was compared."
    return "" if report.state == "complete" else "this bench did not reach its end"
