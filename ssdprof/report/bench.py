"""Tables of a bench: `fused` over its baseline first, then every implementation, matches, choices and kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from ssdprof.core import words as fmt
from ssdprof.core.accuracy import Accuracy
from ssdprof.core.base import TOLERANCES, Clock
from ssdprof.core.case import Case, Launch
from ssdprof.core.conditions import JUDGED
from ssdprof.core.report import Report
from ssdprof.core.statistics import Estimate
from ssdprof.report.calls import PRECISION, SHOWN
from ssdprof.report.facts import environment_versions, tuned
from ssdprof.report.groups import Against, deviation
from ssdprof.report.table import Column, Table, facts, lifted, strings, table, text

T = TypeVar("T")
READING = (
    "Device: the time on the GPU alone, replayed from a CUDA graph.  Call: a Python call on an idle GPU, launches "
    "included.  In brackets: 95 % intervals.  % of roofline: the least time in which this GPU can move the bytes "
    "and do the arithmetic, divided by the device time.  Extra memory: allocated by the call beyond its outputs.  "
    "Error: RMS against the fp64 oracle; its floor is that of the oracle itself, rounded to the output's dtype.  "
    "First call: in this cell, compilation included.  Registers and spills are per thread, shared "
    "memory per block.  Occupancy: share of the warps that an SM can hold.  Compiled in: the slowest compilation of "
    "that name that was not in Triton's cache."
)
_MOST_ROWS = 50  # of a table, so that no renderer cuts it
_TOKENS: Column[Case] = text("sequences x\ntokens", lambda case: case.size)
_NAMES: tuple[Column[Case], ...] = (
    _TOKENS,
    text("implementation", lambda case: case.kernel),
    text(PRECISION, lambda case: case.precision.short),
)


Grid = tuple[Report, str, list[Case]]  # title, and the cases of one shape, dtype, draw and layout, as they ran


def tables(report: Report) -> Iterator[Table]:
    """The speedups first, then the details."""
    found: dict[str, list[Case]] = {}
    for case in report.cases:
        if (drawn := case.drawn) and case.dims:
            inputs = ", ".join((case.dims.dtype, *drawn.ways, f"{drawn.layout} inputs"))
            found.setdefault(f"{drawn.shape} ({drawn.shape_words}), {inputs}", []).append(case)
    for make in (_speedups, _details, _matches, _relaxed, _chunk_sizes):
        for title, cases in found.items():
            yield from make((report, title, cases))
    yield from _kernels(report)
    yield from _last(report)


def _speedups(grid: Grid) -> Iterator[Table]:
    """A row for each layout of tokens and precision; those without the baseline have a table of their own."""
    report, title, cases = grid
    timed = {(case.place, case.implementation) for case in cases if case.device_us}
    for base in dict.fromkeys((report.baseline, "unfused")):
        # `unfused` is the baseline where that was timed and the requested one was not
        instead = {case.place for case in cases if (case.place, report.baseline) not in timed}
        instead &= {case.place for case in cases if (case.place, "unfused") in timed}
        own = [
            case
            for case in cases
            if case.implementation == JUDGED and base == ("unfused" if case.place in instead else report.baseline)
        ]

        def rival_us(case: Case, base: str = base) -> float | None:
            rival = report.rival(case, base)
            return rival.device_us.value if rival and rival.device_us else None

        def over(case: Case, clock: Clock, base: str = base) -> Estimate | None:
            return report.speedup(case, clock, base)

        def verdict(case: Case, clock: Clock, base: str = base) -> str | None:
            return report.faster(case, clock, base)

        columns: tuple[Column[Case], ...] = (
            _TOKENS,
            text("fused", lambda case: f"{case.variant} {case.precision.short}".lstrip()),
            Column(
                "speedup,\ndevice", lambda case: fmt.speedup(over(case, "device")) if case.device_us else case.result
            ),
            Column("verdict,\ndevice", lambda case: verdict(case, "device") or fmt.MISSING),
            Column("speedup,\ncall", lambda case: _by_call(case, over(case, "call"))),
            Column("verdict,\ncall", lambda case: verdict(case, "call") or fmt.MISSING),
            Column("device", lambda case: _us(case.device_us)),
            Column("call", lambda case: _us(case.call_us)),
            Column(f"{base},\ndevice", lambda case: fmt.duration(rival_us(case) if case.device_us else None)),
            Column("% of\nroofline", lambda case: fmt.percent(case.floor_pct(report.ceilings), 1)),
        )
        note = fmt.counts(report.smallest_difference) if any(over(case, "device") for case in cases) else ""
        found = table(f"Fused over {base}: {title}", columns, own, keys=2, note=note)
        yield from (found,) if found else ()


def _details(grid: Grid) -> Iterator[Table]:
    """Every implementation; the cases on the same inputs stay together."""
    report, title, cases = grid
    places: dict[str, list[Case]] = {}
    for case in cases:
        places.setdefault(case.place, []).append(case)

    def timed(cell: str, case: Case) -> str:
        return cell if case.device_us else fmt.MISSING

    def error(case: Case) -> Accuracy | None:
        return case.tensor("out") if case.device_us else None

    columns: tuple[Column[Case], ...] = (
        *_NAMES,
        Column("chunk", lambda case: fmt.count(case.chunk_size)),
        Column("device", lambda case: _us(case.device_us) if case.device_us else case.result),
        Column("call", lambda case: _us(case.call_us)),
        Column("% of\nroofline", lambda case: fmt.percent(case.floor_pct(report.ceilings), 1)),
        Column(
            "extra\nmemory", lambda case: timed(fmt.size(case.memory.workspace_bytes if case.memory else None), case)
        ),
        Column("error\nof out", lambda case: fmt.small(found.vs_oracle.rms_ratio if (found := error(case)) else None)),
        Column("its\nfloor", lambda case: fmt.small(found.floor.rms_ratio if (found := error(case)) else None)),
        Column("first\ncall", lambda case: timed(_s(case.first_call.seconds if case.first_call else None), case)),
    )
    parts: list[list[Case]] = [[]]
    for cell in places.values():
        if len(parts[-1]) + len(cell) > _MOST_ROWS:
            parts.append([])
        parts[-1] += cell
    for part in parts:
        found = table(f"Every implementation: {title}", columns, part, keys=3)
        yield from (found,) if found else ()


def _matches(grid: Grid) -> Iterator[Table]:
    """The share of each output that matches another implementation and the fp64 oracle, with the floor."""
    against: dict[str, Against] = {"match": "vs_baseline", "fp64": "vs_oracle", "floor": "floor"}
    report, title, cases = grid

    def case(row: tuple[Case, Accuracy]) -> Case:
        return row[0]

    columns: list[Column[tuple[Case, Accuracy]]] = [
        *lifted(case, *_NAMES),
        text("tensor", lambda row: SHOWN[row[1].tensor]),
        text("matched with", lambda row: found.against if (found := row[1].vs_baseline) else fmt.MISSING),
    ]
    for what, which in against.items():
        for tolerance in TOLERANCES:

            def cell(row: tuple[Case, Accuracy], which: Against = which, tolerance: float = tolerance) -> str:
                found = deviation(row[1], which)
                return fmt.percent(found.match_pct(tolerance) if found else None)

            columns.append(Column(f"{what}\n@ {fmt.tolerance(tolerance)}", cell))
    yield from _in_parts(
        f"Matches with {report.matched_with}: {title}",
        columns,
        [(case, tensor) for case in cases for tensor in case.accuracy],
        keys=4,
        note="Match: share of elements with |a - b| <= t + t |b|, rounded down, against the output in the column "
        "before.  Fp64: the same against the fp64 oracle.  Floor: the oracle itself, rounded, against the oracle.",
    )


def _relaxed(grid: Grid) -> Iterator[Table]:
    report, title, cases = grid
    smallest = report.smallest_difference

    def over(case: Case, clock: Clock) -> Estimate | None:
        same = (one for one in cases if (one.place, one.implementation) == (case.place, case.implementation))
        exact = next((one for one in same if one is not case and one.precision == case.precision.exact), None)
        return case.over(exact, clock)

    def verdict(clock: Clock) -> Column[Case]:
        name = f"verdict,\n{clock}"
        return Column(name, lambda case: found.verdict(smallest) if (found := over(case, clock)) else fmt.MISSING)

    columns: tuple[Column[Case], ...] = (
        *_NAMES[:2],
        text("states", lambda case: case.precision.state_dtype),
        Column("speedup,\ndevice", lambda case: fmt.speedup(over(case, "device"))),
        verdict("device"),
        Column("speedup,\ncall", lambda case: _by_call(case, over(case, "call"))),
        verdict("call"),
    )
    yield from _in_parts(
        f"Relaxed over exact intermediates: {title}",
        columns,
        [case for case in cases if over(case, "device")],
        keys=3,
        note=fmt.counts(smallest),
    )


def _chunk_sizes(grid: Grid) -> Iterator[Table]:
    _, title, cases = grid
    tried = [case for case in cases if len(case.trials) > 1]

    def of_size(size: int) -> Column[Case]:
        def cell(case: Case) -> str:
            trial = next((one for one in case.trials if one.chunk_size == size), None)
            if trial is None:
                return fmt.MISSING
            return trial.result if trial.device_us is None else fmt.duration(trial.device_us)

        return Column(f"chunk\n{size}", cell)

    sizes = sorted({trial.chunk_size for case in tried for trial in case.trials})
    fastest: Column[Case] = Column("fastest", lambda case: fmt.count(case.chunk_size))
    yield from _in_parts(
        f"Device times by chunk size: {title}",
        (*_NAMES, *map(of_size, sizes), fastest),
        tried,
        keys=3,
        note="Medians of a few replays in turns, which choose the chunk size; other tables have more replays.",
    )


def _kernels(report: Report) -> Iterator[Table]:
    """Every kernel of a case as it was launched; equal launches share a row, which lists their shapes."""
    used: dict[str, dict[tuple[str, ...], dict[str, None]]] = {}
    compiled: dict[tuple[str, str], float] = {}
    for case in report.cases:
        name = _name(case)
        for launch in case.launches:
            shapes = used.setdefault(name, {}).setdefault(_resources(launch), {})
            shapes[f"{case.drawn.shape if case.drawn else ''} {case.dims.dtype if case.dims else ''}"] = None
        for began in (case.first_call, *(trial.first_call for trial in case.trials)):
            for kernel, seconds in began.compiled.items() if began else ():
                compiled[name, kernel] = max(seconds, compiled.get((name, kernel), 0.0))
    headers = (
        "kernel", "warps", "registers", "spills", "shared", "blocks\nper SM", "occupancy", "compiled\nin", "shapes",
    )  # fmt: skip
    for name, kernels in used.items():
        rows = [(*own, _s(compiled.get((name, own[0]))), ", ".join(shapes)) for own, shapes in kernels.items()]
        for first in range(0, len(rows), _MOST_ROWS):
            part = strings(f"Kernels of {name}", headers, rows[first : first + _MOST_ROWS], "lrrrrrrrl", wraps=8)
            yield from (part,) if part else ()


def _resources(launch: Launch) -> tuple[str, ...]:
    return (
        launch.kernel,
        str(launch.config.get("num_warps", fmt.MISSING)),
        fmt.count(launch.registers),
        fmt.count(launch.spills),
        fmt.size(launch.shared_bytes),
        fmt.count(launch.blocks_per_sm),
        fmt.percent(launch.warps_pct, 0),
    )


def _last(report: Report) -> Iterator[Table]:
    shown = {
        (
            case.drawn.shape,
            case.size,
            _name(case),
            case.result,
            case.why if case.result != "passed" or case.reason else f"outside ssdprof's budget: {case.outside_budget}",
        ): None
        for case in report.cases
        if case.drawn and case.why
    }

    headers = ("shape", "sequences x\ntokens", "implementation", "status", "why")
    remarks = strings("Remarks", headers, shown, "lllll", wraps=4)
    out = [(one.place, one.reason) for one in report.left_out]
    left_out = strings("Left out", ("cell", "why"), out, "ll", wraps=1)
    yield from (one for one in (remarks, left_out) if one)
    yield facts("What ran", ("what", ""), _facts(report))


def _facts(report: Report) -> Iterator[tuple[str, str]]:
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
    libraries = {case.implementation: case.version for case in report.cases if case.kind == "library"}
    yield (
        "versions",
        environment_versions(report.environment.packages | {"ssdprof": report.ssdprof_version} | libraries),
    )
    yield "not compared", "; ".join(reason.rstrip(".") for reason in report.absent)
    yield "kernels", report.kernels and f"machine code of sha256 {report.kernels[:12]}"
    if checked := sorted({case.drawn.checked for case in report.cases if case.drawn and case.drawn.checked}):
        lengths = fmt.words(f"{length:,}" for length in checked)
        yield "compared on", f"one sequence of {lengths} tokens, not on every token that was timed"
    yield "tuned", tuned(report.cases)
    yield "command", " ".join(report.command)
    yield "duration", f"{report.seconds:.0f} s, {'complete' if report.complete else 'partial'}"
    yield "started", report.created


def _in_parts(
    title: str, columns: Sequence[Column[T]], items: Sequence[T], *, keys: int = 1, note: str = ""
) -> Iterator[Table]:
    for first in range(0, len(items), _MOST_ROWS):
        found = table(title, columns, items[first : first + _MOST_ROWS], keys=keys, note=note)
        yield from (found,) if found else ()


def _name(case: Case) -> str:
    return f"{case.kernel}, {case.precision}"


def _by_call(case: Case, found: Estimate | None) -> str:
    return fmt.ratio(found.value) if found and case.of_one_process else fmt.speedup(found)


def _us(found: Estimate | None) -> str:
    return fmt.duration(found.value if found else None)


def _s(seconds: float | None) -> str:
    return fmt.MISSING if seconds is None else f"{seconds:.1f} s"
