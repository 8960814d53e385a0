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
from ssdprof.report.table import PRECISION, Table, TableRow, fold_precisions, is_filled, table

# The rows of a group in a table of errors: their first cells, the group, and the implementations to
# show, which are all if none is named.
GroupRows = tuple[TableRow, Group, Sequence[str]]
SHOWN: dict[TensorName, str] = {"out": "output", "final_states": "final states"}
SPEED_READING = (
    "Device: the time on the GPU alone.  Call: a Python call on an idle GPU, launches included.  "
    "Speedup: over the baseline; in brackets its 95 % interval.  Tokens per s: of the prompt, by "
    "device time.  % of roofline: the least time in which this GPU can move the bytes and do the "
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
_RMS_TOLERANCE = 1e-3  # of the column "of rms": one of `TOLERANCES[1:]`
_MOST_ROWS = 40  # of a table of reasons or of commands; the JSON report has every case

# --- speed

NAMES = ("implementation", PRECISION)


def names(series: Series) -> TableRow:
    """The cells of `NAMES`."""
    return {"implementation": series.name, PRECISION: short_precision(series.precision)}


def untimed(case: Case) -> str:
    """The word in place of a time: the case's result, or "not timed" if the case passed."""
    return "not timed" if case.result == "passed" else case.result


def speed(series: Series) -> TableRow:
    """The times of a series, summed over its timed calls.

    Without a timed call the row has a dash as its speedup, and the reason as its verdict.
    """
    row = {"speedup,\ndevice": fmt.speedup(series.speedup())}
    if not series.timed:
        return row | {"verdict": fmt.words(dict.fromkeys(map(untimed, series.cases)))}
    is_one_process = series.group.report.samplers == 1  # whose call times have no interval
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
    title: str, rows: Sequence[tuple[TableRow, Series]], text_headings: Sequence[str], *notes: str
) -> Table:
    """A table of speeds.  It has no row if nothing was timed.

    rows: each row's first cells, and the series whose speed follows them.  The cells up to the
        precision identify the row.
    text_headings: the headings of those first cells that are texts.
    notes: further sentences of the table's note.
    """
    if not any(series.timed for _, series in rows):
        return table(title, (), text_headings)
    compared = []
    for _, series in rows:
        compared += [(series.precision, baseline) for baseline in series.baselines]
    first_cells, first_series = rows[0]
    rule = fmt.verdict_rule(first_series.group.report.smallest_difference)
    note = "  ".join((f"Baseline: {baselines(compared)}.", rule, *notes))
    cells = (first | speed(series) for first, series in rows)
    keys = list(first_cells).index(PRECISION) + 1
    return table(title, cells, text_headings, note=note, keys=keys)


def total_speed(group: Group) -> Table:
    """A row for each series of a group, summed over its timed calls."""
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
    for of_layer in group.by_layer():
        for series in of_layer.series():
            rows.append(({"layer": str(of_layer.layers[0])} | names(series), series))
    return speeds(f"Speed of each layer {group.where}", rows, NAMES)


