"""BenchReport -> tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ssdprof.bench.grouping import MOST_ROWS, grouped
from ssdprof.bench.schema import BenchCase, BenchCell, BenchReport, Compiled, Kernel
from ssdprof.bench.tables_of_choices import chunk_sizes, relaxed_over_exact
from ssdprof.bench.tables_of_matches import matches
from ssdprof.bench.tables_of_warm import by_warm_clock
from ssdprof.core import words as fmt
from ssdprof.report.tables.run import tuned
from ssdprof.report.tables.table import Table, columns

READING = (
    "Device: the time on the GPU alone, replayed from a CUDA graph.  Call: a Python call on an idle GPU, launches "
    "included.  In brackets: 95 % intervals.  % of roofline: the least time in which this GPU can move the bytes "
    "and do the arithmetic, divided by the device time.  Extra memory: allocated by the call beyond its outputs.  "
    "Error: RMS against the fp64 oracle; its floor is that of the oracle itself, rounded to the output's dtype.  "
    "First call: in this cell, compilation included.  Registers and spills are per thread, shared "
    "memory per block.  Occupancy: share of the warps that an SM can hold.  Compiled in: the slowest compilation of "
    "that name that was not in Triton's cache."
)


def tables(report: BenchReport) -> tuple[Table, ...]:
    """The speedups first, then the details."""
    found = (
        *speedups(report),
        *_details(report),
        *by_warm_clock(report),
        *matches(report),
        *relaxed_over_exact(report),
        *chunk_sizes(report),
        *_behind(report),
    )
    return tuple(table for table in found if table.rows)


def speedups(report: BenchReport) -> Iterator[Table]:
    """`fused` over the baseline: a row for each layout of tokens and precision.

    Cells without the baseline have a table of their own, over `unfused`.
    """
    for title, cells in grouped(report):
        for base in dict.fromkeys((report.baseline, "unfused")):
            rows = [
                (cell.tokens, f"{case.variant} {case.precision.short}".lstrip(), *_compared(case, cell, base))
                for cell in cells
                if baseline_of(cell, report.baseline) == base
                for case in cell.cases
                if case.implementation == "fused"
            ]
            yield Table(
                title=f"Fused over {base}: {title}",
                headers=(
                    "sequences x\ntokens", "fused", "speedup,\ndevice", "verdict,\ndevice", "speedup,\ncall",
                    "verdict,\ncall", "device", "call", f"{base},\ndevice", "% of\nroofline",
                ),
                rows=tuple(rows),
                align=columns(2, 8),
                keys=2,
                note=_counts(cells, base),
            )  # fmt: skip


def baseline_of(cell: BenchCell, wanted: str) -> str:
    """The baseline of `fused` in the cell: `unfused` if that was timed and `wanted` was not, else `wanted`."""
    return wanted if fastest(cell, wanted) or not fastest(cell, "unfused") else "unfused"


def _compared(case: BenchCase, cell: BenchCell, base: str) -> tuple[str, ...]:
    if case.timing is None:
        return (case.status, *[fmt.MISSING] * 7)
    over, baseline = case.over(base), fastest(cell, base)
    return (
        fmt.speedup(over.device_ratio, over.device_interval) if over else fmt.MISSING,
        over.verdict if over else fmt.MISSING,
        fmt.speedup(over.call_ratio, over.call_interval) if over else fmt.MISSING,
        (over and over.call_verdict) or fmt.MISSING,
        fmt.duration(case.timing.device_median_us),
        fmt.duration(case.timing.call_median_us),
        fmt.duration(baseline.timing.device_median_us if baseline and baseline.timing else None),
        _floor(case),
    )


def _counts(cells: Iterable[BenchCell], base: str) -> str:
    found = {over.smallest_difference for cell in cells for case in cell.cases if (over := case.over(base))}
    return fmt.counts(max(found)) if found else ""


def fastest(cell: BenchCell, implementation: str) -> BenchCase | None:
    """The implementation's case with the least device time; None if none was timed."""
    timed = {
        case.timing.device_median_us: case
        for case in cell.cases
        if case.implementation == implementation and case.timing is not None
    }
    return timed[min(timed)] if timed else None


def _details(report: BenchReport) -> Iterator[Table]:
    """Every implementation in every cell."""
    for title, cells in grouped(report):
        rows: list[tuple[str, ...]] = []
        for cell in cells:
            own = [(cell.tokens, *_detail(case)) for case in cell.cases]
            if len(rows) + len(own) > MOST_ROWS:
                yield _detail_table(title, rows)
                rows = []
            rows += own
        yield _detail_table(title, rows)


def _detail_table(title: str, rows: list[tuple[str, ...]]) -> Table:
    return Table(
        title=f"Every implementation: {title}",
        headers=(
            "sequences x\ntokens", "implementation", "intermediates,\nstates", "chunk", "device", "call",
            "% of\nroofline", "extra\nmemory", "error\nof out", "its\nfloor", "first\ncall",
        ),
        rows=tuple(rows),
        align=columns(3, 8),
        keys=3,
    )  # fmt: skip


def _detail(case: BenchCase) -> tuple[str, ...]:
    names = (case.kernel, case.precision.short, fmt.count(case.chunk_size))
    if case.timing is None:
        return (*names, case.status, *[fmt.MISSING] * 6)
    return (
        *names,
        fmt.duration(case.timing.device_median_us),
        fmt.duration(case.timing.call_median_us),
        _floor(case),
        _memory(case),
        fmt.small(case.error.out if case.error else None),
        fmt.small(case.error.out_floor if case.error else None),
        _seconds(case.first_call.seconds if case.first_call else None),
    )


