"""Tables of calls, captured or drawn: speed, accuracy, laws, launches, and what did not pass."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence

from ssdprof.core import words as fmt
from ssdprof.core.base import (
    BETWEEN_CALLS,
    PRECISIONS,
    TOLERANCES,
    PrecisionName,
    Probe,
    TensorName,
    exact_precision,
    grouped,
    short_precision,
)
from ssdprof.core.case import Case, Drawn
from ssdprof.core.report import Report
from ssdprof.report.groups import (
    Against,
    Group,
    Pooled,
    Series,
    groups,
    layer_of,
    layer_words,
    pool,
)
from ssdprof.report.table import Column, Row, Table, filled, folded, lifted, strings, table, text

PRECISION = "intermediates,\nstates"
SHOWN: dict[TensorName, str] = {"out": "output", "final_states": "final states"}
SPEED_READING = (
    "Device: the time on the GPU alone.  Call: a Python call on an idle GPU, launches included.  "
    "Speedup: over the "
    "baseline, with its 95 % interval.  Tokens per s: of the prompt, by device time.  % of "
    "roofline: the least time in "
    "which this GPU can move the bytes and do the arithmetic, divided by the device time.  Extra "
    "memory: allocated by "
    "the call beyond its outputs."
)
ACCURACY_READING = (
    "Equal, within: share of elements with |a - b| <= t + t |b|, rounded down.  Where it says "
    '"of rms", with t (rms '
    "+ |b|), where rms is the tensor's own: t alone says nothing about small numbers.  Rms "
    "error: rms(a - b) / rms(b)."
    "  Floor: how the fp64 answer itself scores once it is rounded to the tensor's dtype; no "
    "implementation can do "
    "better.  In several calls, shares are of all elements, errors those of the worst call.  "
    "Positions count from 0: "
    "(row, token, head, channel) in the output, (sequence, head, row, column) in the final states."
)
OF_RMS = 1e-3  # the tolerance relative to the tensor's own RMS
_MOST_ROWS = 40  # if all cases fail, they have the same reason

# --- speed

NAMES: tuple[Column[Series], ...] = (
    text("implementation", lambda row: row.name),
    text(PRECISION, lambda row: short_precision(row.precision)),
)


def untimed(case: Case) -> str:
    """Its result, where there is no time."""
    return case.result.replace("passed", "not timed")


def _verdict(row: Series) -> str:
    return (
        (row.verdict or fmt.MISSING)
        if row.timed
        else fmt.words(dict.fromkeys(map(untimed, row.cases)))
    )


def _timed(row: Series) -> Series | None:
    return row if row.timed else None


SPEED: tuple[Column[Series], ...] = (
    Column("speedup,\ndevice", lambda row: fmt.speedup(row.speedup())),
    Column("verdict", _verdict),
    *lifted(
        _timed,
        Column(
            "speedup,\ncall",
            lambda row: fmt.speedup(row.speedup("call"), by_call=row.group.report.samplers == 1),
        ),
        Column("device\ntime", lambda row: fmt.duration(row.us["device"])),
        Column("tokens\nper s", lambda row: fmt.rate(row.tokens_per_s)),
        Column("baseline,\ndevice", lambda row: fmt.duration(baseline_us(row))),
        Column("% of\nroofline", lambda row: fmt.percent(row.floor_pct, 1)),
        Column("call\ntime", lambda row: fmt.duration(row.us["call"])),
        Column("extra\nmemory", lambda row: fmt.size_words(row.workspace_bytes)),
    ),
)


def baseline_us(row: Series) -> float | None:
    """The device time of the baseline, summed over the same calls."""
    found = row.speedup()
    return found.value * row.us["device"] if found else None


def speeds(
    title: str, rows: Sequence[Series], first: Sequence[Column[Series]], *notes: str
) -> Table | None:
    """first: the columns before `SPEED`, of which those up to `NAMES` are keys.  None if nothing
    was timed.
    """
    if not any(row.timed for row in rows):
        return None
    baseline = (
        f"Baseline: {baselines((row.precision, name) for row in rows for name in row.rivals)}."
    )
    note = "  ".join(
        (baseline, fmt.counts(rows[0].group.report.smallest_difference), *filter(None, notes))
    )
    return table(title, (*first, *SPEED), rows, note=note, keys=first.index(NAMES[-1]) + 1)


def total_speed(group: Group) -> Table | None:
    """Every series, summed over its calls."""
    found, every = group.series(), group.calls
    unit = "layers" if every == len(group.layers) else "calls"
    timed: Column[Series] = Column(unit, lambda row: f"{len(row.timed)} of {every}")
    incomplete = any(len(row.timed) < every for row in found)
    sums = "The interval of a sum assumes that all calls are at the same end of their intervals."
    some = (
        f"Each speedup compares the same {unit}; times over different numbers of {unit} do "
        "not compare."
    )
    title = f"Speed {group.where}, {'sum over ' * (every > 1)}{group.extent}"
    return speeds(
        title, found, (*NAMES, *([timed] * incomplete)), sums * (every > 1), some * incomplete
    )


def speed_by_layer(group: Group) -> Table | None:
    """Every series, layer by layer."""
    layer: Column[Series] = Column("layer", lambda row: str(layer_of(row.cases[0])))
    found = [one for own in group.by_layer() for one in own.series()]
    return speeds(f"Speed of each layer {group.where}", found, (layer, *NAMES))


def baselines(pairs: Iterable[tuple[PrecisionName, str]]) -> str:
    """The baselines of all precisions as text.  pairs: (precision, baseline that it names)."""
    found = list(pairs)
    names = {against.split()[0] for _, against in found}
    if len(names) == 1 and all(
        against.endswith(f" {exact_precision(precision)}") for precision, against in found
    ):
        return f"{names.pop()}, exact, with the same state dtype"
    return " or ".join(dict.fromkeys(against for _, against in found)) or "none"


# --- accuracy


def accuracies(group: Group) -> Iterator[Table | None]:
    """A table for each tensor: all calls of the group pooled."""
    extent = f"{group.extent}{' pooled' * (group.calls > 1)}"
    for tensor, name in SHOWN.items():
        names = (*group.compared, group.baseline)
        yield errors(
            f"Accuracy of the {name} {group.where}, {extent}", tensor, [((), group, names)]
        )


def errors_by_layer(group: Group) -> Iterator[Table | None]:
    for tensor, name in SHOWN.items():
        parts = [((str(own.layers[0]),), own, group.compared) for own in group.by_layer()]
        yield errors(f"Accuracy of the {name} of each layer {group.where}", tensor, parts, "layer")


def errors(
    title: str, tensor: TensorName, parts: Iterable[tuple[Row, Group, Sequence[str]]], *first: str
) -> Table | None:
    """A row for each series against its baseline, one against fp64, and one for the floor;
    precisions with the same numbers share a row.

    parts: the first cells of its rows, a group, and its implementations that are shown.  first:
    headers of these cells.
    """
    rows: list[Row] = []
    compared: list[tuple[PrecisionName, str]] = []
    sides: tuple[Against, ...] = ("vs_baseline", "vs_oracle")
    for key, group, names in parts:
        for which, one in ((which, one) for which in sides for one in group.series(*names)):
            if pooled := one.pooled(which, tensor):
                other, good = pooled.largest.against.split()[0], ""
                if which == "vs_oracle":
                    other, good = "fp64", _within(one, tensor)
                else:
                    compared += [(one.precision, part.against) for part in pooled.parts]
                rows.append(
                    (
                        *key,
                        one.name,
                        short_precision(one.precision),
                        other,
                        good,
                        *_cells(pooled, group),
                    )
                )
        if found := pool(group.cases, tensor, "floor"):
            rows.append((*key, "floor", "", "fp64", "", *_cells(found, group)))
    within = (
        *(f"within\n{fmt.tolerance(one)}" for one in TOLERANCES[1:]),
        f"{fmt.tolerance(OF_RMS)}\nof rms",
    )
    headers = (
        *first,
        "implementation",
        PRECISION,
        "against",
        "within\nbudget",
        "equal",
        *within,
        "rms\nerror",
        "largest\nerror",
        "largest\nvalue",
        "its position",
    )
    note = f"Compared with {baselines(compared)}." if compared else ""
    align = f"{'l' * len(first)}lll{'r' * 8}l"
    return filled(
        strings(title, headers, folded(rows, len(first) + 1), align, keys=len(first) + 3, note=note)
    )


def _within(one: Series, tensor: TensorName) -> str:
    good = [
        not each.reason for case in one.cases for each in case.accuracy if each.tensor == tensor
    ]
    return (
        "yes" if all(good) else "NO" if len(good) == 1 else f"NO: {good.count(False)}/{len(good)}"
    )


def _cells(found: Pooled, group: Group) -> Row:
    """Shares, errors, and the place of the largest: "(0, 5, 7, 3)", or "layer 3, chunk 2 (0, 5, 7,
    3)".
    """
    call, largest = found.case.call, found.largest
    where = [f"layer {layer_of(found.case)}"] if len(group.layers) > 1 else []
    where += [f"{group.noun} {call.number}"] if call and group.calls > len(group.layers) else []
    numbers = (found.rms_ratio, largest.max_abs, largest.scale_max_abs)
    return (
        *(fmt.percent(found.match_pct(one)) for one in TOLERANCES),
        fmt.percent(found.match_rms_pct(OF_RMS)),
        *map(fmt.small, numbers),
        f"{', '.join(where)} ({', '.join(map(str, largest.worst_position))})".lstrip(),
    )


def laws(report: Report) -> Table | None:
    """Which laws each implementation and precision obeys: "no" if any case breaks one."""
    found: dict[Row, list[str]] = {}
    for name, precision, probe in _worst_probes(report):
        if not probe.name.startswith(BETWEEN_CALLS):
            found.setdefault((name, precision, probe.holds, probe.detail), []).append(probe.name)
    rows = [(*row[:3], "; ".join(names), row[3]) for row, names in found.items()]
    headers = ("implementation", PRECISION, "holds", "laws", "why")
    return strings("Laws", headers, folded(rows, 1), "lllll", keys=3, wraps=3)


def between_calls(report: Report) -> Table | None:
    """A row for each law of a pool of states, and the first place where it does not hold."""
    rows = [
        (probe.name.removeprefix(BETWEEN_CALLS), name, precision, probe.holds, probe.detail)
        for name, precision, probe in _worst_probes(report)
        if probe.name.startswith(BETWEEN_CALLS)
    ]
    headers = ("law", "implementation", PRECISION, "holds", "first place, or why")
    return strings("State between calls", headers, folded(rows, 2), "lllll", keys=3, wraps=4)


def _worst_probes(report: Report) -> list[tuple[str, str, Probe]]:
    """(implementation, precision, a probe of each law), one that does not hold first."""
    probes = grouped(
        ((case, probe) for case in report.of_calls for probe in case.probes),
        lambda pair: (pair[0].implementation, short_precision(pair[0].precision), pair[1].name),
    )
    order = ("no", "yes", "not applicable")
    return [
        (name, precision, min((probe for _, probe in own), key=lambda one: order.index(one.holds)))
        for (name, precision, _), own in probes.items()
    ]


# --- launches, and what did not pass


def launches(report: Report) -> Table | None:
    """Every kernel as it was launched; equal launches share a row, which lists their precisions and
    sizes.
    """
    found: dict[Row, list[Case]] = {}
    for case in report.of_calls:
        for one in case.launches:
            names = case.implementation, case.variant, one.kernel
            resources = (
                fmt.count(one.registers),
                fmt.count(one.spills),
                fmt.size_words(one.shared_bytes),
            )
            config = (
                ", ".join(f"{name}={value}" for name, value in one.config.items()) or fmt.MISSING
            )
            found.setdefault(
                (*names, *resources, fmt.percent(one.warps_pct, 0), config), []
            ).append(case)
    kinds: tuple[Callable[[Case], str], ...] = (
        lambda case: short_precision(case.precision),
        lambda case: case.place if isinstance(case.task, Drawn) else case.size,
    )
    every = grouped(report.of_calls, lambda case: case.implementation)

    def used(cases: Sequence[Case]) -> str:
        """Precisions and sizes, if not all of the implementation."""
        own = every[cases[0].implementation]
        ordered = sorted(cases, key=lambda case: (PRECISIONS.index(case.precision), -case.seqlen))
        some = (
            dict.fromkeys(map(kind, ordered))
            for kind in kinds
            if set(map(kind, cases)) < set(map(kind, own))
        )
        return " at ".join(map("; ".join, some)) or "all"

    headers = (
        "implementation",
        "variant",
        "kernel",
        "registers",
        "spills",
        "shared",
        "occupancy",
        "configuration",
        "used for",
    )
    rows = [(*cells, used(cases)) for cells, cases in found.items()]
    known = any(row[3] != fmt.MISSING for row in rows)
    note = "Registers and spills are per thread, shared memory per block." if known else ""
    made = strings(
        "Kernels as they were launched", headers, rows, "lllrrrrll", keys=3, wraps=7, note=note
    )
    return filled(made)


def reasons(report: Report) -> Table | None:
    """Every case that did not pass, or passed with a remark; those with the same reason share a
    row.
    """
    found: dict[Row, list[Case]] = {}
    for case in sorted(report.cases, key=lambda case: case.result == "passed"):
        if case.result != "passed" or case.why:
            bad = ((one.tensor, one.vs_oracle.first_nonfinite) for one in case.accuracy)
            first = next(
                (f"{tensor}{list(place)}" for tensor, place in bad if place is not None),
                fmt.MISSING,
            )
            why = " ".join(case.why.split())
            found.setdefault(
                (case.result, case.kernel, short_precision(case.precision), why, first), []
            ).append(case)
    rows = []
    for cells, cases in found.items():
        sizes = grouped(cases, lambda case: case.size if case.layer else "").items()
        where = "; ".join(f"{layer_words(own)}{f' at {size}' * bool(size)}" for size, own in sizes)
        rows.append((*cells[:3], where, *cells[3:]))
    hidden = len(rows) - _MOST_ROWS
    headers = ("result", "implementation", PRECISION, "where", "reason", "first NaN\nor Inf")
    note = (
        f"{fmt.plural(hidden, 'more row')} left out; every case is in the JSON report."
        if hidden > 0
        else ""
    )
    made = strings(
        "Failures, refusals, remarks",
        headers,
        rows[:_MOST_ROWS],
        "llllll",
        keys=3,
        wraps=4,
        note=note,
    )
    return filled(made)


def again(report: Report, case: Case) -> str:
    """A sentence with the command that runs just this case; empty if there is none."""
    words = shlex.join(report.again(case))
    return words and f".  Again: {words}"


def repeats(report: Report) -> Table | None:
    """The command that runs it again, of every case that did not pass or passed with a remark."""
    found = [
        case
        for case in report.cases
        if (case.result != "passed" or case.why) and report.again(case)
    ]
    columns: tuple[Column[Case], ...] = (
        text("id", lambda case: case.id),
        text("case", lambda case: case.name),
        text("command", lambda case: shlex.join(report.again(case)), wraps=True),
    )
    note = "'ssdprof case ID --script' prints a Python file that does the same."
    return table("Run one case again", columns, found[:_MOST_ROWS], note=note)


# --- of a bench: a table for each shape, dtype, draw and layout


def _of_shape(report: Report) -> dict[str, list[Group]]:
    """Title -> its groups."""

    def title(group: Group) -> str:
        drawn = group.cases[0].task
        assert isinstance(drawn, Drawn)
        inputs = ", ".join((drawn.dims.dtype, *drawn.ways, f"{drawn.layout} inputs"))
        return f"{drawn.shape} ({drawn.shape_words}), {inputs}"

    return grouped(groups(report), title)


def speed_of_bench(report: Report) -> Iterator[Table | None]:
    def only(row: Series) -> Case:
        return row.cases[0]

    first: tuple[Column[Series], ...] = (
        text("sequences x\ntokens", lambda row: row.group.size),
        *NAMES,
        text("over", lambda row: row.rivals[0].split()[0] if row.rivals else fmt.MISSING),
        *lifted(
            only,
            Column("chunk", lambda case: fmt.count(case.chunk_size)),
            Column(
                "first\ncall",
                lambda case: f"{one.seconds:.1f} s" if (one := case.first_call) else fmt.MISSING,
            ),
        ),
    )
    for name, own in _of_shape(report).items():
        yield speeds(f"Speed: {name}", [one for group in own for one in group.series()], first)


def accuracy_of_bench(report: Report) -> Iterator[Table | None]:
    for name, own in _of_shape(report).items():
        for tensor, shown in SHOWN.items():
            parts = [((group.size,), group, group.implementations) for group in own]
            yield errors(f"Accuracy of the {shown}: {name}", tensor, parts, "sequences x\ntokens")
