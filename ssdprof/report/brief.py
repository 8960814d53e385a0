"""Screens of a terminal: the report on one screen, as `run` prints it, and the output of `accuracy`
and `runs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rich.console import Group as Renderables
from rich.console import RenderableType
from rich.text import Text

from ssdprof.core import words as fmt
from ssdprof.core.base import (
    PRECISIONS,
    DType,
    Intermediates,
    grouped,
    intermediates_of,
    precisions_for,
    states_of,
)
from ssdprof.core.case import Case
from ssdprof.core.outcome import ListedRun, Outcome
from ssdprof.core.report import Report
from ssdprof.errors import BadInputError, SsdprofError
from ssdprof.report import calls, model, terminal
from ssdprof.report.document import heading
from ssdprof.report.facts import gpu_name, meanings, origin, when
from ssdprof.report.groups import Against, Group, Pooled, Series, groups
from ssdprof.report.statements import (
    advice,
    caveats,
    in_short,
    shortcomings,
    suspicions,
    verdict_lines,
)
from ssdprof.report.table import Column, Table, VerdictLine, folded, lifted, table, text

_MOST = {"caveat": 3, "reason": 2, "row": 6}  # of each that is shown
_MORE = "All layers, plots, what ran: ssdprof export -o report.html"


def render(report: Report) -> RenderableType:
    """At most about forty lines of eighty columns."""
    return Renderables(*_parts(report))


def _parts(report: Report) -> Iterator[RenderableType]:
    found = groups(report)
    yield Text(heading(report), style="bold")
    yield terminal.origin(origin(report))
    for made in (_speed(found), _accuracy(found), *map(model.answers, model.prompts(report))):
        if made:
            yield from ("", terminal.SplitTable(made))
    if found:
        yield ""
        yield from (Text(f"{word}: {meaning}", style="dim") for word, meaning in meanings(report))
    failed = {case.why: case for case in reversed(Outcome(report).failed) if case.why}
    reasons = [
        f"{one.where}, {one.implementation} ({one.precision}): {why}{calls.again(report, one)}"
        for why, one in failed.items()
    ]
    yield from _listed(reasons[::-1], "reason")
    yield Text(_MORE, style="dim")
    # bad news is last
    yield from map(terminal.verdict, sorted(verdict_lines(report), key=lambda line: not line.good))
    if warnings := list(caveats(report)):
        yield Text("What limits this:", style="yellow")
        yield from _listed(warnings, "caveat", len(suspicions(report)))
    yield from map(terminal.verdict, in_short(report))


def _listed(lines: Sequence[str], noun: str, least: int = 0) -> Iterator[RenderableType]:
    """The first lines, at least so many of them, and the number of the others."""
    shown = max(least, _MOST[noun])
    yield from map(terminal.bullet, lines[:shown])
    if more := len(lines[shown:]):
        yield Text(f"  {fmt.plural(more, f'more {noun}')} with --full.")


# --- its two tables: one row for each series of a compared implementation


def _speed(found: Sequence[Group]) -> Table | None:
    return _table(
        "Speed", [row for group in found for row in group.others() if row.timed], calls.SPEED[:7]
    )


def _accuracy(found: Sequence[Group]) -> Table | None:
    Show = Callable[[float | None], str]

    def error(
        header: str, which: Against, show: Show, of: Callable[[Pooled], float | None]
    ) -> Column[Series]:
        return Column(header, lambda row: show((one := row.pooled(which)) and of(one)))

    columns: tuple[Column[Series], ...] = (
        Column(
            "within\nbudget",
            lambda row: "NO" if any(case.outside_budget for case in row.cases) else "yes",
        ),
        error("equal to\nbaseline", "vs_baseline", fmt.percent, lambda one: one.match_pct(0.0)),
        error("within\n1e-3", "vs_baseline", fmt.percent, lambda one: one.match_pct(1e-3)),
        error(
            "1e-3\nof rms", "vs_baseline", fmt.percent, lambda one: one.match_rms_pct(calls.OF_RMS)
        ),
        error("rms error\nvs fp64", "vs_oracle", fmt.small, lambda one: one.rms_ratio),
        error("floor", "floor", fmt.small, lambda one: one.rms_ratio),
        error("largest\nerror", "vs_oracle", fmt.small, lambda one: one.largest.max_abs),
        error("largest\nvalue", "vs_oracle", fmt.small, lambda one: one.largest.scale_max_abs),
    )
    rows = [row for group in found for row in group.others() if row.pooled("vs_oracle")]
    return _table("Accuracy of the output", rows, columns)


def _table(title: str, rows: Sequence[Series], numbers: Sequence[Column[Series]]) -> Table | None:
    """The title has the names that are equal in all rows; what else is equal is below; equal
    precisions share a row.
    """
    if not rows:
        return None
    names: tuple[Column[Series], ...] = (
        text("tokens", lambda row: row.group.size.replace(" tokens", "")),
        *calls.NAMES,
    )
    kept = [one for one in names if len({one.of(row) for row in rows}) > 1 or one is names[-1]]
    same = [
        rows[0].group.size if one is names[0] else one.of(rows[0])
        for one in names
        if one not in kept
    ]
    layers, *others = {len(row.group.layers) for row in rows}
    title = ", ".join([title, *same, *([] if others else [fmt.plural(layers, "layer")])])
    made = table(title, (*kept, *(numbers if len(kept) == 1 else numbers[:-2])), rows)
    assert made
    every = folded(made.rows, len(kept) - 1)
    hidden = len(every) - _MOST["row"]
    notes = (
        [f"{fmt.plural(hidden, 'more row')}: --full, or the exported report."] if hidden > 0 else []
    )
    columns = range(len(made.headers))
    equal = [
        i
        for i in columns
        if i > len(kept) and len(every) > 1 and len({row[i] for row in every}) == 1
    ]
    if shared := [
        f"{' '.join(made.headers[i].split())} {every[0][i]}"
        for i in equal
        if every[0][i] != fmt.MISSING
    ]:
        notes.insert(0, f"In all rows: {', '.join(shared)}.")
    shown = replace(made, rows=tuple(every[: _MOST["row"]]), keys=len(kept), note="  ".join(notes))
    return shown.only(i for i in columns if i not in equal)


# --- ssdprof accuracy


def accuracy_table(
    report: Report,
    intermediates: Intermediates | Literal["all"] = "all",
    state_dtypes: Sequence[DType] = ("fp32", "fp16", "bf16"),
    *,
    every_state: bool = False,
) -> RenderableType:
    """A recommendation, and the match table of the chosen precisions, under a verdict.

    Raises BadInputError if the run compared nothing at these precisions; with `every_state`, also
    if it compared nothing at one of the state dtypes.
    """
    wanted = precisions_for("fp32", intermediates, state_dtypes)
    every = groups(report)
    chosen = {  # with every case of the baseline
        group: [
            case
            for case in group.cases
            if case.precision in wanted or case.implementation == group.baseline
        ]
        for group in every
    }
    found = [
        own for group, cases in chosen.items() if cases and (own := Group(report, cases)).compared
    ]
    held = {states_of(one.precision) for group in found for one in group.others()}
    absent = [state for state in state_dtypes if state not in held]
    if not found or (every_state and absent):
        hint = "It ended before its first comparison.  Run again."
        if compared := {one.precision for group in every for one in group.others()}:
            kinds = fmt.words(dict.fromkeys(map(intermediates_of, wanted)), "or")
            asked = (
                f"Run {report.id} compared nothing at {kinds} with {fmt.words(absent, 'or')} "
                "states."
            )
            names = "; ".join(sorted(compared, key=PRECISIONS.index))
            raise BadInputError(asked, f"It compared: {names}.")
        if report.of_answers:
            hint = "It holds a model's answers: 'ssdprof export' shows them."
        elif report.cases:
            hint = f"It holds {report.baseline} alone."
        raise BadInputError(f"Run {report.id} compared no implementation with its baseline.", hint)
    wrong = shortcomings(Outcome(report.restricted(precisions=wanted)))
    lines = [VerdictLine(line, False) for line in wrong]
    lines += advice((group, name) for group in found for name in group.compared)
    parts: list[RenderableType] = [Text(f"{report.subject}, run {report.id}", style="bold")]
    parts += [*map(terminal.verdict, lines), *map(terminal.bullet, caveats(report))]
    for made in filter(None, (one for group in found for one in calls.accuracies(group))):
        parts += ["", terminal.SplitTable(made)]
    return Renderables(*parts, "", Text(calls.ACCURACY_READING, style="dim"))


# --- ssdprof runs


def runs(found: Sequence[ListedRun]) -> Table | None:
    """A row for each report, readable or not."""

    def readable(row: ListedRun) -> ListedRun | None:
        return row if row.state else None

    columns: tuple[Column[ListedRun], ...] = (
        text("run", lambda row: row.name),
        *lifted(
            readable,
            text("kind", lambda row: row.kind),
            text("started", lambda row: when(row.created)),
            text("model", lambda row: row.model + ", random weights" * row.random_weights),
            Column("tokens", lambda row: ", ".join(map(fmt.count, row.seqlens))),
            text("GPU", lambda row: row.gpu or "none"),
        ),
        text("verdict", _listed_verdict),
    )
    note = "  ".join(f"{row.name}: {row.reason}" for row in found if row.reason)
    return table("Runs", columns, found, note=note)


def _listed_verdict(row: ListedRun) -> str:
    """Answers without a limit are compared, and pass nothing."""
    without_limits = row.kind == "answers" and row.verdict == "passed" and not row.gates
    word = "compared" if without_limits else row.verdict
    return f"{word}, partial" if row.state == "partial" else word


def history(found: Iterable[tuple[Path, Report | SsdprofError]]) -> Iterator[Table]:
    """For each set of compared cases a table with the newest run of every commit, oldest first."""

    def change(row: tuple[Report, float | None]) -> str:
        us, before = _us(row[0]), row[1]
        return f"{100 * (us / before - 1):+.1f}%" if us and before else fmt.MISSING

    columns: tuple[Column[tuple[Report, float | None]], ...] = (
        text("commit", lambda row: row[0].commit or fmt.MISSING),
        text("newest run", lambda row: row[0].id),
        text("started", lambda row: when(row[0].created)),
        text("verdict", lambda row: Outcome(row[0]).word),
        Column("time", lambda row: fmt.duration(_us(row[0]))),
        Column("change", change),
        Column("largest rms error,\nover the floor", lambda row: fmt.ratio(_error(row[0]))),
    )
    every = [report for _, report in found if isinstance(report, Report)][::-1]
    kinds = grouped(
        every,
        lambda one: (
            one.subject,
            gpu_name(one.environment),
            tuple(case.name for case in _own(one)),
        ),
    )
    for (subject, gpu, names), own in kinds.items():
        rows = list({report.commit or report.id: report for report in own}.values())
        times = [_us(report) for report in rows]
        known = [one for one in (times if any(times) else map(_error, rows)) if one is not None]
        title = (
            f"{subject}, {gpu}, {fmt.plural(len(names), 'compared case')}  {fmt.sparkline(known)}"
        )
        if made := table(title, columns, zip(rows, (None, *times), strict=False)):
            yield made


def _own(report: Report) -> list[Case]:
    return [case for case in report.cases if case.judged]


def _us(report: Report) -> float | None:
    """The time of all compared cases; None if one was not timed."""
    times = [case.time_us for case in _own(report)]
    return sum(one.value for one in times if one) if times and all(times) else None


def _error(report: Report) -> float | None:
    out = [one.over_floor for case in _own(report) if (one := case.tensor("out"))]
    return max((one for one in out if one is not None), default=None)
