"""The tables of calls, captured or generated: speed, accuracy, laws, launches, and the reasons of
cases that did not pass.
"""

import shlex
from collections.abc import Iterable, Iterator, Sequence

from ssdprof.core import words as fmt
from ssdprof.core.accuracy import LEAST_VALUE
from ssdprof.core.base import (
    BETWEEN_CALLS,
    PRECISIONS,
    PrecisionName,
    Probe,
    TensorName,
    exact_precision,
    grouped,
    short_precision,
)
from ssdprof.core.case import Case, Generated, Launch
from ssdprof.core.report import Report
from ssdprof.report.groups import Group, Pooled, Series, groups, layer_of, layer_words, pool
from ssdprof.report.table import (
    PRECISION,
    Cells,
    Table,
    TableRow,
    fold_precisions,
    is_filled,
    table,
)

# Input of a table of errors: the first cells of its rows, a group, and the implementations to show.
ErrorRows = tuple[TableRow, Group, Sequence[str]]
SHOWN: dict[TensorName, str] = {"out": "output", "final_states": "final states"}
SPEED_READING = (
    "Device: the time on the GPU alone.  Call: a Python call on an idle GPU, launches included.  "
    "Speedup: over the baseline, with its 95 % interval.  Tokens per s: of the prompt, by device "
    "time.  % of roofline: the least time in which this GPU can move the bytes and do the "
    "arithmetic, divided by the device time.  Extra memory: allocated by the call beyond its "
    "outputs."
)
ACCURACY_READING = (
    "Match @ t: share of elements with |a - b| <= t + t |b|, rounded down; a dash where t is over "
    '2 % of the largest value; equal: t = 0.  Where it says "of rms", with t (rms + |b|), where '
    "rms is the tensor's own.  Rms error: rms(a - b) / rms(b).  Floor: how the fp64 answer itself "
    "scores once it is rounded to the tensor's dtype; no implementation can do better.  In several "
    "calls, shares are of all elements, errors those of the worst call.  Positions count from 0: "
    "(row, token, head, channel) in the output, (sequence, head, row, column) in the final states."
)
_RMS_TOLERANCE = 1e-3  # the tolerance relative to the tensor's own RMS
_MOST_ROWS = 40  # of a table of reasons; the JSON report has the others

# --- speed

NAMES = ("implementation", PRECISION)


def names(series: Series) -> TableRow:
    """The cells of `NAMES`."""
    return {"implementation": series.name, PRECISION: short_precision(series.precision)}


def untimed(case: Case) -> str:
    """The word in place of a time: the case's result, or "not timed" if the case passed."""
    return case.result.replace("passed", "not timed")


def speed(series: Series) -> TableRow:
    """The times of a series, summed over its timed calls.

    Without a timed call the row has only the reason, as its verdict.
    """
    row = {"speedup,\ndevice": fmt.speedup(series.speedup())}
    if not series.timed:
        return row | {"verdict": fmt.words(dict.fromkeys(map(untimed, series.cases)))}
    is_one_process = series.group.report.samplers == 1  # so that call times have no interval
    return row | {
        "verdict": series.verdict or fmt.MISSING,
        "speedup,\ncall": fmt.speedup(series.speedup("call"), by_call=is_one_process),
        "device\ntime": fmt.duration(series.us("device")),
        "tokens\nper s": fmt.rate(series.tokens_per_s),
        "baseline,\ndevice": fmt.duration(series.baseline_us),
        "% of\nroofline": fmt.percent(series.floor_pct, 1),
        "call\ntime": fmt.duration(series.us("call")),
        "extra\nmemory": fmt.size_words(series.workspace_bytes),
    }


