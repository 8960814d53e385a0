"""Tables of captured calls: speed, accuracy, launches, failures and remarks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain

from ssdprof.core import words as fmt
from ssdprof.core.base import TOLERANCES, Holds, PrecisionRecord, Probe, TensorName
from ssdprof.core.case import Case
from ssdprof.core.report import Report
from ssdprof.report.groups import Against, Group, Pooled, Series, baselines, groups, layer_of, pool, precision_order
from ssdprof.report.table import Column, Note, Table, aligned, lifted, strings, table, text

PRECISION = "intermediates,\nstates"
TENSORS: tuple[TensorName, ...] = ("out", "final_states")
SPEED_READING = Note(
    "Device: the time on the GPU alone.  Call: a Python call on an idle GPU, launches included.  In brackets: 95 % "
    "intervals.  % of roofline: the least time in which this GPU can move the bytes "
    "and do the arithmetic, divided by the device time.  Extra memory: allocated by the call beyond its outputs."
)
ACCURACY_READING = Note(
    "Match: share of elements with |a - b| <= atol + rtol |b|, rounded down.  Rms error: rms(a - b) / rms(b).  Floor: "
    "how the fp64 answer itself scores once it is rounded; no implementation can do better."
)
SHOWN: dict[TensorName, str] = {"out": "output", "final_states": "final states"}
_MOST_ROWS = 40  # if all cases fail, they have the same reason
_LONGEST_REASON = 300  # characters


# --- speed


_NAMES: tuple[Column[Series], ...] = (
    text("implementation", lambda row: row.name),
    text(PRECISION, lambda row: row.precision.short),
)
_SPEED: tuple[Column[Series], ...] = lifted(
    lambda row: row.speed,
    Column("speedup,\ndevice", lambda speed: fmt.speedup(speed.device.speedup)),
    Column("speedup,\ncall", lambda speed: fmt.speedup(speed.call.speedup)),
    Column("verdict,\ndevice", lambda speed: speed.device.verdict or fmt.MISSING),
    Column("verdict,\ncall", lambda speed: speed.call.verdict or fmt.MISSING),
    Column("device\ntime", lambda speed: fmt.duration(speed.device.us)),
    Column("call\ntime", lambda speed: fmt.duration(speed.call.us)),
    Column("% of\nroofline", lambda speed: fmt.percent(speed.floor_pct, 1)),
    Column("extra\nmemory", lambda speed: fmt.size(speed.workspace_bytes)),
)


def _speed_table(
    title: str, group: Group, found: Sequence[Series], first: Sequence[Column[Series]], notes: Iterable[str]
) -> Table | None:
    """None if nothing was timed.  The verdict of a series without a time is its results."""
    if not any(row.speed for row in found):
        return None
    pairs = [(row.precision, name) for row in found if row.speed for name in row.speed.baselines]
    baseline = f"Baseline: {baselines(group.baseline, pairs)}.  {fmt.counts(group.report.smallest_difference)}"
    verdict = _SPEED[2]

    def result(row: Series) -> str:
        return verdict.of(row) if row.speed else fmt.words(dict.fromkeys(case.result for case in row.cases))

    columns = (*first, *_SPEED[:2], verdict._replace(of=result), *_SPEED[3:])
    keys = sum(one in _NAMES or one.header == "layer" for one in first)
    return table(title, columns, found, note="  ".join((baseline, *notes)), keys=keys)


def total_speed(group: Group) -> Table | None:
    """Every series, summed over its calls; None if nothing was timed."""
    found, every = group.series(), group.calls
    unit = "layers" if every == len(group.layers) else "calls"
    incomplete = any(row.speed is None or len(row.speed.layers) < every for row in found)
    notes = []
    if every > 1:
        notes.append(
            "The interval of a sum assumes that all layers are at the same end of their intervals, so it is wider than "
            "a 95 % interval."
        )
    if incomplete:
        notes.append(f"Each speedup compares the same {unit}; times over different numbers of {unit} do not compare.")
    timed: Column[Series] = Column(unit, lambda row: f"{len(row.speed.layers) if row.speed else 0} of {every}")
    title = f"Speed {group.where}, {'sum over ' * (every > 1)}{group.extent}"
    return _speed_table(title, group, found, (*_NAMES, *((timed,) if incomplete else ())), notes)


def speed_by_layer(group: Group) -> Table | None:
    """Every series, layer by layer; None if nothing was timed."""
    layer: Column[Series] = Column("layer", lambda row: str(layer_of(row.cases[0])))
    found = [one for layer in group.layers for one in group.at_layer(layer).series()]
    return _speed_table(f"Speed of each layer {group.where}", group, found, (layer, *_NAMES), ())


# --- accuracy


def accuracies(group: Group) -> Iterator[Table | None]:
    """The tables of every compared implementation."""
    for name in group.compared:
        for tensor in TENSORS:
            yield matches(group, name, tensor)


def matches(group: Group, implementation: str, tensor: TensorName) -> Table | None:
    """Match percentages and errors of one tensor, a column for each precision, as in the article on the fused SSD
    kernel; all calls of the group pooled.  None if nothing was compared.

    For the baseline itself, the columns are its other precisions, compared with its exact one.
    """
    against: Against = "vs_baseline" if implementation == group.baseline else "vs_oracle"
    series = tuple(one for one in group.series(implementation) if one.pooled(against, tensor))
    if not series:
        return None
    several, worst = group.calls > 1, ""
    if several:
        worst = ", worst layer" if group.calls == len(group.layers) else ", worst call"
    limit = pool((case for one in series for case in one.cases), tensor, "floor")
    rows: list[tuple[str, ...]] = [
        ("within the error budget", *(_budget(one, tensor) for one in series), ""),
        ("kernel", *(one.variant for one in series), ""),
    ]
    headings = set()
    sides: tuple[tuple[str, Sequence[Series | None], Against, Pooled | None], ...] = (
        (f"{implementation} against {group.baseline}", series, "vs_baseline", None),
        (f"{implementation} against fp64", series, "vs_oracle", limit),
        (f"{group.baseline} against fp64", tuple(one.original for one in series), "vs_oracle", limit),
    )
    for title, shown, which, beside in sides:
        pooled = [one.pooled(which, tensor) if one else None for one in shown]
        if not any(pooled) or (shown is not series and implementation == group.baseline):
            continue
        headings.add(len(rows))
        rows.append((title, *[""] * (len(series) + 1)))
        for label, cell in _errors(worst):
            floor = cell(beside) if beside else ""
            rows.append((label, *(cell(one) if one else fmt.MISSING for one in pooled), floor))
    cases = [(one.precision, case) for one in series for case in one.cases]
    compared = [(precision, found.vs_baseline) for precision, case in cases if (found := case.tensor(tensor))]
    named = baselines(group.baseline, [(precision, one.against) for precision, one in compared if one])
    dtypes = fmt.words(dict.fromkeys(case.dims.dtype for _, case in cases if case.dims))
    rounded = dtypes if tensor == "out" else "the dtype in which states are returned"
    return Table(
        title=f"Accuracy of {implementation}'s {SHOWN[tensor]} {group.where}, {group.extent}{' pooled' * several}",
        headers=("", *(_header(one.precision) for one in series), "floor"),
        rows=tuple(rows),
        align=aligned(f"l{'r' * (len(series) + 1)}"),
        note=f"Baseline: {named}.  Floor: fp64 itself, rounded to {rounded}.",
        headings=frozenset(headings),
    )


def _match(pooled: Pooled, *, tolerance: float) -> str:
    return fmt.percent(pooled.match_pct(tolerance))


def _errors(worst: str) -> Iterator[tuple[str, Callable[[Pooled], str]]]:
    """The rows under a heading.  worst: ", worst layer" or ", worst call"; empty if there is only one."""
    for tolerance in TOLERANCES:
        yield f"match @ atol,rtol={fmt.tolerance(tolerance)}", partial(_match, tolerance=tolerance)
    yield f"rms error{worst}", lambda one: fmt.small(one.rms_ratio)
    yield f"largest error{worst}", lambda one: fmt.small(one.largest.max_abs)
    yield f"largest value{worst.replace('worst', 'same')}", lambda one: fmt.small(one.largest.scale_max_abs)


def errors_by_layer(group: Group, implementation: str) -> Table | None:
    """RMS error of the output against fp64, one row per layer."""
    series = tuple(one for one in group.series(implementation) if one.pooled("vs_oracle"))
    rows = []
    for layer in group.layers if series else ():
        own = [[case for case in one.cases if layer_of(case) == layer.index] for one in series]
        errors = [*(pool(cases, "out", "vs_oracle") for cases in own), pool(chain(*own), "out", "floor")]
        rows.append((str(layer.index), *(fmt.small(one.rms_ratio if one else None) for one in errors)))
    return strings(
        f"Rms error of {implementation}'s {SHOWN['out']} against fp64 in each layer {group.where}",
        ("layer", *(_header(one.precision) for one in series), "floor"),
        rows,
        "r" * (len(series) + 2),
        note="" if group.calls == len(group.layers) else f"The largest of each layer's {group.noun}s.",
    )


def largest_errors(group: Group, implementation: str) -> Table | None:
    """The largest differences and their positions, over all layers of the group and their chunks or steps."""
    Row = tuple[str, PrecisionRecord, str, Pooled]
    sides: tuple[tuple[str, Against], ...] = (("fp64", "vs_oracle"), (group.baseline, "vs_baseline"))
    rows: list[Row] = [
        (SHOWN[tensor], series.precision, against, pooled)
        for tensor in TENSORS
        for series in group.series(implementation)
        for against, which in sides
        if (pooled := series.pooled(which, tensor))
    ]
    number: Column[Row] = Column(group.noun, lambda row: str(row[3].case.call.number) if row[3].case.call else "")
    columns: tuple[Column[Row], ...] = (
        text("tensor", lambda row: row[0]),
        text("precision", lambda row: str(row[1])),
        text("against", lambda row: row[2]),
        Column("largest\nerror", lambda row: fmt.small(row[3].largest.max_abs)),
        Column("largest\nvalue", lambda row: fmt.small(row[3].largest.scale_max_abs)),
        Column("layer", lambda row: str(layer_of(row[3].case))),
        *((number,) if group.calls > len(group.layers) else ()),
        text("position", lambda row: fmt.position(row[3].largest.worst_position)),
        Column("worst head", lambda row: str(row[3].largest.worst_head)),
    )
    note = (
        "Positions are (row, token, head, channel) in the output and (sequence, head, row, column) in the "
        "final states, counted from 0."
    )
    return table(f"Largest differences of {implementation} {group.where}", columns, rows, note=note, keys=3)


def _budget(series: Series, tensor: TensorName) -> str:
    judged = [not one.reason for case in series.cases for one in case.accuracy if one.tensor == tensor]
    if all(judged):
        return "yes"
    return "NO" if len(judged) == 1 else f"NO: {judged.count(False)}/{len(judged)}"


def _header(precision: PrecisionRecord) -> str:
    return f"{precision.intermediates},\n{precision.state_dtype}\nstates"


def laws(report: Report) -> Table | None:
    """A row for each law, and a column for each implementation and precision: whether any case breaks it."""
    found: dict[str, dict[str, list[Probe]]] = {}
    for case in report.of_calls:
        for one in case.probes:
            own = found.setdefault(f"{case.implementation},\n{case.precision.short}", {})
            own.setdefault(one.name, []).append(one)
    order: tuple[Holds, ...] = ("no", "yes", "not applicable")
    rows, details = [], dict[str, dict[str, None]]()
    for name in dict.fromkeys(name for own in found.values() for name in own):
        several = [[one.holds for one in own.get(name, [])] for own in found.values()]
        rows.append((name, *(next((word for word in order if word in own), fmt.MISSING) for own in several)))
        for one in (one for own in found.values() for one in own.get(name, []) if one.holds != "yes"):
            details.setdefault(one.detail.rstrip("."), {})[name] = None
    note = "  ".join(f"{', '.join(names)}: {detail}." for detail, names in details.items())
    return strings("Laws", ("law", *found), rows, "l" * (len(found) + 1), note=note)


# --- launches, failures, remarks


def launches(report: Report) -> Table | None:
    """Every kernel as it was launched, without duplicates."""
    used: dict[tuple[str, ...], list[Case]] = {}
    precisions: dict[str, set[PrecisionRecord]] = {}
    for case in report.of_calls:
        precisions.setdefault(case.implementation, set()).add(case.precision)
        for launch in case.launches:
            resources = fmt.count(launch.registers), fmt.count(launch.spills), fmt.size(launch.shared_bytes)
            config = ", ".join(f"{name}={value}" for name, value in launch.config.items()) or fmt.MISSING
            cells = (case.implementation, case.variant, launch.kernel, *resources, config)
            used.setdefault(cells, []).append(case)
    every = {case.seqlen for case in report.of_calls}
    rows = [(*cells, _uses(cases, every, precisions[cells[0]])) for cells, cases in used.items()]
    headers = ("implementation", "variant", "kernel", "registers", "spills", "shared", "configuration", "used for")
    # the interpreter has no registers
    known = [i for i in range(8) if i not in (3, 4, 5) or any(row[i] != fmt.MISSING for row in rows)]
    numbers = len(known) - 5
    return strings(
        "Kernels as they were launched",
        [headers[i] for i in known],
        [tuple(row[i] for i in known) for row in rows],
        f"lll{'r' * numbers}ll",
        keys=3,
        wraps=3 + numbers,
        note="Registers and spills are per thread, shared memory per block." if numbers else "",
    )


def failures(report: Report) -> Table | None:
    """Every case that did not pass."""
    return _cases(report, "Failures and refusals", lambda case: case.result != "passed")


def remarks(report: Report) -> Table | None:
    """Every case that passed with a remark."""
    passed = "Remarks on cases that passed"
    return _cases(report, passed, lambda case: case.result == "passed" and bool(case.reason))


def _uses(cases: list[Case], lengths: set[int], precisions: set[PrecisionRecord]) -> str:
    """The prompts and precisions of a launch, or "all"."""
    used = sorted({case.precision for case in cases}, key=precision_order)
    used_lengths = sorted({case.seqlen for case in cases}, reverse=True)
    parts = []
    if set(used) != precisions:
        parts.append("; ".join(map(str, used)))
    if set(used_lengths) != lengths:
        counts = fmt.words(f"{length:,}" for length in used_lengths)
        parts.append(f"{counts} {'token' if used_lengths == [1] else 'tokens'}")
    return " at ".join(parts) or "all"


def _cases(report: Report, title: str, wanted: Callable[[Case], bool]) -> Table | None:
    """The selected cases; cases that differ only in the layer or the prompt share a row."""
    places: dict[tuple[str, ...], dict[str, list[int]]] = {}  # case -> prompt -> layers
    for group in groups(report):
        prompt = group.tokens.removesuffix(" tokens") if group.call is None else group.size
        for case in filter(wanted, group.cases):
            places.setdefault(_case_cells(case), {}).setdefault(prompt, []).append(layer_of(case))
    rows: list[tuple[str, ...]] = []
    for cells, prompts in places.items():
        same: dict[str, list[str]] = {}
        for prompt, layers in prompts.items():
            same.setdefault(fmt.indices(layers), []).append(prompt)
        rows += [(where, "; ".join(lengths), *cells) for where, lengths in same.items()]
    hidden = len(rows) - _MOST_ROWS
    return strings(
        title,
        ("case", "layers", "tokens", "implementation", PRECISION, "status", "reason", "first NaN\nor Inf"),
        [(str(number), *row) for number, row in enumerate(rows[:_MOST_ROWS], start=1)],
        "rlllllll",
        wraps=6,
        note=f"{fmt.plural(hidden, 'more row')} left out; every case is in the JSON report." if hidden > 0 else "",
    )


def _case_cells(case: Case) -> tuple[str, ...]:
    bad = ((one.tensor, one.vs_oracle.first_nonfinite) for one in case.accuracy)
    first = next((f"{tensor}{list(place)}" for tensor, place in bad if place is not None), fmt.MISSING)
    reason = " ".join(case.why.split())
    if len(reason) > _LONGEST_REASON:
        reason = f"{reason[: _LONGEST_REASON - 3]}..."
    return case.implementation, case.precision.short, case.result, reason, first
