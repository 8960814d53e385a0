"""What commands print on a terminal: a report on one screen, as after `run`, the output of
`accuracy`, and the tables of `runs`.
"""

import shlex
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path

from rich.console import Group as Renderables
from rich.console import RenderableType
from rich.text import Text

from ssdprof.core import words as fmt
from ssdprof.core.base import PRECISIONS, PrecisionName, grouped, intermediates_of, states_of
from ssdprof.core.outcome import ListedRun, Outcome, gated_cases
from ssdprof.core.pairs import compared
from ssdprof.core.report import Report
from ssdprof.errors import BadInputError, SsdprofError
from ssdprof.report import calls, model, states, terminal
from ssdprof.report.document import compose, heading
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

# How many of each fit on the screen; a row is one of a table of speed or accuracy.  Caveats that
# weaken the verdict are all shown.
_MOST_LINES = {"caveat": 3, "reason": 2, "row": 6}
# Columns that are left out of a table whose rows have more names than the precision: it would be
# too wide.
_DETAILS = ("baseline,\ndevice", "% of\nroofline", "largest\nerror", "largest\nvalue")


def render(report: Report) -> RenderableType:
    """A report on one screen: about forty lines of eighty columns.

    The tables of speed and accuracy and the lists are cut to fit.  Those of decoded states and of
    answers are whole, so that many formats or prompts need more than a screen.
    """
    return Renderables(*_parts(report))


def _export(report: Report) -> str:
    """A command that exports the report.  Without a folder it exports the latest one in `runs`."""
    command = ["ssdprof", "export", "-o", "report.html"]
    for word, next_word in pairwise((*report.command, "")):
        if word == "--out":
            command.insert(2, next_word)
        elif word.startswith("--out="):
            command.insert(2, word.removeprefix("--out="))
    return shlex.join(command)


def shown(report: Report) -> RenderableType:
    """A report as the command shows it that made it: a run or decoded states on one screen, and any
    other report with all of its tables.
    """
    if report.kind == "run" or report.of_states:
        return render(report)
    return terminal.render(compose(report))


def _parts(report: Report) -> Iterator[RenderableType]:
    """The parts of the screen from top to bottom: what was compared first, then the reasons of
    failures, then the verdict with its caveats, and the recommendation last.
    """
    all_groups = groups(report)
    yield Text(heading(report), style="bold")
    yield terminal.origin(origin(report))
    # without p, the power with which the error grows: the screen is narrow, and the column "trend"
    # says in a word whether the error grows
    decoded = [shown.without("p") for shown in states.overviews(report)]
    answers = map(model.answers, model.prompts(report))
    for shown in (_speed(all_groups), _accuracy(all_groups), *decoded, *answers):
        if shown:
            yield from ("", terminal.SplitTable(shown))
    if all_groups:
        yield ""
        yield from (Text(f"{word}: {meaning}", style="dim") for word, meaning in meanings(report))
    failed = (case for case in Outcome(report).failed if case.why)
    reasons = [
        f"{case.where}, {case.implementation} ({case.precision}): {why}{calls.again(report, case)}"
        for why, (case, *_) in grouped(failed, lambda case: case.why).items()
    ]
    yield from _listed(reasons, "reason")
    if report.command:
        yield Text(f"All layers, plots, what ran: {_export(report)}", style="dim")
    bad_news_last = sorted(verdict_lines(report), key=lambda line: not line.good)
    yield from map(terminal.verdict, bad_news_last)
    if warnings := list(caveats(report)):
        yield Text("What limits this:", style="yellow")
        yield from _listed(warnings, "caveat", len(weaknesses(report)))
    yield from map(terminal.verdict, in_short(report))


def _listed(lines: Sequence[str], noun: str, least: int = 0) -> Iterator[RenderableType]:
    """The first lines as a list, then the number of lines that are not shown.

    noun: the word for a line, a key of `_MOST_LINES`.
    least: the number of lines to show even if it exceeds `_MOST_LINES`.
    """
    most = max(least, _MOST_LINES[noun])
    yield from map(terminal.bullet, lines[:most])
    if len(lines) > most:
        yield Text(f"  {fmt.plural(len(lines) - most, f'more {noun}')} in the exported report.")