def speeds(
    title: str, rows: Sequence[tuple[TableRow, Series]], words: Sequence[str], *notes: str
) -> Table:
    """A table of speeds.  It has no row if nothing was timed.

    rows: the series of each row with the row's first cells, which begin with those that identify
        it, the last of them the precision.
    words: the headings of those first cells that are texts.
    notes: further sentences of the table's note.
    """
    if not any(series.timed for _, series in rows):
        return table(title, (), words)
    compared = []
    for _, series in rows:
        compared += [(series.precision, baseline) for baseline in series.baselines]
    first_cells, first_series = rows[0]
    rule = fmt.verdict_rule(first_series.group.report.smallest_difference)
    note = "  ".join((f"Baseline: {baselines(compared)}.", rule, *notes))
    cells = (first | speed(series) for first, series in rows)
    keys = list(first_cells).index(PRECISION) + 1
    return table(title, cells, words, note=note, keys=keys)


def total_speed(group: Group) -> Table:
    """A row for each series of a group, summed over its calls."""
    unit = "layers" if group.calls == len(group.layers) else "calls"
    rows = [(names(series), series) for series in group.series()]
    title = f"Speed {group.where}, {group.extent}"
    notes = []
    if group.calls > 1:
        title = f"Speed {group.where}, sum over {group.extent}"
        notes.append(
            "The interval of a sum assumes that all calls are at the same end of their intervals."
        )
    if any(len(series.timed) < group.calls for _, series in rows):
        for row, series in rows:
            row[unit] = f"{len(series.timed)} of {group.calls}"
        notes.append(
            f"Each speedup compares the same {unit}; times over different numbers of {unit} do not "
            "compare."
        )
    return speeds(title, rows, NAMES, *notes)


def speed_by_layer(group: Group) -> Table:
    """A row for each series in each layer of a group."""
    rows = []
    for layer in group.by_layer():
        for series in layer.series():
            rows.append(({"layer": str(layer.layers[0])} | names(series), series))
    return speeds(f"Speed of each layer {group.where}", rows, NAMES)


def baselines(pairs: Iterable[tuple[PrecisionName, str]]) -> str:
    """The baselines of a table in words.

    pairs: precisions, each with the implementation and the precision that it was compared with:
        ("relaxed, bf16 states", "unfused exact, bf16 states").
    """
    distinct_pairs = dict.fromkeys(pairs)
    implementations = {baseline.split()[0] for _, baseline in distinct_pairs}
    is_exact_of_same_states = all(
        baseline.endswith(f" {exact_precision(precision)}")
        for precision, baseline in distinct_pairs
    )
    if len(implementations) == 1 and is_exact_of_same_states:
        return f"{implementations.pop()}, exact, with the same state dtype"
    return " or ".join(dict.fromkeys(baseline for _, baseline in distinct_pairs)) or "none"


# --- accuracy


def accuracies(group: Group) -> Iterator[Table]:
    """A table for each tensor, in which the errors of all calls of the group are pooled."""
    extent = f"{group.extent} pooled" if group.calls > 1 else group.extent
    shown = (*group.compared, group.baseline)
    return _accuracies(f" {group.where}, {extent}", [({}, group, shown)])


def errors_by_layer(group: Group) -> Iterator[Table]:
    """A table for each tensor, with the errors in each layer of the group."""
    parts = [({"layer": str(layer.layers[0])}, layer, group.compared) for layer in group.by_layer()]
    return _accuracies(f" of each layer {group.where}", parts)


def _accuracies(where: str, parts: Sequence[ErrorRows]) -> Iterator[Table]:
    """A table for each tensor.  where: the end of the title, which names the group."""
    for tensor, name in SHOWN.items():
        yield errors(f"Accuracy of the {name}{where}", tensor, parts)


def errors(title: str, tensor: TensorName, parts: Sequence[ErrorRows]) -> Table:
    """For each part, a row for each series against its baseline, then a row for each series against
    fp64, then a row for the floor.  Precisions with the same numbers share a row.
    """
    rows: list[TableRow] = []
    compared: list[tuple[PrecisionName, str]] = []
    for first, group, implementations in parts:
        shown = group.series(*implementations)
        for series in shown:
            if pooled := series.pooled("vs_baseline", tensor):
                compared += [(series.precision, part.against) for part in pooled.parts]
                baseline = pooled.largest.against.split()[0]
                rows.append(first | names(series) | _errors(pooled, group, baseline))
        for series in shown:
            if pooled := series.pooled("vs_oracle", tensor):
                within = _within_budget(series, tensor)
                rows.append(first | names(series) | _errors(pooled, group, "fp64", within))
        if floor := pool(group.cases, tensor, "floor"):
            names_of_floor = {"implementation": "floor", PRECISION: ""}
            rows.append(first | names_of_floor | _errors(floor, group, "fp64"))
    keys = (*parts[0][0], *NAMES, "against")
    note = f"Compared with {baselines(compared)}." if compared else ""
    words = (*keys, "its position")
    all_columns = table(title, fold_precisions(rows), words, keys=len(keys), note=note)
    return all_columns.without_empty_columns()


