"""What commands show: progress, a report, or the plan of a dry run.  Their exit codes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from ssdprof.commands import terminal
from ssdprof.core.outcome import Outcome
from ssdprof.core.report import Report
from ssdprof.core.target import DryRun
from ssdprof.core.words import placement_words, serving_words, size_words
from ssdprof.errors import ExitCode, harmless
from ssdprof.progress import Advance, LineWatcher, Watcher
from ssdprof.report import brief, statements
from ssdprof.store.ranks import Ranks
from ssdprof.store.reports import dump

# The speed for the ETA is that of the last hour: a layer may take minutes.
_SPEED_PERIOD_S = 3600.0


class TerminalWatcher(LineWatcher):
    """Draws steps as progress bars on stderr.  If stderr is no terminal, it prints lines."""

    def __init__(self) -> None:
        super().__init__()
        self._console = terminal.err()
        self._bars: Progress | None = None

    def say(self, text: str) -> None:
        self._console.print(Text(harmless(text)))

    @contextmanager
    def step(self, text: str, total: int | None = None, *, unit: str = "") -> Iterator[Advance]:
        step = self._bar if self._console.is_terminal else super().step
        with step(text, total, unit=unit) as advance:
            yield advance

    @contextmanager
    def _bar(self, text: str, total: int | None, *, unit: str) -> Iterator[Advance]:
        """A bar below the bars of outer steps.

        It is drawn whenever the step advances, and not by a thread, which would share the
        interpreter with the work that is timed.
        """
        is_outermost = self._bars is None
        bars = self._bars or self._new_bars()
        self._bars = bars

        def advance(amount: int) -> None:
            bars.advance(task, amount)
            bars.refresh()

        with bars if is_outermost else nullcontext():
            task = bars.add_task(text, total=total, unit=unit)
            bars.refresh()
            try:
                yield advance
            finally:
                bars.remove_task(task)
                if is_outermost:
                    self._bars = None

    def _new_bars(self) -> Progress:
        """A display of bars.  In a narrow window their words wrap, and their numbers do not."""
        no_wrap = Column(no_wrap=True)
        return Progress(
            TextColumn("{task.description}", markup=False, table_column=Column()),
            BarColumn(bar_width=12),
            MofNCompleteColumn(table_column=no_wrap),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(table_column=no_wrap),
            TextColumn("ETA"),
            TimeRemainingColumn(table_column=no_wrap),
            console=self._console,
            transient=True,
            auto_refresh=False,
            speed_estimate_period=_SPEED_PERIOD_S,
        )


def prints_report(ranks: Ranks | None) -> bool:
    """Whether this process prints the report, which the first rank does for all ranks."""
    return ranks is None or ranks.is_first


def watcher_of(ranks: Ranks | None) -> Watcher:
    """A watcher that shows progress; on all ranks but the first one, it shows nothing."""
    return TerminalWatcher() if prints_report(ranks) else Watcher()


def finish(folder: Path, report: Report, *, as_json: bool) -> None:
    """Print the report that a command has stored in a folder, and end with exit code 1 unless it
    passed.
    """
    show(report, brief.shown(report), as_json=as_json, note=f"Kept in {folder}.")
    end(report)


def show(report: Report, shown: RenderableType, *, as_json: bool, note: str = "") -> None:
    """Print a report: as JSON, or else `shown` after a note on stderr."""
    if as_json:
        print(dump(report))
    else:
        if note:
            terminal.say(note)
        terminal.out().print(shown)


def end(report: Report, *, on_screen: bool = True) -> None:
    """End with exit code 1 unless all requested cases were compared and passed, and all conditions
    hold.

    The reasons are printed on stderr.  For a run or answers these are only the broken conditions,
    because the report, which the command has printed, names the failed cases.

    on_screen: whether the command has printed the report, also as JSON; else all reasons are
        printed.
    """
    outcome = Outcome(report)
    if outcome.passed:
        return
    if report.kind in ("bench", "prefill") or not on_screen:
        fail(statements.why_not_passed(report))
    fail(f"GATE FAILED: {verdict}" for verdict in outcome.broken)


def fail(lines: Iterable[str]) -> NoReturn:
    """Print the lines on stderr, and end with exit code 1."""
    for line in lines:
        terminal.say(line)
    raise typer.Exit(ExitCode.GATE_FAILED)


def show_plan(plan: DryRun, *, as_json: bool) -> None:
    """Print the plan of --dry-run on stdout."""
    if as_json:
        terminal.print_json(plan.model_dump(mode="json"))
        return
    checkpoint = plan.checkpoint
    indices = ", ".join(str(layer.index) for layer in plan.layers)
    prompt = ", ".join(f"{seqlen:,}" for seqlen in plan.seqlens)
    operator = f"{plan.layers[0].operator.upper()}, {plan.dims}"
    free = f"{size_words(plan.free_bytes)} are free on {plan.device}"
    rows = {
        "layers": f"{indices} ({operator}) of {checkpoint.layer_count}",
        "prompt": f"{prompt} {'token' if plan.seqlens == (1,) else 'tokens'}",
        "served": serving_words(
            plan.serving, batch=plan.batch, tensor_parallel=plan.tensor_parallel
        ),
        "download": size_words(plan.download_bytes),
        "weights": f"{size_words(plan.weight_bytes)} loaded; {free}",
        "placement": placement_words(plan.placement) if plan.placement else "",
    }
    lines = [f"{checkpoint.repo_id} {checkpoint.revision or ''}".rstrip()]
    lines += [f"  {note}" for note in plan.notes]
    lines += [f"  {name:<10}{value}" for name, value in rows.items() if value]
    for file in plan.files:
        remark = "  (here)" if file.cached else ""
        lines.append(f"  {size_words(file.size_bytes):>12}  {file.name}{remark}")
    terminal.out().print(Text("\n".join(lines)))
