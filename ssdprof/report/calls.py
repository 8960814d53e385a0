"""Tables of calls, captured or generated: speed, accuracy, laws, launches, and what did not
pass.
"""

import shlex
from collections.abc import Iterable, Iterator, Sequence

from ssdprof.core import words as fmt
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
from ssdprof.report.table import PRECISION, Cells, Table, TableRow, fold_precisions, table

# of a table of errors: the first cells of its rows, a group, and the implementations to show
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
_LEAST_VALUE = 50  # times a tolerance, below which every element is within it
_OF_RMS = 1e-3  # the tolerance relative to the tensor's own RMS
_MOST_ROWS = 40  # if all cases fail, they have the same reason

# --- speed

NAMES = ("implementation", PRECISION)


def names(series: Series) -> TableRow:
    return {"implementation": series.name, PRECISION: short_precision(series.precision)}


def untimed(case: Case) -> str:
    """What stands in place of a time: the case's result, or "not timed"."""
    return case.result.replace("passed", "not timed")


def speed(series: Series) -> TableRow:
    """The times of a series, summed over its timed calls; without any only why."""
    row = {"speedup,\ndevice": fmt.speedup(series.speedup())}
    if not series.timed:
        return row | {"verdict": fmt.words(dict.fromkeys(map(untimed, series.cases)))}
    call_interval_is_known = series.group.report.samplers > 1
    return row | {
        "verdict": series.verdict or fmt.MISSING,
        "speedup,\ncall": fmt.speedup(series.speedup("call"), by_call=not call_interval_is_known),
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
    """The first cells of each row, by which it is identified, and its series; no row if nothing
    was timed.  words: headings of those cells that are texts.
    """
    if not any(series.timed for _, series in rows):
        return table(title, (), words)
    compared = []
    for _, series in rows:
        compared += [(series.precision, baseline) for baseline in series.baselines]
    counts = fmt.counts(rows[0][1].group.report.smallest_difference)
    note = "  ".join(filter(None, (f"Baseline: {baselines(compared)}.", counts, *notes)))
    cells = (first | speed(series) for first, series in rows)
    keys = list(rows[0][0]).index(PRECISION) + 1
    return table(title, cells, words, note=note, keys=keys)


def total_speed(group: Group) -> Table:
    """Every series, summed over its calls."""
    every = group.calls
    unit = "layers" if group.calls == len(group.layers) else "calls"
    rows = [(names(series), series) for series in group.series()]
    title = f"Speed {group.where}, {group.extent}"
    notes = []
    if every > 1:
        title = f"Speed {group.where}, sum over {group.extent}"
        notes.append(
            "The interval of a sum assumes that all calls are at the same end of their intervals."
        )
    if any(len(series.timed) < every for _, series in rows):
        for row, series in rows:
            row[unit] = f"{len(series.timed)} of {every}"
        notes.append(
            f"Each speedup compares the same {unit}; times over different numbers of {unit} do not "
            "compare."
        )
    return speeds(title, rows, NAMES, *notes)


def speed_by_layer(group: Group) -> Table:
    """Every series, layer by layer."""
    rows = []
    for layer in group.by_layer():
        for series in layer.series():
            rows.append(({"layer": str(layer.layers[0])} | names(series), series))
    return speeds(f"Speed of each layer {group.where}", rows, NAMES)


def baselines(pairs: Iterable[tuple[PrecisionName, str]]) -> str:
    """The baselines of all precisions as text.  pairs: (precision, baseline that it names)."""
    named = dict.fromkeys(pairs)
    implementations = {baseline.split()[0] for _, baseline in named}
    if len(implementations) == 1 and all(
        baseline.endswith(f" {exact_precision(precision)}") for precision, baseline in named
    ):
        return f"{implementations.pop()}, exact, with the same state dtype"
    return " or ".join(dict.fromkeys(baseline for _, baseline in named)) or "none"


# --- accuracy


def accuracies(group: Group) -> Iterator[Table]:
    """All calls of the group pooled."""
    extent = f"{group.extent} pooled" if group.calls > 1 else group.extent
    shown = (*group.compared, group.baseline)
    return _accuracies(f" {group.where}, {extent}", [({}, group, shown)])


def errors_by_layer(group: Group) -> Iterator[Table]:
    layers = list(group.by_layer())
    parts = [({"layer": str(layer.layers[0])}, layer, group.compared) for layer in layers]
    return _accuracies(f" of each layer {group.where}", parts)


def _accuracies(where: str, parts: Sequence[ErrorRows]) -> Iterator[Table]:
    """A table for each tensor."""
    for tensor, name in SHOWN.items():
        yield errors(f"Accuracy of the {name}{where}", tensor, parts)


def errors(title: str, tensor: TensorName, parts: Sequence[ErrorRows]) -> Table:
    """A row for each series against its baseline, one against fp64, and one for the floor;
    precisions with the same numbers share a row.

    """
    rows: list[TableRow] = []
    compared: list[tuple[PrecisionName, str]] = []
    for first, group, shown in parts:
        every = group.series(*shown)
        for series in every:
            if pooled := series.pooled("vs_baseline", tensor):
                compared += [(series.precision, part.against) for part in pooled.parts]
                baseline = pooled.largest.against.split()[0]
                rows.append(first | names(series) | _errors(pooled, group, baseline))
        for series in every:
            if pooled := series.pooled("vs_oracle", tensor):
                within = _within_budget(series, tensor)
                rows.append(first | names(series) | _errors(pooled, group, "fp64", within))
        if floor := pool(group.cases, tensor, "floor"):
            names_of_floor = {"implementation": "floor", PRECISION: ""}
            rows.append(first | names_of_floor | _errors(floor, group, "fp64"))
    keys = (*parts[0][0], *NAMES, "against")
    note = f"Compared with {baselines(compared)}." if compared else ""
    words = (*keys, "its position")
    whole = table(title, fold_precisions(rows), words, keys=len(keys), note=note)
    return whole.without_empty_columns()


def _errors(pooled: Pooled, group: Group, against: str, within_budget: str = "") -> TableRow:
    """Shares, errors, and the place of the largest: "(0, 5, 7, 3)", or "layer 3, chunk 2 (0, 5, 7,
    3)".
    """
    call = pooled.case.call
    largest = pooled.largest
    place = []
    if len(group.layers) > 1:
        place.append(f"layer {layer_of(pooled.case)}")
    if call and group.calls > len(group.layers):
        place.append(f"{group.noun} {call.number}")
    position = f"({', '.join(map(str, largest.worst_position))})"
    return {
        "against": against,
        "within\nbudget": within_budget,
        "match,\nequal": match(pooled, 0.0),
        **matches(pooled, 1e-3, 1e-2),
        "rms\nerror": fmt.small(pooled.rms_ratio),
        "largest\nerror": fmt.small(largest.max_abs),
        "largest\nvalue": fmt.small(largest.scale_max_abs),
        "its position": f"{', '.join(place)} {position}".lstrip(),
    }


def matches(pooled: Pooled | None, *tolerances: float) -> TableRow:
    """The share of elements within each tolerance, and within one relative to the RMS."""
    return {
        **{match_heading(tolerance): match(pooled, tolerance) for tolerance in tolerances},
        f"@ {fmt.tolerance(_OF_RMS)}\nof rms": fmt.percent(
            pooled and pooled.match_pct(_OF_RMS, of_rms=True)
        ),
    }


def match_heading(tolerance: float) -> str:
    return f"match\n@ {fmt.tolerance(tolerance)}"


def match(pooled: Pooled | None, tolerance: float) -> str:
    """The share of elements; a dash where the tolerance is too large to say anything."""
    if pooled is None or (pooled.largest.scale_max_abs or 0.0) < _LEAST_VALUE * tolerance:
        return fmt.MISSING
    return fmt.percent(pooled.match_pct(tolerance))


def _within_budget(series: Series, tensor: TensorName) -> str:
    """ "yes", "NO", or "NO: 2/3" of several calls."""
    errors = [error for case in series.cases for error in case.accuracy if error.tensor == tensor]
    outside = sum(bool(error.reason) for error in errors)
    if not outside:
        return "yes"
    return "NO" if len(errors) == 1 else f"NO: {outside}/{len(errors)}"


def laws(report: Report) -> Iterator[Table]:
    """Which laws each implementation and precision obeys, "no" if any case breaks one; then those
    of a pool of states between calls.
    """
    of_pool = grouped(_worst_probes(report), lambda row: row[2].name.startswith(BETWEEN_CALLS))
    for is_of_pool, title in ((False, "Laws"), (True, "State between calls")):
        probes = of_pool.get(is_of_pool, [])
        equal = grouped(probes, lambda row: (*row[:2], row[2].holds, row[2].detail))
        rows = [
            {
                "implementation": name,
                PRECISION: precision,
                "holds": holds,
                "laws": "; ".join(probe.name.removeprefix(BETWEEN_CALLS) for *_, probe in same),
                "why": why,
            }
            for (name, precision, holds, why), same in equal.items()
        ]
        words = (*NAMES, "holds", "laws", "why")
        yield table(title, fold_precisions(rows), words, keys=3, wraps="why")


def _worst_probes(report: Report) -> list[tuple[str, str, Probe]]:
    """(implementation, precision, a probe of each law), one that does not hold first."""
    probes = [
        (case.implementation, short_precision(case.precision), probe)
        for case in report.of_calls
        for probe in case.probes
    ]
    of_laws = grouped(probes, lambda row: (row[0], row[1], row[2].name)).values()
    order = ("no", "yes", "not applicable")
    return [min(equal, key=lambda row: order.index(row[2].holds)) for equal in of_laws]


# --- launches, and what did not pass


def launches(report: Report) -> Table:
    """Every kernel as it was launched; equal launches share a row, which lists their precisions and
    sizes.
    """
    equal: dict[tuple[tuple[str, str], ...], list[Case]] = {}
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
            equal.setdefault(tuple(row.items()), []).append(case)
    every = grouped(report.of_calls, lambda case: case.implementation)
    rows = [
        dict(items) | {"used for": _used_for(cases, every[cases[0].implementation])}
        for items, cases in equal.items()
    ]
    known = any(row["registers"] != fmt.MISSING for row in rows)
    note = "Registers and spills are per thread, shared memory per block." if known else ""
    words = ("implementation", "variant", "kernel", "configuration", "used for")
    title = "Kernels as they were launched"
    shown = table(title, rows, words, keys=3, wraps="configuration", note=note)
    return shown.without_empty_columns()


def resources(launch: Launch) -> TableRow:
    """A kernel as Triton compiled it."""
    return {
        "kernel": launch.kernel,
        "registers": fmt.count(launch.registers),
        "spills": fmt.count(launch.spills),
        "shared": fmt.size_words(launch.shared_bytes),
    }


def _used_for(cases: Sequence[Case], of_implementation: Sequence[Case]) -> str:
    """The precisions and sizes of the cases, if they are not all of the implementation's: "exact,
    fp32; exact, fp16 at 1,024 tokens".
    """
    ordered = sorted(cases, key=lambda case: (PRECISIONS.index(case.precision), -case.seqlen))
    words = []
    for name_of in (_short_precision_of, _place_or_size):
        names = dict.fromkeys(map(name_of, ordered))
        if set(names) < set(map(name_of, of_implementation)):
            words.append("; ".join(names))
    return " at ".join(words) or "all"


def _short_precision_of(case: Case) -> str:
    return short_precision(case.precision)


def _place_or_size(case: Case) -> str:
    return case.case_key if isinstance(case.task, Generated) else case.size


def reasons(report: Report) -> Table:
    """Every case that did not pass, or passed with a remark; those with the same reason share a
    row.
    """
    remarkable = [case for case in report.cases if case.result != "passed" or case.why]
    remarkable.sort(key=lambda case: case.result == "passed")
    rows = [
        {
            "result": cases[0].result,
            "implementation": cases[0].kernel,
            PRECISION: short_precision(cases[0].precision),
            "where": _layers_and_sizes(cases),
            "reason": why,
            "first NaN\nor Inf": first,
        }
        for (*_, why, first), cases in grouped(remarkable, _trouble).items()
    ]
    note = ""
    hidden = len(rows) - _MOST_ROWS
    if hidden > 0:
        note = f"{fmt.plural(hidden, 'more row')} left out; every case is in the JSON report."
    title = "Failures, refusals, remarks"
    words = ("result", *NAMES, "where", "reason", "first NaN\nor Inf")
    shown = table(title, rows[:_MOST_ROWS], words, keys=3, wraps="reason", note=note)
    return shown.without_empty_columns()


def _trouble(case: Case) -> Cells:
    """(result, kernel, precision, why, its first place that is not finite)."""
    places = [
        f"{error.tensor}{list(place)}"
        for error in case.accuracy
        if (place := error.vs_oracle.first_nonfinite) is not None
    ]
    first = places[0] if places else fmt.MISSING
    return case.result, case.kernel, case.precision, " ".join(case.why.split()), first


def _layers_and_sizes(cases: Sequence[Case]) -> str:
    """ "layers 3, 9 at 1,024 tokens; layer 3 at 512 tokens"."""
    by_size = grouped(cases, lambda case: case.size if case.layer else "")
    words = [
        f"{layer_words(equal)} at {size}" if size else layer_words(equal)
        for size, equal in by_size.items()
    ]
    return "; ".join(words)


def again(report: Report, case: Case) -> str:
    """A sentence with the case's id and the command that runs just it; empty if there is none."""
    words = shlex.join(report.again(case))
    return words and f".  Case {case.id}, again: {words}"


def repeats(report: Report) -> Table:
    """The command that runs it again, of every case that did not pass or passed with a remark."""
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
    """Title -> its groups."""

    def title(group: Group) -> str:
        generated = group.cases[0].task
        assert isinstance(generated, Generated)
        inputs = ", ".join((generated.dims.dtype, *generated.ways, f"{generated.layout} inputs"))
        return f"{generated.shape} ({generated.shape_words}), {inputs}"

    return grouped(groups(report), title)


_SIZE = "sequences x\ntokens"


def speed_of_bench(report: Report) -> Iterator[Table]:
    """Times and speedups, in a table for each shape."""
    for title, same in by_shape(report).items():
        rows = []
        for group in same:
            rows += [(_of_bench(series), series) for series in group.series()]
        yield speeds(f"Speed: {title}", rows, (_SIZE, *NAMES, "over"))


def _of_bench(series: Series) -> TableRow:
    """The first cells of a series' row: its inputs and names."""
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
    """Errors, in a table for each shape."""
    for title, same in by_shape(report).items():
        parts = [({_SIZE: group.size}, group, group.implementations) for group in same]
        yield from _accuracies(f": {title}", parts)
