"""TuneReport -> tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ssdprof.core import words as fmt
from ssdprof.report.tables.table import Table, columns
from ssdprof.report.terminal import SplitTable
from ssdprof.tuning.records import Outcome, PlannedSearch, Trial, TuneReport
from ssdprof.tuning.search import Problem, difference

_MOST_ROWS = 12  # of the candidates that were timed, the fastest
READING = (
    "Device: the time on the GPU alone, replayed from a CUDA graph; for several lengths, their "
    "geometric mean.  Ratio: the committed configuration's time over the candidate's, sampled in turns, with its 95 % "
    "interval.  A configuration that is kept was compared with the fp64 oracle on the timed inputs, and is more "
    "than 1 % faster with 95 % confidence."
)


def terminal(report: TuneReport) -> RenderableType:
    """All searches, then a summary."""
    parts: list[RenderableType] = []
    for table in tables(report):
        parts += [SplitTable(table, rest="--json"), ""]
    return Group(*parts, Text(READING, style="dim"))


def tables(report: TuneReport) -> Iterator[Table]:
    yield from map(_search, report.outcomes)
    if report.outcomes:
        yield _summary(report.outcomes)
    if report.left_out:
        rows = tuple((what,) for what in report.left_out)
        yield Table(title="Left out", headers=("what",), rows=rows, align=columns(1, 0), wraps=0)


def planned(problems: Iterable[Problem]) -> Iterator[PlannedSearch]:
    """The first candidates, a record for each varied setting; later candidates start from the best one."""
    for problem in problems:
        for axis in problem.operator.tunable.axes(problem.committed):
            options = axis(problem.committed, problem.inputs[-1])
            changes = (change for option in options if (change := difference(option, problem.committed)))
            yield PlannedSearch(
                shape=problem.shape,
                tokens=problem.tokens,
                intermediates=problem.calls.intermediates,
                candidates=tuple(changes),
            )


def dry(searches: Iterable[PlannedSearch]) -> Table:
    rows = [(one.shape, one.tokens, one.intermediates, "; ".join(one.candidates) or "none") for one in searches]
    return Table(
        title="Candidates, by what they change in the committed configuration",
        headers=("shape", "tokens", "intermediates", "candidates"),
        rows=tuple(rows),
        align=columns(4, 0),
        keys=3,
        wraps=3,
    )


def _search(outcome: Outcome) -> Table:
    timed = sorted(
        (trial for trial in outcome.trials if trial.device_us is not None), key=lambda trial: trial.device_us or 0
    )
    shown = [trial for place, trial in enumerate(timed) if place < _MOST_ROWS or trial.verdict == "committed"]
    failed = [trial for trial in outcome.trials if trial.device_us is None]
    committed = ", ".join(f"{name} {value}" for name, value in outcome.committed.values.items())
    return Table(
        title=f"{outcome.shape}, {outcome.tokens}, {outcome.calls.intermediates}: {outcome.committed.kernel} kernel",
        headers=("candidate", "device", "ratio", "verdict"),
        rows=tuple(map(_row, [*shown, *failed])),
        align=("left", "right", "right", "left"),
        note=f"Committed: {committed}.  {len(outcome.trials)} tried.",
        wraps=3,
    )


def _row(trial: Trial) -> tuple[str, ...]:
    return (
        trial.change or "committed",
        fmt.duration(trial.device_us),
        fmt.speedup(trial.device_ratio, trial.device_interval),
        f"{trial.verdict}: {trial.why}" if trial.why else trial.verdict,
    )


def _summary(outcomes: Sequence[Outcome]) -> Table:
    rows = []
    for outcome in outcomes:
        find = outcome.find
        found = next((trial for trial in outcome.trials if find and trial.settings == find.settings), None)
        rows.append(
            (
                outcome.shape,
                outcome.tokens,
                outcome.calls.intermediates,
                found.change if found else "committed stays",
                fmt.speedup(find.device_ratio, find.device_interval) if find else fmt.MISSING,
                outcome.why,
            )
        )
    return Table(
        title="Found",
        headers=("shape", "tokens", "intermediates", "configuration", "ratio", "why"),
        rows=tuple(rows),
        align=("left", "left", "left", "left", "right", "left"),
        keys=3,
        wraps=5,
    )