# --- the screen's tables of speed and accuracy: series of compared implementations


def _speed(all_groups: Sequence[Group]) -> Table:
    """The times of each series that was timed, without the columns that do not fit on the
    screen.
    """
    timed = [series for series in _series(all_groups) if series.timed]
    rows = list(map(calls.speed, timed))
    for row in rows:
        del row["call\ntime"], row["extra\nmemory"]
    return _table("Speed", timed, rows)


def _accuracy(all_groups: Sequence[Group]) -> Table:
    """The errors of each series whose output was compared with the oracle."""
    with_errors = [series for series in _series(all_groups) if series.pooled("vs_oracle")]
    return _table("Accuracy of the output", with_errors, list(map(_errors, with_errors)))


def _series(shown_groups: Sequence[Group]) -> Iterator[Series]:
    """The series of the compared implementations in all of the groups."""
    for group in shown_groups:
        yield from group.others()


def _errors(series: Series) -> TableRow:
    """The errors of the output, pooled over all calls of a series."""
    baseline = series.pooled("vs_baseline")
    oracle = series.pooled("vs_oracle")
    floor = series.pooled("floor")
    return {
        "within\nbudget": calls.budget_word(series, "out"),
        "equal to\nbaseline": calls.match(baseline, 0.0),
        **calls.matches(baseline, 1e-3),
        "rms error\nvs fp64": fmt.small(oracle and oracle.rms_ratio),
        "floor": fmt.small(floor and floor.rms_ratio),
        "largest\nerror": fmt.small(oracle and oracle.largest.max_abs),
        "largest\nvalue": fmt.small(oracle and oracle.largest_value),
    }


def _table(title: str, all_series: Sequence[Series], numbers: Sequence[TableRow]) -> Table:
    """A row for each series, with its item of `numbers`.  Precisions with equal numbers share a
    row.  The note counts the rows that do not fit on the screen.

    Names that are equal in all rows are in the title instead, except for the precision, and equal
    numbers in the note, except for those of the first column.
    """
    if not all_series:
        return table(title, (), ())
    all_names = [{"tokens": series.group.size} | calls.names(series) for series in all_series]
    names_of_rows, in_title = split_columns(all_names, keep=(PRECISION,))
    title = ", ".join([title, *in_title.values()])
    layer_counts = {len(series.group.layers) for series in all_series}
    if len(layer_counts) == 1:
        title += f", {fmt.plural(layer_counts.pop(), 'layer')}"

    keys = tuple(names_of_rows[0])
    hidden = _DETAILS if len(keys) > 1 else ()
    rows = []
    for names, row in zip(names_of_rows, numbers, strict=True):
        if "tokens" in names:
            names["tokens"] = names["tokens"].replace(" tokens", "")
        shown = {heading: cell for heading, cell in row.items() if heading not in hidden}
        rows.append(names | shown)
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
    most = _MOST_LINES["row"]
    if len(rows) > most:
        more = fmt.plural(len(rows) - most, "more row")
        notes.append(f"{more}: --full, or the exported report.")
    return table(title, rows[:most], keys, keys=len(keys), note="  ".join(notes))


