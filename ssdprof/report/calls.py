"""Tables of captured calls: speed, accuracy, launches, failures and remarks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter

from ssdprof.core import words as fmt
from ssdprof.core.base import TOLERANCES, Holds, PrecisionRecord, Probe, TensorName, grouped
from ssdprof.core.case import Case, Launch
from ssdprof.core.report import Report
from ssdprof.report.groups import Against, Group, Pooled, Series, groups, layer_of, pool, precision_order
from ssdprof.report.table import Column, Note, Table, lifted, strings, table, text

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
    lambda row: row if row.timed else None,
    Column("speedup,\ndevice", lambda row: fmt.speedup(row.device.speedup)),
    Column("speedup,\ncall", lambda row: fmt.speedup(row.call.speedup)),
    Column("verdict,\ndevice", lambda row: row.device.verdict or fmt.MISSING),
    Column("verdict,\ncall", lambda row: row.call.verdict or fmt.MISSING),
    Column("device\ntime", lambda row: fmt.duration(row.device.us)),
    Column("call\ntime", lambda row: fmt.duration(row.call.us)),
    Column("% of\nroofline", lambda row: fmt.percent(row.floor_pct, 1)),
    Column("extra\nmemory", lambda row: fmt.size(row.workspace_bytes)),
)


def _speeds(
    title: str, group: Group, found: Sequence[Series], first: Sequence[Column[Series]], *notes: str
) -> Table | None:
    """None if nothing was timed.  The verdict of a series without a time is its results."""
    if not any(row.timed for row in found):
        return None
    pairs = [(row.precision, name) for row in found for name in row.baselines]
    baseline = f"Baseline: {baselines(group, pairs)}.  {fmt.counts(group.report.smallest_difference)}"

    def result(row: Series) -> str:
        return _SPEED[2].of(row) if row.timed else fmt.words(dict.fromkeys(case.result for case in row.cases))

    columns = (*first, *_SPEED[:2], _SPEED[2]._replace(of=result), *_SPEED[3:])
    keys = sum(one in _NAMES or one.header == "layer" for one in first)
    return table(title, columns, found, note="  ".join((baseline, *filter(None, notes))), keys=keys)


def total_speed(group: Group) -> Table | None:
    """Every series, summed over its calls; None if nothing was timed."""
    found, every = group.series(), group.calls
    unit = "layers" if every == len(group.layers) else "calls"
    timed: Column[Series] = Column(unit, lambda row: f"{len(row.layers)} of {every}")
    incomplete = any(len(row.layers) < every for row in found)
    sums = (
        "The interval of a sum assumes that all layers are at the same end of their intervals, so it is wider than "
        "a 95 % interval."
    )
    some = f"Each speedup compares the same {unit}; times over different numbers of {unit} do not compare."
    return _speeds(
        f"Speed {group.where}, {'sum over ' * (every > 1)}{group.extent}",
        group,
        found,
        (*_NAMES, *((timed,) if incomplete else ())),
        sums * (every > 1),
        some * incomplete,
    )


def speed_by_layer(group: Group) -> Table | None:
    """Every series, layer by layer; None if nothing was timed."""
    layer: Column[Series] = Column("layer", lambda row: str(layer_of(row.cases[0])))
    found = [one for layer in group.layers for one in group.at_layer(layer).series()]
    return _speeds(f"Speed of each layer {group.where}", group, found, (layer, *_NAMES))


def baselines(group: Group, pairs: Iterable[tuple[PrecisionRecord, str]]) -> str:
    """The baselines of all precisions as text.  pairs: (precision, baseline that it names)."""
    found, name = list(pairs), group.baseline
    if found and all(against == f"{name} {precision.exact}" for precision, against in found):
        return f"{name}, exact, with the same state dtype"
    return " or ".join(dict.fromkeys(against for _, against in found)) or name


# --- accuracy


def accuracies(group: Group) -> Iterator[Table | None]:
    """The tables of every compared implementation."""
    yield from (matches(group, name, tensor) for name in group.compared for tensor in TENSORS)


def matches(group: Group, implementation: str, tensor: TensorName) -> Table | None:
    """Match percentages and errors of one tensor, a column for each precision, as in the article on the fused SSD
    kernel; all calls of the group pooled.  None if nothing was compared.

    For the baseline itself, the columns are its other precisions, compared with its exact one.
    """
    base, several = group.baseline, group.calls > 1
    own: Against = "vs_baseline" if implementation == base else "vs_oracle"
    series = tuple(one for one in group.series(implementation) if one.pooled(own, tensor))
    if not series:
        return None
    worst = f", worst {'layer' if group.calls == len(group.layers) else 'call'}" * several
    lines: tuple[tuple[str, Callable[[Pooled], str]], ...] = (
        *((f"match @ atol,rtol={fmt.tolerance(one)}", partial(_match, tolerance=one)) for one in TOLERANCES),
        (f"rms error{worst}", lambda one: fmt.small(one.rms_ratio)),
        (f"largest error{worst}", lambda one: fmt.small(one.largest.max_abs)),
        (f"largest value{worst.replace('worst', 'same')}", lambda one: fmt.small(one.largest.scale_max_abs)),
    )

    def budget(one: Series) -> str:
        good = [not each.reason for case in one.cases for each in case.accuracy if each.tensor == tensor]
        return "yes" if all(good) else "NO" if len(good) == 1 else f"NO: {good.count(False)}/{len(good)}"

    cases = [(one.precision, case) for one in series for case in one.cases]
    floor = pool((case for _, case in cases), tensor, "floor")
    rows = [("within the error budget", *map(budget, series), ""), ("kernel", *(one.variant for one in series), "")]
    sides: list[tuple[str, Sequence[Series | None], Against, Pooled | None]] = [
        (f"{implementation} against {base}", series, "vs_baseline", None),
        (f"{implementation} against fp64", series, "vs_oracle", floor),
    ]
    if implementation != base:
        sides.append((f"{base} against fp64", [one.original for one in series], "vs_oracle", floor))
    headings = set()
    for title, shown, which, beside in sides:
        pooled = [one.pooled(which, tensor) if one else None for one in shown]
        if any(pooled):
            headings.add(len(rows))
            rows.append((title, *[""] * (len(series) + 1)))
            for label, cell in lines:
                last = cell(beside) if beside else ""
                rows.append((label, *(cell(one) if one else fmt.MISSING for one in pooled), last))
    compared = [(precision, found.vs_baseline) for precision, case in cases if (found := case.tensor(tensor))]
    named = baselines(group, [(precision, one.against) for precision, one in compared if one])
    dtypes = fmt.words(dict.fromkeys(case.dims.dtype for _, case in cases if case.dims))
    rounded = dtypes if tensor == "out" else "the dtype in which states are returned"
    return strings(
        f"Accuracy of {implementation}'s {SHOWN[tensor]} {group.where}, {group.extent}{' pooled' * several}",
        ("", *(_header(one.precision) for one in series), "floor"),
        rows,
        f"l{'r' * (len(series) + 1)}",
        note=f"Baseline: {named}.  Floor: fp64 itself, rounded to {rounded}.",
        headings=headings,
    )


def _match(pooled: Pooled, *, tolerance: float) -> str:
    return fmt.percent(pooled.match_pct(tolerance))


def _header(precision: PrecisionRecord) -> str:
    return f"{precision.intermediates},\n{precision.state_dtype}\nstates"


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

    def cells(case: Case, launch: Launch) -> tuple[str, ...]:
        resources = fmt.count(launch.registers), fmt.count(launch.spills), fmt.size(launch.shared_bytes)
        config = ", ".join(f"{name}={value}" for name, value in launch.config.items()) or fmt.MISSING
        return case.implementation, case.variant, launch.kernel, *resources, config

    def uses(cases: Sequence[Case], among: Sequence[Case]) -> str:
        """The prompts and precisions of a launch, or "all"."""
        parts = []
        if (used := {case.precision for case in cases}) != {case.precision for case in among}:
            parts.append("; ".join(map(str, sorted(used, key=precision_order))))
        if (lengths := {case.seqlen for case in cases}) != {case.seqlen for case in report.of_calls}:
            counts = fmt.words(f"{length:,}" for length in sorted(lengths, reverse=True))
            parts.append(f"{counts} {'token' if lengths == {1} else 'tokens'}")
        return " at ".join(parts) or "all"

    launched = [(cells(case, launch), case) for case in report.of_calls for launch in case.launches]
    by_name = grouped(report.of_calls, lambda case: case.implementation)
    rows = [
        (*shown, uses([case for _, case in own], by_name[shown[0]]))
        for shown, own in grouped(launched, lambda one: one[0]).items()
    ]
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


def _cases(report: Report, title: str, wanted: Callable[[Case], bool]) -> Table | None:
    """The selected cases; cases that differ only in the layer or the prompt share a row."""

    def cells(case: Case) -> tuple[str, ...]:
        bad = ((one.tensor, one.vs_oracle.first_nonfinite) for one in case.accuracy)
        first = next((f"{tensor}{list(place)}" for tensor, place in bad if place is not None), fmt.MISSING)
        reason = fmt.cut(" ".join(case.why.split()), _LONGEST_REASON)
        return case.implementation, case.precision.short, case.result, reason, first

    chosen = [
        (cells(case), group.tokens.removesuffix(" tokens") if group.call is None else group.size, layer_of(case))
        for group in groups(report)
        for case in filter(wanted, group.cases)
    ]
    rows: list[tuple[str, ...]] = []
    for shown, own in grouped(chosen, lambda one: one[0]).items():
        layers = {
            prompt: fmt.indices(layer for *_, layer in same) for prompt, same in grouped(own, itemgetter(1)).items()
        }
        rows += [(where, "; ".join(lengths), *shown) for where, lengths in grouped(layers, layers.__getitem__).items()]
    hidden = len(rows) - _MOST_ROWS
    return strings(
        title,
        ("case", "layers", "tokens", "implementation", PRECISION, "status", "reason", "first NaN\nor Inf"),
        [(str(number), *row) for number, row in enumerate(rows[:_MOST_ROWS], start=1)],
        "rlllllll",
        wraps=6,
        note=f"{fmt.plural(hidden, 'more row')} left out; every case is in the JSON report." if hidden > 0 else "",
    )