def baselines(pairs: Iterable[tuple[PrecisionName, str]]) -> str:
    """The baselines of a table in words: "unfused, exact, with the same state dtype", "mamba_ssm
    exact, bf16 states or unfused exact, fp32 states", or "none" without pairs.

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
    """A table for each tensor, with the errors of the compared implementations in each layer of the
    group; those of the baseline if none was compared.
    """
    layers = [
        ({"layer": str(of_layer.layers[0])}, of_layer, group.compared)
        for of_layer in group.by_layer()
    ]
    return _accuracies(f" of each layer {group.where}", layers)


def _accuracies(where: str, groups_of_rows: Sequence[GroupRows]) -> Iterator[Table]:
    """A table for each tensor.  where: the end of the title, which names the groups."""
    for tensor, name in SHOWN.items():
        yield errors(f"Accuracy of the {name}{where}", tensor, groups_of_rows)


def errors(title: str, tensor: TensorName, groups_of_rows: Sequence[GroupRows]) -> Table:
    """For each group, a row for each series against its baseline, then a row for each series
    against fp64, then a row for the floor.  Precisions with the same numbers share a row.

    A series without deviations has no row, and a column without a value is left out.

    groups_of_rows: at least one.
    """
    rows: list[TableRow] = []
    compared: list[tuple[PrecisionName, str]] = []
    for first, group, implementations in groups_of_rows:
        shown = group.series(*implementations)
        for series in shown:
            if pooled := series.pooled("vs_baseline", tensor):
                compared += [(series.precision, part.against) for part in pooled.parts]
                baseline = pooled.largest.against.split()[0]
                rows.append(first | names(series) | _errors(pooled, group, baseline))
        for series in shown:
            if pooled := series.pooled("vs_oracle", tensor):
                within = budget_word(series, tensor)
                rows.append(first | names(series) | _errors(pooled, group, "fp64", within))
        if floor := pool(group.cases, tensor, "floor"):
            names_of_floor = {"implementation": "floor", PRECISION: ""}
            rows.append(first | names_of_floor | _errors(floor, group, "fp64"))
    first_cells, *_ = groups_of_rows[0]
    keys = (*first_cells, *NAMES, "against")
    note = f"Compared with {baselines(compared)}." if compared else ""
    text_headings = (*keys, "its position")
    all_columns = table(title, fold_precisions(rows), text_headings, keys=len(keys), note=note)
    return all_columns.without_empty_columns()


def _errors(pooled: Pooled, group: Group, against: str, within_budget: str = "") -> TableRow:
    """The shares of matching elements, the errors, and the position of the largest error.

    The position is "(0, 5, 7, 3)".  The layer precedes it if the group has several, and so does the
    number of the call if a layer has several calls: "layer 3, chunk 2 (0, 5, 7, 3)".

    against: the other tensor, in words.
    within_budget: the cell of that column; empty but for a series against fp64.
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
    """The share of elements within each of the tolerances, and within `_RMS_TOLERANCE` relative to
    an RMS (`Deviation.match_rms_pct`).
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
    """The share of elements within the tolerance.

    A dash without deviations, and where the tolerance is so large that the share says little.  That
    is assumed in old records, which lack the largest value, of any tolerance but 0.
    """
    if pooled is None or (pooled.largest_value or 0.0) < LEAST_VALUE * tolerance:
        return fmt.MISSING
    return fmt.percent(pooled.match_pct(tolerance))


def budget_word(series: Series, tensor: TensorName) -> str:
    """Whether a tensor passes in all calls (see `Accuracy.reason`): "yes", "NO", or "NO: 2/3" if it
    does not in two of three calls.

    At least one call has errors of the tensor.
    """
    accuracies = list(filter(None, (case.tensor(tensor) for case in series.cases)))
    outside = [accuracy for accuracy in accuracies if accuracy.reason]
    if not outside:
        return "yes"
    return "NO" if len(accuracies) == 1 else f"NO: {len(outside)}/{len(accuracies)}"


def laws(report: Report) -> Iterator[Table]:
    """Two tables of the laws, and whether each implementation obeys them at each precision: the
    laws of single calls, and the laws of a pool of states between calls.

    Laws with the same result and the same reason share a row.  Where cases differ, the result is
    that of `_decisive_probes`.
    """
    probes = _decisive_probes(report)
    for title, are_of_pool in (("Laws", False), ("State between calls", True)):
        laws_of_row: dict[tuple[str, ...], list[str]] = {}
        for (name, precision, law), probe in probes.items():
            if law.startswith(BETWEEN_CALLS) == are_of_pool:
                row_key = (name, precision, probe.holds, probe.detail)
                laws_of_row.setdefault(row_key, []).append(law.removeprefix(BETWEEN_CALLS))
        rows = [
            {
                "implementation": name,
                PRECISION: precision,
                "holds": holds,
                "laws": "; ".join(law_names),
                "why": detail,
            }
            for (name, precision, holds, detail), law_names in laws_of_row.items()
        ]
        text_headings = (*NAMES, "holds", "laws", "why")
        keys = len(NAMES) + 1  # and "holds"
        yield table(title, fold_precisions(rows), text_headings, keys=keys, wraps="why")


def _decisive_probes(report: Report) -> dict[tuple[str, str, str], Probe]:
    """(implementation, precision, law) -> the probe that decides whether the law holds.

    If cases differ, the first one that found the law broken decides; without such a case one that
    found that it holds, and else one that did not test it.
    """
    decisive_first = ("no", "yes", "not tested", "not applicable")
    decisive: dict[tuple[str, str, str], Probe] = {}
    for case in report.of_calls:
        for probe in case.probes:
            key = (case.implementation, short_precision(case.precision), probe.name)
            earlier = decisive.setdefault(key, probe)
            if decisive_first.index(probe.holds) < decisive_first.index(earlier.holds):
                decisive[key] = probe
    return decisive


# --- launches, and what did not pass


def launches(report: Report) -> Table:
    """The kernels as they were launched.

    Equal launches share a row, which lists the precisions, sizes and layers that they were used
    for.
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
            # launches are equal if all their cells are, which are therefore the key
            cases_of_rows.setdefault(tuple(row.items()), []).append(case)
    by_implementation = grouped(report.of_calls, lambda case: case.implementation)
    rows = [
        dict(cells) | {"used for": _used_for(cases, by_implementation[cases[0].implementation])}
        for cells, cases in cases_of_rows.items()
    ]
    has_resources = any(is_filled(row["registers"]) for row in rows)
    note = "Registers and spills are per thread, shared memory per block." if has_resources else ""
    text_headings = ("implementation", "variant", "kernel", "configuration", "used for")
    title = "Kernels as they were launched"
    all_columns = table(title, rows, text_headings, keys=3, wraps="configuration", note=note)
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
    """The precisions, sizes and layers of the cases: "exact, fp32; exact, fp16 at 1,024 tokens in
    layer 3".

    Precisions with other sizes follow after "and".  The precisions are left out if they are all
    precisions of the implementation, and so are the sizes and the layers.  "all" stands for both
    precisions and sizes if they are left out, as in "all in layer 3".
    """
    ordered = sorted(cases, key=lambda case: (PRECISIONS.index(case.precision), -case.seqlen))
    precisions_of_sizes: dict[tuple[str, ...], list[str]] = {}
    for precision, of_precision in grouped(ordered, _short_precision_of).items():
        sizes = tuple(dict.fromkeys(map(_key_or_size, of_precision)))
        precisions_of_sizes.setdefault(sizes, []).append(precision)
    all_precisions = set(map(_short_precision_of, of_implementation))
    all_sizes = set(map(_key_or_size, of_implementation))
    uses = []
    for sizes, precisions in precisions_of_sizes.items():
        stated = []  # the precisions, then the sizes, unless they are left out
        if set(precisions) < all_precisions:
            stated.append("; ".join(precisions))
        if set(sizes) < all_sizes:
            stated.append("; ".join(sizes))
        uses.append(" at ".join(stated) or "all")
    text = " and ".join(uses)
    if set(map(layer_of, cases)) < set(map(layer_of, of_implementation)):
        text += f" in {layer_words(cases)}"
    return text