def split_columns(
    rows: Sequence[TableRow], keep: Container[str]
) -> tuple[list[TableRow], TableRow]:
    """The rows without the columns whose cells are all equal, and the cells of those columns.

    rows: at least one; all have the same headings.
    keep: headings of columns that stay in the rows even if their cells are equal.

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
    """The output of `ssdprof accuracy`: the verdict on a run at the wanted precisions, where the
    implementations may be used, the caveats, and the errors.

    every_state: whether each state dtype of the wanted precisions is required.

    Raises BadInputError if the run compared nothing at the wanted precisions, or lacks a required
    state dtype.
    """
    compared_groups = _compared_at(report, wanted)
    present = {states_of(series.precision) for series in _series(compared_groups)}
    wanted_states = dict.fromkeys(map(states_of, wanted))
    absent = [state for state in wanted_states if state not in present]  # all without a group
    if not compared_groups or (every_state and absent):
        kinds = fmt.words(dict.fromkeys(map(intermediates_of, wanted)), "or")
        raise _nothing_at(report, f"{kinds} with {fmt.words(absent, 'or')} states")
    faults = shortcomings(Outcome(report.restricted(precisions=wanted)))
    lines = [VerdictLine(fault, good=False) for fault in faults]
    lines += advice(compared_groups)
    tables = chain.from_iterable(map(calls.accuracies, compared_groups))
    return terminal.render(
        Document(
            title=f"{report.target}, run {report.id}",
            verdict=tuple(lines),
            caveats=tuple(caveats(report)),
            sections=(section("Accuracy", *tables, reading=calls.ACCURACY_READING),),
        )
    )


def _compared_at(report: Report, precisions: Container[PrecisionName]) -> list[Group]:
    """The groups in which an implementation was compared at these precisions, with its cases at
    them and all cases of the baseline.
    """
    compared_groups = []
    for group in groups(report):
        cases = [
            case
            for case in group.cases
            if case.precision in precisions or case.implementation == group.baseline
        ]
        if any(case.implementation != group.baseline for case in cases):
            compared_groups.append(Group(report, cases))
    return compared_groups


def _nothing_at(report: Report, precisions: str) -> BadInputError:
    """The error of `ssdprof accuracy` if the run compared nothing at these precisions, or at all.

    precisions: in words: "exact or relaxed with bf16 states".
    """
    known_precisions = {series.precision for series in _series(groups(report))}
    if known_precisions:
        names = "; ".join(sorted(known_precisions, key=PRECISIONS.index))
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
    """A row for each stored report.  The note has the reasons of those that cannot be read."""
    note = "  ".join(f"{run.name}: {run.reason}" for run in listed if run.reason)
    words = ("run", "kind", "started", "model", "GPU", "verdict")
    return table("Runs", map(_listed_run, listed), words, note=note)


def _listed_run(run: ListedRun) -> TableRow:
    """The row of a stored report."""
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
    """The verdict in a list of runs, followed by "partial" if the run did not reach its end.

    Answers without a gate are "compared" and not "passed", because no limit was set for them.
    """
    without_limits = run.kind == "answers" and run.verdict == "passed" and not run.gates
    word = "compared" if without_limits else run.verdict
    return f"{word}, partial" if run.state == "partial" else word


def history(listed: Iterable[tuple[Path, Report | SsdprofError]]) -> Iterator[Table]:
    """Tables of the newest run of each commit, in the order of the commits' first runs.

    Runs that compared the same cases of one model on the same kind of GPU share a table.  A run
    without a commit has a row of its own.  The change of time is from the row before; it is a dash
    if one of the two was not timed.

    listed: reports with their paths, the newest first, or the error of an unreadable one, which is
        left out.
    """
    readable = [report for _, report in listed if isinstance(report, Report)]
    oldest_first = reversed(readable)
    for (target, gpu, names), comparable in grouped(oldest_first, _compared_cases).items():
        newest_of_commits = {report.commit or report.id: report for report in comparable}
        rows = []
        before: float | None = None
        for report in newest_of_commits.values():
            us = _us(report)
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
            before = us
        title = f"{target}, {gpu}, {fmt.plural(len(names), 'compared case')}"
        yield table(title, rows, ("commit", "newest run", "started", "verdict"))


def _compared_cases(report: Report) -> tuple[str, str, tuple[str, ...]]:
    """The model or operator, the GPU, and the names of the compared cases."""
    names = tuple(case.name for case in compared(report))
    return report.target, gpu_name(report.environment, "no GPU"), names


def _us(report: Report) -> float | None:
    """The summed time of the cases that gates apply to, in microseconds; None if one of them was
    not timed, or if there are none.
    """
    times = [case.time_us for case in gated_cases(report)]
    known = [time.value for time in times if time]
    return sum(known) if known and len(known) == len(times) else None


def _error(report: Report) -> float | None:
    """The largest ratio of an output's RMS error to that of the floor, of the cases that gates
    apply to; None if none is known.
    """
    outputs = (case.tensor("out") for case in gated_cases(report))
    ratios = (out.over_floor for out in outputs if out)
    return max((ratio for ratio in ratios if ratio is not None), default=None)