def _errors(pooled: Pooled, group: Group, against: str, within_budget: str = "") -> TableRow:
    """The shares of matching elements, the errors, and the position of the largest error.

    The position is "(0, 5, 7, 3)", or "layer 3, chunk 2 (0, 5, 7, 3)" if the group has several
    layers and calls.
    """
    call = pooled.case.call
    largest = pooled.largest
    layer_and_call = []
    if len(group.layers) > 1:
        layer_and_call.append(f"layer {layer_of(pooled.case)}")
    if call and group.calls > len(group.layers):
        layer_and_call.append(f"{group.noun} {call.number}")
    position = f"({', '.join(map(str, largest.worst_position))})"
    return {
        "against": against,
        "within\nbudget": within_budget,
        "match,\nequal": match(pooled, 0.0),
        **matches(pooled, 1e-3, 1e-2),
        "rms\nerror": fmt.small(pooled.rms_ratio),
        "largest\nerror": fmt.small(largest.max_abs),
        "largest\nvalue": fmt.small(pooled.largest_value),
        "its position": f"{', '.join(layer_and_call)} {position}".lstrip(),
    }


def matches(pooled: Pooled | None, *tolerances: float) -> TableRow:
    """The share of elements within each tolerance, and within `_RMS_TOLERANCE` relative to the
    RMS.
    """
    return {
        **{match_heading(tolerance): match(pooled, tolerance) for tolerance in tolerances},
        f"@ {fmt.tolerance(_RMS_TOLERANCE)}\nof rms": fmt.percent(
            pooled and pooled.match_pct(_RMS_TOLERANCE, of_rms=True)
        ),
    }


def match_heading(tolerance: float) -> str:
    return f"match\n@ {fmt.tolerance(tolerance)}"


def match(pooled: Pooled | None, tolerance: float) -> str:
    """The share of elements within the tolerance; a dash where the tolerance is so large that the
    share says nothing.
    """
    if pooled is None or (pooled.largest_value or 0.0) < LEAST_VALUE * tolerance:
        return fmt.MISSING
    return fmt.percent(pooled.match_pct(tolerance))


def _within_budget(series: Series, tensor: TensorName) -> str:
    """Whether the errors are within their budgets: "yes", "NO", or "NO: 2/3" if they are outside
    in two of three calls.
    """
    errors = list(filter(None, (case.tensor(tensor) for case in series.cases)))
    outside = [error for error in errors if error.reason]
    if not outside:
        return "yes"
    return "NO" if len(errors) == 1 else f"NO: {len(outside)}/{len(errors)}"


def laws(report: Report) -> Iterator[Table]:
    """Two tables of the laws that each implementation obeys at each precision: the laws of single
    calls, and the laws of a pool of states between calls.

    A law holds if no case breaks it.  Laws with the same result share a row.
    """
    all_probes = _worst_probes(report)
    of_pool = [row for row in all_probes if row[2].name.startswith(BETWEEN_CALLS)]
    of_calls = [row for row in all_probes if row not in of_pool]
    for title, probes in (("Laws", of_calls), ("State between calls", of_pool)):
        equal = grouped(probes, lambda row: (*row[:2], row[2].holds, row[2].detail))
        rows = [
            {
                "implementation": name,
                PRECISION: precision,
                "holds": holds,
                "laws": "; ".join(probe.name.removeprefix(BETWEEN_CALLS) for *_, probe in same),
                "why": detail,
            }
            for (name, precision, holds, detail), same in equal.items()
        ]
        words = (*NAMES, "holds", "laws", "why")
        yield table(title, fold_precisions(rows), words, keys=3, wraps="why")


