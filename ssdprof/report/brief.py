"""Screens of a terminal: the report on one screen, as `run` prints it, and the output of `accuracy`
and `runs`.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from rich.console import Group as Renderables
from rich.console import RenderableType
from rich.text import Text

from ssdprof.core import words as fmt
from ssdprof.core.base import PRECISIONS, PrecisionName, grouped, intermediates_of, states_of
from ssdprof.core.case import Case
from ssdprof.core.outcome import ListedRun, Outcome
from ssdprof.core.pairs import compared
from ssdprof.core.report import Report
from ssdprof.errors import BadInputError, SsdprofError
from ssdprof.report import calls, model, states, terminal
from ssdprof.report.document import heading
from ssdprof.report.facts import gpu_name, meanings, origin, when
from ssdprof.report.groups import Group, Series, groups
from ssdprof.report.statements import (
    advice,
    caveats,
    in_short,
    shortcomings,
    verdict_lines,
    weaknesses,
)
from ssdprof.report.table import (
    PRECISION,
    Document,
    Table,
    TableRow,
    VerdictLine,
    fold_precisions,
    is_filled,
    section,
    table,
)

_MOST = {"caveat": 3, "reason": 2, "row": 6}  # of each that is shown
# columns for which a table with several columns of names has no room
_DETAILS = ("baseline,\ndevice", "% of\nroofline", "largest\nerror", "largest\nvalue")
_MORE = "All layers, plots, what ran: ssdprof export -o report.html"


def render(report: Report) -> RenderableType:
    """At most about forty lines of eighty columns."""
    return Renderables(*_parts(report))


def _parts(report: Report) -> Iterator[RenderableType]:
    """What is shown, from top to bottom: what was compared first, the verdict last."""
    prompts = groups(report)
    yield Text(heading(report), style="bold")
    yield terminal.origin(origin(report))
    decoded = [shown.without("p") for shown in states.overviews(report)]
    answers = map(model.answers, model.prompts(report))
    for shown in (_speed(prompts), _accuracy(prompts), *decoded, *answers):
        if shown:
            yield from ("", terminal.SplitTable(shown))
    if prompts:
        yield ""
        yield from (Text(f"{word}: {meaning}", style="dim") for word, meaning in meanings(report))
    first_cases: dict[str, Case] = {}
    for case in Outcome(report).failed:
        if case.why:
            first_cases.setdefault(case.why, case)
    reasons = [
        f"{case.where}, {case.implementation} ({case.precision}): {why}{calls.again(report, case)}"
        for why, case in first_cases.items()
    ]
    yield from _listed(reasons, "reason")
    yield Text(_MORE, style="dim")
    # bad news is last
    yield from map(terminal.verdict, sorted(verdict_lines(report), key=lambda line: not line.good))
    if warnings := list(caveats(report)):
        yield Text("What limits this:", style="yellow")
        yield from _listed(warnings, "caveat", len(weaknesses(report)))
    yield from map(terminal.verdict, in_short(report))


def _listed(lines: Sequence[str], noun: str, least: int = 0) -> Iterator[RenderableType]:
    """The first lines, at least so many of them, and the number of the others."""
    shown = max(least, _MOST[noun])
    yield from map(terminal.bullet, lines[:shown])
    if more := len(lines[shown:]):
        yield Text(f"  {fmt.plural(more, f'more {noun}')} with --full.")


# --- its two tables: one row for each series of a compared implementation


def _speed(prompts: Sequence[Group]) -> Table:
    timed = [series for series in _compared(prompts) if series.timed]
    rows = list(map(calls.speed, timed))
    for row in rows:
        del row["call\ntime"], row["extra\nmemory"]
    return _table("Speed", timed, rows)


def _accuracy(prompts: Sequence[Group]) -> Table:
    pooled = [series for series in _compared(prompts) if series.pooled("vs_oracle")]
    return _table("Accuracy of the output", pooled, list(map(_errors, pooled)))


def _compared(prompts: Sequence[Group]) -> Iterator[Series]:
    for group in prompts:
        yield from group.others()


def _errors(series: Series) -> TableRow:
    """The output of all calls."""
    baseline = series.pooled("vs_baseline")
    oracle = series.pooled("vs_oracle")
    floor = series.pooled("floor")
    outside = any(case.outside_budget for case in series.cases)
    return {
        "within\nbudget": "NO" if outside else "yes",
        "equal to\nbaseline": calls.match(baseline, 0.0),
        **calls.matches(baseline, 1e-3),
        "rms error\nvs fp64": fmt.small(oracle and oracle.rms_ratio),
        "floor": fmt.small(floor and floor.rms_ratio),
        "largest\nerror": fmt.small(oracle and oracle.largest.max_abs),
        "largest\nvalue": fmt.small(oracle and oracle.largest.scale_max_abs),
    }


def _table(title: str, all_series: Sequence[Series], numbers: Sequence[TableRow]) -> Table:
    """A row of numbers for each series; equal precisions share a row.

    Names that are equal in all rows are in the title, and equal numbers in the note.
    """
    if not all_series:
        return table(title, (), ())
    named = [{"tokens": series.group.size} | calls.names(series) for series in all_series]
    names, in_title = split_columns(named, keep=(PRECISION,))
    title = ", ".join([title, *in_title.values()])
    layer_counts = {len(series.group.layers) for series in all_series}
    if len(layer_counts) == 1:
        title += f", {fmt.plural(layer_counts.pop(), 'layer')}"

    keys = tuple(names[0])
    hidden = _DETAILS if len(keys) > 1 else ()
    rows = []
    for name, row in zip(names, numbers, strict=True):
        if "tokens" in name:
            name["tokens"] = name["tokens"].replace(" tokens", "")
        shown = {heading: cell for heading, cell in row.items() if heading not in hidden}
        rows.append(name | shown)
    rows = fold_precisions(rows)
    notes = []
    if len(rows) > 1:
        first_number = list(rows[0])[len(keys)]
        rows, in_note = split_columns(rows, keep=(*keys, first_number))
        equal = [
            f"{' '.join(heading.split())} {cell}"
            for heading, cell in in_note.items()
            if is_filled(cell)
        ]
        if equal:
            notes.append(f"In all rows: {', '.join(equal)}.")
    if (more := len(rows) - _MOST["row"]) > 0:
        notes.append(f"{fmt.plural(more, 'more row')}: --full, or the exported report.")
    return table(title, rows[: _MOST["row"]], keys, keys=len(keys), note="  ".join(notes))


def split_columns(
    rows: Sequence[TableRow], keep: Container[str]
) -> tuple[list[TableRow], TableRow]:
    """The columns that vary or are kept, and the cells that all rows share.

    [{"tokens": "8", "name": "fused"}, {"tokens": "9", "name": "fused"}] gives
    [{"tokens": "8"}, {"tokens": "9"}] and {"name": "fused"}.
    """
    shared = {
        heading: cell
        for heading, cell in rows[0].items()
        if heading not in keep and all(row[heading] == cell for row in rows)
    }
    varying = [
        {heading: cell for heading, cell in row.items() if heading not in shared} for row in rows
    ]
    return varying, shared


# --- ssdprof accuracy


def accuracy_table(
    report: Report, wanted: Sequence[PrecisionName] = PRECISIONS, *, every_state: bool = False
) -> RenderableType:
    """A recommendation, and the match table of the wanted precisions, under a verdict.

    Raises BadInputError if the run compared nothing at these precisions; with `every_state`, also
    if it compared nothing at one of their state dtypes.
    """
    chosen = _compared_at(report, wanted)
    present = {states_of(series.precision) for series in _compared(chosen)}
    absent = [state for state in dict.fromkeys(map(states_of, wanted)) if state not in present]
    if not chosen or (every_state and absent):
        kinds = fmt.words(dict.fromkeys(map(intermediates_of, wanted)), "or")
        raise _nothing_at(report, f"{kinds} with {fmt.words(absent, 'or')} states")
    wrong = shortcomings(Outcome(report.restricted(precisions=wanted)))
    lines = [VerdictLine(line, False) for line in wrong]
    lines += advice((group, name) for group in chosen for name in group.compared)
    tables = chain.from_iterable(map(calls.accuracies, chosen))
    return terminal.render(
        Document(
            title=f"{report.target}, run {report.id}",
            verdict=tuple(lines),
            caveats=tuple(caveats(report)),
            sections=(section("Accuracy", *tables, reading=calls.ACCURACY_READING),),
        )
    )


def _compared_at(report: Report, precisions: Container[PrecisionName]) -> list[Group]:
    """The groups with a comparison at these precisions: its cases, and all of the baseline."""
    compared = []
    for group in groups(report):
        cases = [
            case
            for case in group.cases
            if case.precision in precisions or case.implementation == group.baseline
        ]
        if cases and (chosen := Group(report, cases)).compared:
            compared.append(chosen)
    return compared


def _nothing_at(report: Report, precisions: str) -> BadInputError:
    """Why `ssdprof accuracy` has nothing to show at these precisions."""
    compared = {series.precision for series in _compared(groups(report))}
    if compared:
        names = "; ".join(sorted(compared, key=PRECISIONS.index))
        return BadInputError(
            f"Run {report.id} compared nothing at {precisions}.", f"It compared: {names}."
        )
    hint = f"It holds {report.baseline} alone."
    if report.of_answers:
        hint = "It holds a model's answers: 'ssdprof export' shows them."
    elif report.of_states:
        hint = "It holds states of decoded tokens: 'ssdprof export' shows them."
    elif not report.cases:
        hint = "It ended before its first comparison.  Run again."
    return BadInputError(f"Run {report.id} compared no implementation with its baseline.", hint)


# --- ssdprof runs


def runs(listed: Sequence[ListedRun]) -> Table:
    """A row for each report, readable or not."""
    note = "  ".join(f"{run.name}: {run.reason}" for run in listed if run.reason)
    words = ("run", "kind", "started", "model", "GPU", "verdict")
    return table("Runs", map(_listed_run, listed), words, note=note)


def _listed_run(run: ListedRun) -> TableRow:
    if not run.state:  # it cannot be read
        return {"run": run.name, "verdict": run.verdict}
    return {
        "run": run.name,
        "kind": run.kind,
        "started": when(run.created),
        "model": f"{run.model}, random weights" if run.random_weights else run.model,
        "tokens": ", ".join(map(fmt.count, run.seqlens)),
        "GPU": run.gpu or "none",
        "verdict": _listed_verdict(run),
    }


def _listed_verdict(run: ListedRun) -> str:
    """The verdict in a list of runs.  Answers without a limit are "compared": there is nothing that
    they could pass.
    """
    without_limits = run.kind == "answers" and run.verdict == "passed" and not run.gates
    word = "compared" if without_limits else run.verdict
    return f"{word}, partial" if run.state == "partial" else word


def history(listed: Iterable[tuple[Path, Report | SsdprofError]]) -> Iterator[Table]:
    """Tables with the newest run of every commit, oldest first, one for each set of compared
    cases.
    """
    readable = [report for _, report in listed if isinstance(report, Report)][::-1]
    for (target, gpu, names), same in grouped(readable, _compared_cases).items():
        reports = list({report.commit or report.id: report for report in same}.values())
        times = [_us(report) for report in reports]
        rows = []
        for report, us, before in zip(reports, times, (None, *times), strict=False):
            rows.append(
                {
                    "commit": report.commit or fmt.MISSING,
                    "newest run": report.id,
                    "started": when(report.created),
                    "verdict": Outcome(report).word,
                    "time": fmt.duration(us),
                    "change": f"{100 * (us / before - 1):+.1f}%" if us and before else fmt.MISSING,
                    "largest rms error,\nover the floor": fmt.ratio(_error(report)),
                }
            )
        title = f"{target}, {gpu}, {fmt.plural(len(names), 'compared case')}"
        yield table(title, rows, ("commit", "newest run", "started", "verdict"))


def _compared_cases(report: Report) -> tuple[str, str, tuple[str, ...]]:
    """The subject, the GPU and the names of the compared cases."""
    names = tuple(case.name for case in compared(report))
    return report.target, gpu_name(report.environment), names


def _gated(report: Report) -> list[Case]:
    return [case for case in report.cases if case.is_gated]


def _us(report: Report) -> float | None:
    """The time of all cases that gates apply to; None if one was not timed."""
    times = [case.time_us for case in _gated(report)]
    known = [time.value for time in times if time]
    return sum(known) if known and len(known) == len(times) else None


def _error(report: Report) -> float | None:
    """The largest rms error of an output, over the floor."""
    outputs = (case.tensor("out") for case in _gated(report))
    ratios = (out.over_floor for out in outputs if out)
    return max((ratio for ratio in ratios if ratio is not None), default=None)