def _short_precision_of(case: Case) -> str:
    return short_precision(case.precision)


def _key_or_size(case: Case) -> str:
    """The inputs of a bench's case, or the size of a captured call."""
    return case.case_key if isinstance(case.task, Generated) else case.size


def reasons(report: Report) -> Table:
    """The cases that did not pass, then those that passed with a remark.

    Cases of an implementation and a precision with the same reason share a row.
    """
    remarkable = [case for case in report.cases if case.result != "passed" or case.why]
    remarkable.sort(key=lambda case: case.result == "passed")
    rows = [
        {
            "result": result,
            "implementation": kernel,
            PRECISION: short_precision(precision),
            "where": _layers_and_sizes(cases),
            "reason": reason,
            "first NaN\nor Inf": first_nonfinite,
        }
        for (result, kernel, precision, reason, first_nonfinite), cases in grouped(
            remarkable, _trouble
        ).items()
    ]
    text_headings = ("result", *NAMES, "where", "reason", "first NaN\nor Inf")
    all_columns = table(
        "Failures, refusals, remarks",
        rows[:_MOST_ROWS],
        text_headings,
        keys=1 + len(NAMES),
        wraps="reason",
        note=_left_out(rows),
    )
    return all_columns.without_empty_columns()


def _left_out(rows: Sequence[TableRow]) -> str:
    """How many of the rows follow after the first `_MOST_ROWS`, in words; empty if none does."""
    hidden = len(rows) - _MOST_ROWS
    if hidden <= 0:
        return ""
    return f"{fmt.plural(hidden, 'more row')} left out; every case is in the JSON report."