def _worst_probes(report: Report) -> list[tuple[str, str, Probe]]:
    """(implementation, precision, probe) for each law, implementation and precision.

    If the cases differ, the probe is one that found the law broken.
    """
    probes = []
    for case in report.of_calls:
        precision = short_precision(case.precision)
        probes += [(case.implementation, precision, probe) for probe in case.probes]
    of_laws = grouped(probes, lambda row: (row[0], row[1], row[2].name)).values()
    worst_first = ("no", "yes", "not tested", "not applicable")
    return [min(equal, key=lambda row: worst_first.index(row[2].holds)) for equal in of_laws]


# --- launches, and what did not pass


def launches(report: Report) -> Table:
    """The kernels as they were launched.

    Equal launches share a row, which lists the precisions and sizes that they were used for.
    """
    cases_of_rows: dict[tuple[tuple[str, str], ...], list[Case]] = {}
    for case in report.of_calls:
        for launch in case.launches:
            config = ", ".join(f"{name}={value}" for name, value in launch.config.items())
            row = {
                "implementation": case.implementation,
                "variant": case.variant,
                **resources(launch),
                "occupancy": fmt.percent(launch.warps_pct, 0),
                "configuration": config or fmt.MISSING,
            }
            cases_of_rows.setdefault(tuple(row.items()), []).append(case)
    by_implementation = grouped(report.of_calls, lambda case: case.implementation)
    rows = [
        dict(cells) | {"used for": _used_for(cases, by_implementation[cases[0].implementation])}
        for cells, cases in cases_of_rows.items()
    ]
    has_resources = any(is_filled(row["registers"]) for row in rows)
    note = "Registers and spills are per thread, shared memory per block." if has_resources else ""
    words = ("implementation", "variant", "kernel", "configuration", "used for")
    title = "Kernels as they were launched"
    all_columns = table(title, rows, words, keys=3, wraps="configuration", note=note)
    return all_columns.without_empty_columns()


def resources(launch: Launch) -> TableRow:
    """The name of a kernel, and the resources for which Triton compiled it."""
    return {
        "kernel": launch.kernel,
        "registers": fmt.count(launch.registers),
        "spills": fmt.count(launch.spills),
        "shared": fmt.size_words(launch.shared_bytes),
    }


def _used_for(cases: Sequence[Case], of_implementation: Sequence[Case]) -> str:
    """The precisions and sizes of the cases: "exact, fp32; exact, fp16 at 1,024 tokens".

    The precisions are left out if they are all precisions of the implementation, and so are the
    sizes; "all" if both are.
    """
    ordered = sorted(cases, key=lambda case: (PRECISIONS.index(case.precision), -case.seqlen))
    words = []
    for name_of in (_short_precision_of, _key_or_size):
        names = dict.fromkeys(map(name_of, ordered))
        if set(names) < set(map(name_of, of_implementation)):
            words.append("; ".join(names))
    return " at ".join(words) or "all"


def _short_precision_of(case: Case) -> str:
    return short_precision(case.precision)


def _key_or_size(case: Case) -> str:
    """The inputs of a bench's case, or the size of a captured call."""
    return case.case_key if isinstance(case.task, Generated) else case.size


def reasons(report: Report) -> Table:
    """The cases that did not pass, then those that passed with a remark.

    Cases with the same reason share a row.
    """
    remarkable = [case for case in report.cases if case.result != "passed" or case.why]
    remarkable.sort(key=lambda case: case.result == "passed")
    rows = [
        {
            "result": cases[0].result,
            "implementation": cases[0].kernel,
            PRECISION: short_precision(cases[0].precision),
            "where": _layers_and_sizes(cases),
            "reason": reason,
            "first NaN\nor Inf": first_nonfinite,
        }
        for (*_, reason, first_nonfinite), cases in grouped(remarkable, _trouble).items()
    ]
    note = ""
    hidden = len(rows) - _MOST_ROWS
    if hidden > 0:
        note = f"{fmt.plural(hidden, 'more row')} left out; every case is in the JSON report."
    title = "Failures, refusals, remarks"
    words = ("result", *NAMES, "where", "reason", "first NaN\nor Inf")
    all_columns = table(title, rows[:_MOST_ROWS], words, keys=3, wraps="reason", note=note)
    return all_columns.without_empty_columns()


