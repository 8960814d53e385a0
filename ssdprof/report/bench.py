"""Tables of a bench: `fused` over its baseline first, then every implementation, matches, choices and kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ssdprof.core import words as fmt
from ssdprof.core.accuracy import Accuracy
from ssdprof.core.base import TOLERANCES, Clock, grouped
from ssdprof.core.case import Case
from ssdprof.core.conditions import JUDGED
from ssdprof.core.report import Report
from ssdprof.core.statistics import Estimate
from ssdprof.report.calls import PRECISION, SHOWN
from ssdprof.report.facts import tuned, versions
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
_CALL: Column[Case] = Column("call", lambda case: _us(case.call_us))


def tables(report: Report) -> Iterator[Table]:
    """The speedups first, then the details: a table of each kind for each shape, dtype, draw and layout."""

    def title(case: Case) -> str:
        assert case.drawn
        assert case.dims
        inputs = ", ".join((case.dims.dtype, *case.drawn.ways, f"{case.drawn.layout} inputs"))
        return f"{case.drawn.shape} ({case.drawn.shape_words}), {inputs}"

    found = grouped(report.of_calls, title)
    for make in (_speedups, _details, _matches, _relaxed, _chunk_sizes):
        for name, cases in found.items():
            yield from filter(None, make(report, name, cases))
    yield from filter(None, (*_kernels(report), *_last(report)))


def _roofline(report: Report) -> Column[Case]:
    return Column("% of\nroofline", lambda case: fmt.percent(case.floor_pct(report.ceilings), 1))


def _over(report: Report, over: Callable[[Case, Clock], Estimate | None]) -> tuple[Column[Case], ...]:
    """Speedups and verdicts.  Call times of one process have no interval that would hold for another one."""

    def speedup(case: Case, clock: Clock) -> str:
        found = over(case, clock)
        if clock == "call" and found and case.of_one_process:
            return fmt.ratio(found.value)
        return fmt.speedup(found) if case.device_us or clock == "call" else case.result

    def verdict(case: Case, clock: Clock) -> str:
        return found.verdict(report.smallest_difference) if (found := over(case, clock)) else fmt.MISSING

    return (
        Column("speedup,\ndevice", lambda case: speedup(case, "device")),
        Column("verdict,\ndevice", lambda case: verdict(case, "device")),
        Column("speedup,\ncall", lambda case: speedup(case, "call")),
        Column("verdict,\ncall", lambda case: verdict(case, "call")),
    )


def _speedups(report: Report, title: str, cases: list[Case]) -> Iterator[Table | None]:
    """A row for each layout of tokens and precision; those without the baseline have a table of their own."""
    timed = {(case.place, case.implementation) for case in cases if case.device_us}

    def baseline(case: Case) -> str:
        """`unfused` is the baseline where that was timed and the requested one was not."""
        instead = (case.place, report.baseline) not in timed and (case.place, "unfused") in timed
        return "unfused" if instead else report.baseline

    for base in dict.fromkeys((report.baseline, "unfused")):
        own = [case for case in cases if case.implementation == JUDGED and baseline(case) == base]

        def over(case: Case, clock: Clock, base: str = base) -> Estimate | None:
            return report.speedup(case, clock, base)

        def rival_us(case: Case, base: str = base) -> str:
            rival = report.rival(case, base)
            return _us(rival.device_us if rival and case.device_us else None)

        columns: tuple[Column[Case], ...] = (
            _TOKENS,
            text("fused", lambda case: f"{case.variant} {case.precision.short}".lstrip()),
            *_over(report, over),
            Column("device", lambda case: _us(case.device_us)),
            _CALL,
            Column(f"{base},\ndevice", rival_us),
            _roofline(report),
        )
        note = fmt.counts(report.smallest_difference) if any(over(case, "device") for case in cases) else ""
        yield table(f"Fused over {base}: {title}", columns, own, keys=2, note=note)


def _details(report: Report, title: str, cases: list[Case]) -> Iterator[Table | None]:
    """Every implementation; the cases on the same inputs stay together."""

    def timed(of: Callable[[Case], str]) -> Callable[[Case], str]:
        return lambda case: of(case) if case.device_us else fmt.MISSING

    def error(which: Against) -> Callable[[Case], str]:
        def of(case: Case) -> str:
            found = deviation(out, which) if (out := case.tensor("out")) else None
            return fmt.small(found.rms_ratio if found else None)

        return timed(of)

    columns: tuple[Column[Case], ...] = (
        *_NAMES,
        Column("chunk", lambda case: fmt.count(case.chunk_size)),
        Column("device", lambda case: _us(case.device_us) if case.device_us else case.result),
        _CALL,
        _roofline(report),
        Column("extra\nmemory", timed(lambda case: fmt.size(case.memory.workspace_bytes if case.memory else None))),
        Column("error\nof out", error("vs_oracle")),
        Column("its\nfloor", error("floor")),
        Column("first\ncall", timed(lambda case: _s(case.first_call.seconds if case.first_call else None))),
    )
    parts: list[list[Case]] = [[]]
    for cell in grouped(cases, lambda case: case.place).values():
        if len(parts[-1]) + len(cell) > _MOST_ROWS:
            parts.append([])
        parts[-1] += cell
    yield from (table(f"Every implementation: {title}", columns, part, keys=3) for part in parts)


def _matches(report: Report, title: str, cases: list[Case]) -> Iterator[Table | None]:
    """The share of each output that matches another implementation and the fp64 oracle, with the floor."""
    Row = tuple[Case, Accuracy]

    def cell(which: Against, tolerance: float) -> Callable[[Row], str]:
        return lambda row: fmt.percent(found.match_pct(tolerance) if (found := deviation(row[1], which)) else None)

    def case(row: Row) -> Case:
        return row[0]

    against: dict[str, Against] = {"match": "vs_baseline", "fp64": "vs_oracle", "floor": "floor"}
    columns: tuple[Column[Row], ...] = (
        *lifted(case, *_NAMES),
        text("tensor", lambda row: SHOWN[row[1].tensor]),
        text("matched with", lambda row: found.against if (found := row[1].vs_baseline) else fmt.MISSING),
        *(
            Column(f"{what}\n@ {fmt.tolerance(tolerance)}", cell(which, tolerance))
            for what, which in against.items()
            for tolerance in TOLERANCES
        ),
    )
    yield from _in_parts(
        f"Matches with {report.matched_with}: {title}",
        columns,
        [(case, tensor) for case in cases for tensor in case.accuracy],
        keys=4,
        note="Match: share of elements with |a - b| <= t + t |b|, rounded down, against the output in the column "
        "before.  Fp64: the same against the fp64 oracle.  Floor: the oracle itself, rounded, against the oracle.",
    )


def _relaxed(report: Report, title: str, cases: list[Case]) -> Iterator[Table | None]:
    def over(case: Case, clock: Clock) -> Estimate | None:
        same = (one for one in cases if (one.place, one.implementation) == (case.place, case.implementation))
        exact = next((one for one in same if one is not case and one.precision == case.precision.exact), None)
        return case.over(exact, clock)

    states: Column[Case] = text("states", lambda case: case.precision.state_dtype)
    yield from _in_parts(
        f"Relaxed over exact intermediates: {title}",
        (*_NAMES[:2], states, *_over(report, over)),
        [case for case in cases if over(case, "device")],
        note=fmt.counts(report.smallest_difference),
    )


def _chunk_sizes(_report: Report, title: str, cases: list[Case]) -> Iterator[Table | None]:
    tried = [case for case in cases if len(case.trials) > 1]

    def of_size(size: int) -> Column[Case]:
        def cell(case: Case) -> str:
            trial = next((one for one in case.trials if one.chunk_size == size), None)
            shown = trial.result if trial and trial.device_us is None else None
            return shown or fmt.duration(trial.device_us if trial else None)

        return Column(f"chunk\n{size}", cell)

    sizes = sorted({trial.chunk_size for case in tried for trial in case.trials})
    fastest: Column[Case] = Column("fastest", lambda case: fmt.count(case.chunk_size))
    yield from _in_parts(
        f"Device times by chunk size: {title}",
        (*_NAMES, *map(of_size, sizes), fastest),
        tried,
        note="Medians of a few replays in turns, which choose the chunk size; other tables have more replays.",
    )


def _kernels(report: Report) -> Iterator[Table | None]:
    """Every kernel of a case as it was launched; equal launches share a row, which lists their shapes."""
    used: dict[str, dict[tuple[str, ...], dict[str, None]]] = {}
    compiled: dict[tuple[str, str], float] = {}
    for case in report.of_calls:
        name = _name(case)
        for launch in case.launches:
            resources = (
                launch.kernel,
                str(launch.config.get("num_warps", fmt.MISSING)),
                fmt.count(launch.registers),
                fmt.count(launch.spills),
                fmt.size(launch.shared_bytes),
                fmt.count(launch.blocks_per_sm),
                fmt.percent(launch.warps_pct, 0),
            )
            shapes = used.setdefault(name, {}).setdefault(resources, {})
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
            yield strings(f"Kernels of {name}", headers, rows[first : first + _MOST_ROWS], "lrrrrrrrl", wraps=8)


def _last(report: Report) -> Iterator[Table | None]:
    def row(case: Case) -> tuple[str, ...]:
        why = case.why if case.result != "passed" or case.reason else f"outside ssdprof's budget: {case.outside_budget}"
        return case.drawn.shape if case.drawn else "", case.size, _name(case), case.result, why

    shown = dict.fromkeys(row(case) for case in report.of_calls if case.why)
    headers = ("shape", "sequences x\ntokens", "implementation", "status", "why")
    yield strings("Remarks", headers, shown, "lllll", wraps=4)
    yield strings("Left out", ("cell", "why"), [(one.place, one.reason) for one in report.left_out], "ll", wraps=1)
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
    yield "versions", versions(report.environment.packages | {"ssdprof": report.ssdprof_version} | libraries)
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
    title: str, columns: Sequence[Column[T]], items: Sequence[T], *, keys: int = 3, note: str = ""
) -> Iterator[Table | None]:
    for first in range(0, len(items), _MOST_ROWS):
        yield table(title, columns, items[first : first + _MOST_ROWS], keys=keys, note=note)


def _name(case: Case) -> str:
    return f"{case.kernel}, {case.precision}"


def _us(found: Estimate | None) -> str:
    return fmt.duration(found.value if found else None)


def _s(seconds: float | None) -> str:
    return fmt.MISSING if seconds is None else f"{seconds:.1f} s"
