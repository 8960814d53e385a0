"""Screens of a terminal: the report on one screen, as `run` prints it, and the output of `accuracy` and `runs`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Group as Renderables
from rich.console import RenderableType
from rich.text import Text

from ssdprof.core import words as fmt
from ssdprof.core.base import DType, Intermediates, PrecisionRecord
from ssdprof.core.case import Case
from ssdprof.core.outcome import outcome
from ssdprof.core.report import Report
from ssdprof.errors import BadInputError, SsdprofError
from ssdprof.report import calls, model, terminal
from ssdprof.report.document import heading
from ssdprof.report.facts import caveats, gpu_name, meanings, origin, when
from ssdprof.report.groups import Against, Group, Pooled, Series, groups, precision_order
from ssdprof.report.statements import advice, nothing_timed, shortcomings, verdict_lines
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
    for word, meaning in meanings(report) if found else ():
        yield Text(f"{word}: {meaning}", style="dim")
    if warnings := caveats(report):
        yield Text("Caveats:", style="yellow")
        yield from _listed(warnings, _MOST_CAVEATS, "more caveat")
    yield from _listed(_reasons(report), _MOST_REASONS, "more reason")
    yield Text(_MORE, style="dim")
    lines = list(verdict_lines(report))
    if outcome(report).passed:  # bad news is last
        lines += advice([(group, name) for group in found for name in group.compared])
        lines.sort(key=lambda line: not line.good)
    for line in lines:
        yield terminal.verdict(line if line.good else line._replace(text=_short(line.text)))


def _listed(lines: Sequence[str], most: int, noun: str) -> Iterator[RenderableType]:
    yield from (terminal.bullet(_short(line)) for line in lines[:most])
    if len(lines) > most:
        yield Text(f"  {fmt.plural(len(lines) - most, noun)} with --full.")


def _reasons(report: Report) -> list[str]:
    found = {case.why: case for case in reversed(outcome(report).failed) if case.why}
    return [
        f"{case.where}, {case.implementation} ({case.precision}): {reason}" for reason, case in reversed(found.items())
    ]


def _short(sentence: str) -> str:
    return sentence if len(sentence) <= _LONGEST else f"{sentence[: _LONGEST - 3].rpartition(' ')[0]} ..."


# --- its two tables: one row for each series of a compared implementation


def _speed(found: Sequence[Group]) -> Table | None:
    """Speeds; None if nothing was timed."""

    def baseline(row: Series) -> str:
        theirs = row.original.speed if row.original else None
        same = theirs and row.speed and theirs.layers == row.speed.layers
        return fmt.duration(theirs.device.us if theirs and same else None)

    columns: tuple[Column[Series], ...] = lifted(
        lambda row: row.speed,
        Column("speedup,\ndevice", lambda speed: fmt.speedup(speed.device.speedup)),
        Column("verdict", lambda speed: speed.device.verdict or fmt.MISSING),
        Column("speedup,\ncall", lambda speed: fmt.ratio(speed.call.speedup.value if speed.call.speedup else None)),
        Column("device\ntime", lambda speed: fmt.duration(speed.device.us)),
        Column("% of\nroof", lambda speed: fmt.percent(speed.floor_pct, 1)),
    )
    rows = [row for group in found for row in group.others() if row.speed]
    return _table("Speed", rows, (*columns[:4], Column("{},\ndevice", baseline), columns[4]))


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
    names: tuple[Column[Series], ...] = (
        text("tokens", lambda row: _where(row.group, whole=whole)),
        text("implementation", lambda row: row.name),
        text("precision", lambda row: row.precision.short),
    )
    kept = [one for one in names if len({one.of(row) for row in rows}) > 1 or one is names[2]]
    same = [shown[0].size if one is names[0] else one.of(rows[0]) for one in names if one not in kept]
    layers = {len(group.layers) for group in shown}
    where = [fmt.plural(layers.pop(), "layer")] if len(layers) == 1 else []
    baselines = {group.baseline for group in shown}  # the one of decode steps is another
    baseline = baselines.pop() if len(baselines) == 1 else "baseline"
    numbers = [one._replace(header=one.header.replace("{}", baseline)) for one in columns]
    hidden = len(rows) - _MOST_ROWS
    return table(
        ", ".join([title, *same, *where]),
        (*kept, *(numbers if len(kept) == 1 else numbers[:-1])),
        rows[:_MOST_ROWS],
        keys=len(kept),
        note=f"{fmt.plural(hidden, 'more row')}: --full, or the exported report." if hidden > 0 else "",
    )


def _where(group: Group, *, whole: bool) -> str:
    """ "16,384", "chunks of 8,192", "steps after 16,384".  whole: name the prompt of chunks, too: "8,192 of 16,384"."""
    if group.call is not None and group.call.kind == "chunk":
        size = fmt.tokens(group.seqlen, group.cases[0].batch).removesuffix(" tokens")
        return f"{size} of {group.tokens}".removesuffix(" tokens") if whole else f"chunks of {size}"
    tokens = group.tokens.removesuffix(" tokens")
    return f"steps after {tokens}" if group.steps else tokens


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
    kinds: tuple[Intermediates, ...] = ("exact", "relaxed") if intermediates == "all" else (intermediates,)

    def chosen(case: Case) -> bool:
        return case.precision.intermediates in kinds and case.precision.state_dtype in state_dtypes

    found = [
        (_with_baseline(group, name, chosen), name)
        for group in groups(report)
        for name in group.compared
        if any(chosen(case) for case in group.cases if case.implementation == name)
    ]
    held = {case.precision.state_dtype for group, _ in found for case in group.cases if chosen(case)}
    absent = [state for state in state_dtypes if state not in held]
    if not found or (every_state and absent):
        raise _nothing_compared(report, f"{fmt.words(kinds, 'or')} with {fmt.words(absent, 'or')} states")
    parts: list[RenderableType] = [Text(f"{report.subject}, run {report.id}", style="bold")]
    wanted = [PrecisionRecord(intermediates=kind, state_dtype=state) for kind in kinds for state in state_dtypes]
    wrong = shortcomings(outcome(report.restricted(precisions=wanted)))
    parts += [terminal.verdict(VerdictLine(line, False)) for line in wrong]
    parts += map(terminal.verdict, advice(found))
    parts += map(terminal.bullet, caveats(report))
    for group, name in found:
        for tensor in calls.TENSORS:
            if made := calls.matches(group, name, tensor):
                parts += ["", terminal.SplitTable(made)]
    return Renderables(*parts)


def _with_baseline(group: Group, name: str, chosen: Callable[[Case], bool]) -> Group:
    """The chosen cases of an implementation, and every case of the baseline."""
    baseline = group.baseline
    return group.keep(lambda case: chosen(case) if case.implementation == name else case.implementation == baseline)


def _nothing_compared(report: Report, asked: str) -> BadInputError:
    held = {one.precision for group in groups(report) for name in group.compared for one in group.series(name)}
    if held:
        names = "; ".join(map(str, sorted(held, key=precision_order)))
        return BadInputError(f"Run {report.id} compared nothing at {asked}.", f"It compared: {names}.")
    hint = "It ended before its first comparison.  Run again."
    if report.of_answers:
        hint = "It holds a model's answers: 'ssdprof export' shows them."
    elif report.cases:
        hint = f"It holds {report.baseline} alone."
    return BadInputError(f"Run {report.id} compared no implementation with its baseline.", hint)


# --- ssdprof runs


def runs(found: Sequence[tuple[Path, Report | SsdprofError]]) -> Table | None:
    """A row for each report, readable or not.  found: folder -> the report, or what is wrong with it."""

    def cell(of: Callable[[Report], str]) -> Callable[[tuple[Path, Report | SsdprofError]], str]:
        return lambda row: of(row[1]) if isinstance(row[1], Report) else fmt.MISSING

    def model(report: Report) -> str:
        return f"{report.subject}, random weights" if report.model and report.model.random_weights else report.subject

    def tokens(report: Report) -> str:
        return ", ".join(fmt.count(prompt.seqlen) for prompt in report.prompts)

    def verdict(row: tuple[Path, Report | SsdprofError]) -> str:
        if not isinstance(row[1], Report):
            return "unreadable"
        return f"{verdict_word(row[1])}{'' if row[1].complete else ', partial'}"

    return table(
        "Runs",
        (
            text("run", lambda row: row[0].name),
            text("started", cell(lambda report: when(report.created))),
            text("model", cell(model)),
            Column("tokens", cell(tokens)),
            text("GPU", cell(lambda report: gpu_name(report.environment))),
            text("verdict", verdict),
        ),
        found,
        note="  ".join(f"{path.name}: {one.message}" for path, one in found if isinstance(one, SsdprofError)),
    )


def verdict_word(report: Report) -> str:
    """ "passed", "failed", "refused" or "incomplete"."""
    found = outcome(report)
    if found.passed:
        return "passed"
    if found.failed or found.broken or found.answers_failed:
        return "failed"
    return "refused" if found.refused else "incomplete"