def _trouble(case: Case) -> Cells:
    """(result, kernel, precision, reason, position of the first element that is not finite)."""
    first_nonfinite = fmt.MISSING
    for error in case.accuracy:
        position = error.vs_oracle.first_nonfinite
        if position is not None:
            first_nonfinite = f"{error.tensor}{list(position)}"
            break
    reason = " ".join(case.why.split())
    return case.result, case.kernel, case.precision, reason, first_nonfinite


def _layers_and_sizes(cases: Sequence[Case]) -> str:
    """The layers of the cases at each size: "layers 3, 9 at 1,024 tokens; layer 3 at 512
    tokens".
    """
    by_size = grouped(cases, lambda case: case.size if case.layer else "")
    words = []
    for size, cases_of_size in by_size.items():
        layers = layer_words(cases_of_size)
        words.append(f"{layers} at {size}" if size else layers)
    return "; ".join(words)


def again(report: Report, case: Case) -> str:
    """The end of a sentence: the case's id, and the command that runs this case alone.

    Empty if the report was not made by a command.
    """
    command = shlex.join(report.again(case))
    return f".  Case {case.id}, again: {command}" if command else ""


def repeats(report: Report) -> Table:
    """The commands that run cases again which did not pass, or passed with a remark."""
    rows = [
        {"id": case.id, "case": case.name, "command": shlex.join(report.again(case))}
        for case in report.cases
        if (case.result != "passed" or case.why) and report.again(case)
    ]
    note = "'ssdprof case ID --save DIR' writes the tensors of a failure, and a script for them."
    words = ("id", "case", "command")
    return table("Run one case again", rows[:_MOST_ROWS], words, wraps="command", note=note)


# --- of a bench: a table for each shape, dtype, draw and layout


def by_shape(report: Report) -> dict[str, list[Group]]:
    """The title of each table of a bench -> the groups in the table.

    A title names all that the groups have in common: "mamba2-2.7b (80x64, N 128, G 1), bf16,
    contiguous inputs".
    """

    def title(group: Group) -> str:
        generated = group.cases[0].task
        assert isinstance(generated, Generated)
        inputs = ", ".join((generated.dims.dtype, *generated.ways, f"{generated.layout} inputs"))
        return f"{generated.shape} ({generated.shape_words}), {inputs}"

    return grouped(groups(report), title)


_SIZE = "sequences x\ntokens"


def speed_of_bench(report: Report) -> Iterator[Table]:
    """The times and speedups of a bench, in a table for each shape."""
    for title, groups_of_shape in by_shape(report).items():
        rows = []
        for group in groups_of_shape:
            rows += [(_of_bench(series), series) for series in group.series()]
        yield speeds(f"Speed: {title}", rows, (_SIZE, *NAMES, "over"))


def _of_bench(series: Series) -> TableRow:
    """The first cells of a series in a table of a bench's speeds."""
    case = series.cases[0]
    first_call = case.first_call
    return {
        _SIZE: series.group.size,
        **names(series),
        "over": series.baselines[0].split()[0] if series.baselines else fmt.MISSING,
        "chunk": fmt.count(case.chunk_size),
        "first\ncall": f"{first_call.seconds:.1f} s" if first_call else fmt.MISSING,
    }


def accuracy_of_bench(report: Report) -> Iterator[Table]:
    """The errors of a bench, in a table for each shape and tensor."""
    for title, groups_of_shape in by_shape(report).items():
        parts = [({_SIZE: group.size}, group, group.implementations) for group in groups_of_shape]
        yield from _accuracies(f": {title}", parts)
