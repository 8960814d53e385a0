"""Screens of a terminal: the report on one screen, as `run` prints it, and the output of `accuracy` and `runs`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Group as Renderables
from rich.console import RenderableType
from rich.text import Text

from ssdprof.core import words as fmt
from ssdprof.core.base import DType, Intermediates, precisions_for
from ssdprof.core.outcome import outcome
from ssdprof.core.report import Report
from ssdprof.errors import BadInputError, SsdprofError, harmless
from ssdprof.report import calls, model, terminal
from ssdprof.report.document import heading
from ssdprof.report.facts import gpu_name, meanings, origin, when
from ssdprof.report.groups import Against, Group, Pooled, Series, groups, precision_order
from ssdprof.report.statements import advice, caveats, nothing_timed, shortcomings, verdict_lines
from ssdprof.report.table import Column, Table, VerdictLine, lifted, table, text

_MOST_CAVEATS = 3
_MOST_REASONS = 2
_MOST_ROWS = 6
_LONGEST = 170  # characters of a sentence
_MORE = "All layers, plots, what ran: ssdprof export --format html -o report.html"


def render(report: Report) -> RenderableType:
    """At most about forty lines of eighty columns."""
    return Renderables(*_parts(report))


def _parts(report: Report) -> Iterator[RenderableType]:
    found = groups(report)
    yield Text(heading(report), style="bold")
    yield terminal.origin(origin(report))
    if untimed := nothing_timed(report):
        yield from ("", Text(f"No speed: {untimed}"))
    for made in (_speed(found), _accuracy(found), *map(model.answers, model.prompts(report))):
        if made:
            yield from ("", terminal.SplitTable(made))
    if found:
        yield ""
        yield from (Text(f"{word}: {meaning}", style="dim") for word, meaning in meanings(report))
    if warnings := caveats(report):
        yield Text("Caveats:", style="yellow")
        yield from _listed(warnings, _MOST_CAVEATS, "more caveat")
    failed = {case.why: case for case in reversed(outcome(report).failed) if case.why}
    reasons = [f"{one.where}, {one.implementation} ({one.precision}): {why}" for why, one in failed.items()]
    yield from _listed(reasons[::-1], _MOST_REASONS, "more reason")
    yield Text(_MORE, style="dim")
    lines = list(verdict_lines(report))
    if outcome(report).passed:  # bad news is last
        lines += advice([(group, name) for group in found for name in group.compared])
        lines.sort(key=lambda line: not line.good)
    yield from (terminal.verdict(line if line.good else line._replace(text=_short(line.text))) for line in lines)


def _listed(lines: Sequence[str], most: int, noun: str) -> Iterator[RenderableType]:
    yield from (terminal.bullet(_short(line)) for line in lines[:most])
    if len(lines) > most:
        yield Text(f"  {fmt.plural(len(lines) - most, noun)} with --full.")


def _short(sentence: str) -> str:
    return sentence if len(sentence) <= _LONGEST else f"{sentence[: _LONGEST - 3].rpartition(' ')[0]} ..."


# --- its two tables: one row for each series of a compared implementation


def _speed(found: Sequence[Group]) -> Table | None:
    """Speeds; None if nothing was timed."""

    def baseline(row: Series) -> str:
        theirs = row.original
        return fmt.duration(theirs.device.us if theirs and theirs.layers == row.layers else None)

    columns: tuple[Column[Series], ...] = (
        Column("speedup,\ndevice", lambda row: fmt.speedup(row.device.speedup)),
        Column("verdict", lambda row: row.device.verdict or fmt.MISSING),
        Column("speedup,\ncall", lambda row: fmt.ratio(row.call.speedup.value if row.call.speedup else None)),
        Column("device\ntime", lambda row: fmt.duration(row.device.us)),
        Column("{},\ndevice", baseline),
        Column("% of\nroof", lambda row: fmt.percent(row.floor_pct, 1)),
    )
    return _table("Speed", [row for group in found for row in group.others() if row.timed], columns)


def _accuracy(found: Sequence[Group]) -> Table | None:
    """Accuracy of the outputs; None if nothing was compared."""
    budget: Column[Series] = Column(
        "within\nbudget", lambda row: "NO" if any(case.outside_budget for case in row.cases) else "yes"
    )
    rms: Column[Pooled] = Column("rms error\nvs fp64", lambda one: fmt.small(one.rms_ratio))

    def of(which: Against, *columns: Column[Pooled]) -> tuple[Column[Series], ...]:
        return lifted(lambda row: row.pooled(which), *columns)

    columns = (
        budget,
        *of(
            "vs_baseline",
            Column("equal to\n{}", lambda one: fmt.percent(one.match_pct(0.0))),
            Column("within\n1e-3", lambda one: fmt.percent(one.match_pct(1e-3))),
        ),
        *of("vs_oracle", rms),
        *of("floor", rms._replace(header="floor")),
        *of(
            "vs_oracle",
            Column("largest\nerror", lambda one: fmt.small(one.largest.max_abs)),
            Column("largest\nvalue", lambda one: fmt.small(one.largest.scale_max_abs)),
        ),
    )
    rows = [row for group in found for row in group.others() if row.pooled("vs_oracle")]
    return _table("Accuracy of the output", rows, columns)


def _table(title: str, rows: Sequence[Series], columns: Sequence[Column[Series]]) -> Table | None:
    """A table whose title has the values equal in all rows.  A second column of names replaces the last number."""
    if not rows:
        return None
    shown = list(dict.fromkeys(row.group for row in rows))
    whole = len({group.tokens for group in shown}) > 1

    def where(row: Series) -> str:
        """ "16,384", "chunks of 8,192", "steps after 16,384"; of several prompts, chunks name theirs: "8 of 16,384"."""
        group, tokens = row.group, row.group.tokens.removesuffix(" tokens")
        if group.call is None or group.call.kind != "chunk":
            return f"steps after {tokens}" if group.steps else tokens
        size = fmt.tokens(group.seqlen, group.cases[0].batch).removesuffix(" tokens")
        return f"{size} of {tokens}" if whole else f"chunks of {size}"

    names: tuple[Column[Series], ...] = (
        text("tokens", where),
        text("implementation", lambda row: row.name),
        text("precision", lambda row: row.precision.short),
    )
    kept = [one for one in names if len({one.of(row) for row in rows}) > 1 or one is names[2]]
    same = [shown[0].size if one is names[0] else one.of(rows[0]) for one in names if one not in kept]
    layers, *others = {len(group.layers) for group in shown}
    baseline, *more = {group.baseline for group in shown}  # the one of decode steps is another
    numbers = [one._replace(header=one.header.replace("{}", "baseline" if more else baseline)) for one in columns]
    hidden = len(rows) - _MOST_ROWS
    return table(
        ", ".join([title, *same, *([] if others else [fmt.plural(layers, "layer")])]),
        (*kept, *(numbers if len(kept) == 1 else numbers[:-1])),
        rows[:_MOST_ROWS],
        keys=len(kept),
        note=f"{fmt.plural(hidden, 'more row')}: --full, or the exported report." if hidden > 0 else "",
    )


# --- ssdprof accuracy


def accuracy_table(
    report: Report,
    intermediates: Intermediates | Literal["all"] = "all",
    state_dtypes: Sequence[DType] = ("fp32", "fp16", "bf16"),
    *,
    every_state: bool = False,
) -> RenderableType:
    """A recommendation, and the match table of the chosen precisions, under a verdict.

    Raises BadInputError if the run compared nothing at these precisions; with `every_state`, also if it compared
    nothing at one of the state dtypes.
    """
    wanted = precisions_for("fp32", intermediates, state_dtypes)
    compared = [(group, name) for group in groups(report) for name in group.compared]

    def chosen(group: Group, name: str) -> Group:
        """With every case of the baseline."""
        own = {name: wanted, group.baseline: [case.precision for case in group.cases]}
        return group.keep(lambda case: case.precision in own.get(case.implementation, ()))

    found = [
        (chosen(group, name), name)
        for group, name in compared
        if any(case.implementation == name and case.precision in wanted for case in group.cases)
    ]
    held = {case.precision.state_dtype for group, _ in found for case in group.cases if case.precision in wanted}
    absent = [state for state in state_dtypes if state not in held]
    if not found or (every_state and absent):
        every = {one.precision for group, name in compared for one in group.series(name)}
        if every:
            kinds = fmt.words(dict.fromkeys(one.intermediates for one in wanted), "or")
            asked = f"Run {report.id} compared nothing at {kinds} with {fmt.words(absent, 'or')} states."
            names = "; ".join(map(str, sorted(every, key=precision_order)))
            raise BadInputError(asked, f"It compared: {names}.")
        hint = (
            f"It holds {report.baseline} alone."
            if report.cases
            else "It ended before its first comparison.  Run again."
        )
        if report.of_answers:
            hint = "It holds a model's answers: 'ssdprof export' shows them."
        raise BadInputError(f"Run {report.id} compared no implementation with its baseline.", hint)
    parts: list[RenderableType] = [Text(f"{report.subject}, run {report.id}", style="bold")]
    wrong = shortcomings(outcome(report.restricted(precisions=wanted)))
    parts += [terminal.verdict(VerdictLine(line, False)) for line in wrong]
    parts += [*map(terminal.verdict, advice(found)), *map(terminal.bullet, caveats(report))]
    for made in (calls.matches(group, name, tensor) for group, name in found for tensor in calls.TENSORS):
        parts += ["", terminal.SplitTable(made)] if made else []
    return Renderables(*parts)


# --- ssdprof runs


_Stored = tuple[Path, Report | SsdprofError]


def runs(found: Sequence[_Stored]) -> Table | None:
    """A row for each report, readable or not.  found: folder -> the report, or what is wrong with it."""

    def readable(row: _Stored) -> Report | None:
        return row[1] if isinstance(row[1], Report) else None

    def model(report: Report) -> str:
        return report.subject + ", random weights" * bool(report.model and report.model.random_weights)

    def verdict(row: _Stored) -> str:
        if not isinstance(row[1], Report):
            return "unreadable"
        return f"{verdict_word(row[1])}{'' if row[1].complete else ', partial'}"

    columns: tuple[Column[_Stored], ...] = (
        text("run", lambda row: harmless(row[0].name)),
        *lifted(
            readable,
            text("started", lambda report: when(report.created)),
            text("model", model),
            Column("tokens", lambda report: ", ".join(fmt.count(prompt.seqlen) for prompt in report.prompts)),
            text("GPU", lambda report: gpu_name(report.environment)),
        ),
        text("verdict", verdict),
    )
    note = "  ".join(harmless(f"{path.name}: {one.message}") for path, one in found if isinstance(one, SsdprofError))
    return table("Runs", columns, found, note=note)


def verdict_word(report: Report) -> str:
    """ "passed", "failed", "refused" or "incomplete"."""
    found = outcome(report)
    if found.passed:
        return "passed"
    if found.failed or found.broken or found.answers_failed:
        return "failed"
    return "refused" if found.refused else "incomplete"