def _behind(report: BenchReport) -> Iterator[Table]:
    yield from _kernels(report)
    remarks = [
        (cell.shape, cell.tokens, case.name, case.status, case.reason or f"outside ssdprof's budget: {case.sloppy}")
        for cell in report.cells
        for case in cell.cases
        if case.reason or case.sloppy
    ]
    yield Table(
        title="Remarks",
        headers=("shape", "sequences x\ntokens", "implementation", "status", "why"),
        rows=tuple(dict.fromkeys(remarks)),
        align=columns(5, 0),
        wraps=4,
    )
    yield Table(
        title="Left out",
        headers=("cell", "why"),
        rows=tuple((one.cell, one.reason) for one in report.left_out),
        align=columns(2, 0),
        wraps=1,
    )
    yield Table(
        title="What ran",
        headers=("what", ""),
        rows=tuple((name, value) for name, value in _facts(report) if value),
        align=columns(2, 0),
        wraps=1,
    )


def _kernels(report: BenchReport) -> Iterator[Table]:
    """Every kernel of a case as it was launched; equal launches share a row, which lists their shapes."""
    used: dict[str, dict[tuple[str, ...], dict[str, None]]] = {}
    compiled: dict[tuple[str, str], float] = {}
    for cell in report.cells:
        for case in cell.cases:
            for kernel in case.kernels:
                shapes = used.setdefault(case.name, {}).setdefault(_resources(kernel), {})
                shapes[f"{cell.shape} {cell.dims.dtype}"] = None
            for one in _compiled(case):
                compiled[case.name, one.kernel] = max(one.seconds, compiled.get((case.name, one.kernel), 0.0))
    for name, kernels in used.items():
        rows = [
            (*resources, _seconds(compiled.get((name, resources[0]))), ", ".join(shapes))
            for resources, shapes in kernels.items()
        ]
        for first in range(0, len(rows), MOST_ROWS):
            yield _kernel_table(name, rows[first : first + MOST_ROWS])


def _kernel_table(name: str, rows: list[tuple[str, ...]]) -> Table:
    return Table(
        title=f"Kernels of {name}",
        headers=(
            "kernel", "warps", "registers", "spills", "shared", "blocks\nper SM", "occupancy", "compiled\nin", "shapes",
        ),
        rows=tuple(rows),
        align=(*columns(1, 7), "left"),
        wraps=8,
    )  # fmt: skip


def _compiled(case: BenchCase) -> Iterator[Compiled]:
    """Kernels compiled in the first calls of the case, at every chunk size."""
    for first in (case.first_call, *(trial.first_call for trial in case.trials)):
        yield from first.compiled if first else ()


def _resources(kernel: Kernel) -> tuple[str, ...]:
    launch, held = kernel.launch, kernel.occupancy
    return (
        launch.kernel,
        str(launch.config.get("num_warps", fmt.MISSING)),
        fmt.count(launch.registers),
        fmt.count(launch.spills),
        fmt.size(launch.shared_bytes),
        fmt.count(held.blocks_per_sm if held else None),
        fmt.percent(held.warps_pct if held else None, 0),
    )


def _facts(report: BenchReport) -> Iterator[tuple[str, str]]:
    gpu, clocks, ceilings = report.environment.gpu, report.clocks, report.ceilings
    if gpu:
        yield "GPU", f"{gpu.name}, {gpu.sm_count} SMs, driver {gpu.driver}, CUDA {gpu.cuda}"
    if report.ranks > 1:
        yield "ranks", f"{report.ranks} processes, each on a GPU of its own, shared the cells"
    if ceilings:
        yield "ceilings", f"copy {ceilings.copy_gb_per_s:,.0f} GB/s, bf16 matmul {ceilings.matmul_tflops:,.0f} TFLOP/s"
    if clocks:
        yield "SM clock", f"{clocks.sm_mhz[0]} MHz before, {clocks.sm_mhz[1]} MHz after"
        yield "throttled", ", ".join(clocks.throttle_reasons)
    packages = report.environment.packages | {"ssdprof": report.ssdprof_version} | report.peers
    yield "versions", ", ".join(f"{name} {version}" for name, version in packages.items())
    yield "not compared", "; ".join(reason.rstrip(".") for reason in report.absent)
    yield "kernels", report.kernels and f"sources of sha256 {report.kernels[:12]}"
    checked = sorted({cell.checked for cell in report.cells if cell.checked is not None})
    if checked:
        lengths = fmt.words(f"{length:,}" for length in checked)
        yield "compared on", f"one sequence of {lengths} tokens, not on every token that was timed"
    yield "tuned", tuned([(case.implementation, case.plan) for cell in report.cells for case in cell.cases])
    yield "command", " ".join(report.command)
    yield "duration", f"{report.seconds:.0f} s, {report.state}"
    yield "started", report.created


def _floor(case: BenchCase) -> str:
    return fmt.percent(case.roofline.floor_pct if case.roofline else None, 1)


def _seconds(seconds: float | None) -> str:
    return fmt.MISSING if seconds is None else f"{seconds:.1f} s"


def _memory(case: BenchCase) -> str:
    return fmt.size(case.memory.workspace_bytes if case.memory else None)