def _trouble(case: Case) -> tuple[str, ...]:
    """(result, kernel, precision, reason, position of the first element that is not finite).  The
    position is "out[0, 1, 2, 3]", or a dash if all elements that were compared are finite.
    """
    first_nonfinite = fmt.MISSING
    for accuracy in case.accuracy:
        position = accuracy.vs_oracle.first_nonfinite
        if position is not None:
            first_nonfinite = f"{accuracy.tensor}{list(position)}"
            break
    reason = " ".join(case.why.split())
    return case.result, case.kernel, case.precision, reason, first_nonfinite


def _layers_and_sizes(cases: Sequence[Case]) -> str:
    """The layers of the cases at each size: "layers 3, 9 at 1,024 tokens; layer 3 at 512 tokens".
    Cases without a layer have their keys instead.
    """
    by_size = grouped(cases, lambda case: case.size if case.layer else "")
    words = []
    for size, cases_of_size in by_size.items():
        layers = layer_words(cases_of_size)
        words.append(f"{layers} at {size}" if size else layers)
    return "; ".join(words)


def again(report: Report, case: Case) -> str:
    """The end of a sentence: the case's id, and the command that runs this case and its baseline.

    Empty if the report was not made by a command.
    """
    command = shlex.join(report.again(case))
    return f".  Case {case.id}, again: {command}" if command else ""


def repeats(report: Report) -> Table:
    """The commands that run cases again which did not pass, or passed with a remark; of many such
    cases the first `_MOST_ROWS`.
    """
    rows = [
        {"id": case.id, "case": case.name, "command": shlex.join(report.again(case))}
        for case in report.cases
        if (case.result != "passed" or case.why) and report.again(case)
    ]
    note = (
        "'ssdprof case ID --save DIR' writes the tensors of a failure, and a script for them.  "
        f"{_left_out(rows)}"
    ).rstrip()
    text_headings = ("id", "case", "command")
    return table("Run one case again", rows[:_MOST_ROWS], text_headings, wraps="command", note=note)


# --- of a bench: tables for each shape, dtype, draw and layout


def by_shape(report: Report) -> dict[str, list[Group]]:
    """What the titles of a bench's tables name -> the groups in these tables.

    It is all that the groups have in common: "mamba2-2.7b (80x64, N 128, G 1), bf16, contiguous
    inputs".
    """

    def in_common(group: Group) -> str:
        generated = group.cases[0].task
        assert isinstance(generated, Generated)
        inputs = ", ".join((generated.dims.dtype, *generated.ways, f"{generated.layout} inputs"))
        return f"{generated.shape} ({generated.shape_words}), {inputs}"

    return grouped(groups(report), in_common)


_SIZE = "sequences x\ntokens"


def speed_of_bench(report: Report) -> Iterator[Table]:
    """The times and speedups of a bench, in a table for each shape, dtype, draw and layout."""
    for inputs, groups_of_shape in by_shape(report).items():
        rows = []
        for group in groups_of_shape:
            rows += [(_of_bench(series), series) for series in group.series()]
        yield speeds(f"Speed: {inputs}", rows, (_SIZE, *NAMES, "over"))


def _of_bench(series: Series) -> TableRow:
    """The first cells of a series in a table of a bench's speeds.

    Its group, on the same inputs, has one case for each implementation and precision.
    """
    (case,) = series.cases
    first_call = case.first_call
    return {
        _SIZE: series.group.size,
        **names(series),
        "over": series.baselines[0].split()[0] if series.baselines else fmt.MISSING,
        "chunk": fmt.count(case.chunk_size),
        "first\ncall": f"{first_call.seconds:.1f} s" if first_call else fmt.MISSING,
    }


def accuracy_of_bench(report: Report) -> Iterator[Table]:
    """The errors of a bench, in a table for each shape, dtype, draw, layout and tensor."""
    for inputs, groups_of_shape in by_shape(report).items():
        groups_of_rows = [
            ({_SIZE: group.size}, group, group.implementations) for group in groups_of_shape
        ]
        yield from _accuracies(f": {inputs}", groups_of_rows)
