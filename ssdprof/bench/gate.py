"""The failures for which a bench ends with exit code 1."""

from __future__ import annotations

from ssdprof.bench.rows import of_bench, where
from ssdprof.bench.schema import BenchReport
from ssdprof.schema.gating import Broken, broken


def wrong(report: BenchReport) -> tuple[str, ...]:
    """One sentence for each case of ssdprof's that was refused or wrong, or one sentence if there was none at all.

    Cells that the budget or the memory left out are named in the report and are no failure.
    """
    ours = [(cell, case) for cell in report.cells for case in cell.cases if case.implementation not in report.peers]
    if not ours:
        return ("Nothing was compared.",)
    return tuple(
        f"{where(cell)}, {cell.tokens}: {case.name}: {case.status}: {case.reason}"
        for cell, case in ours
        if case.status != "passed"
    )


def failed(report: BenchReport) -> tuple[str, ...]:
    """One sentence for each row that breaks a gate."""
    return tuple(f"GATE FAILED: {one}" for one in broken_gates(report))


def broken_gates(report: BenchReport) -> tuple[Broken, ...]:
    """The rows that break a gate.  A requested cell without a speedup breaks a minimum speedup too."""
    least = report.gates.min_speedup
    left_out = report.left_out if least is not None else ()
    return (
        *broken(of_bench(report), report.gates),
        *(Broken(gate=f"min-speedup {least:g}", row=one.cell, found=f"left out: {one.reason}") for one in left_out),
    )
