"""Shows the progress of a job: bars on a terminal, lines in a log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.text import Text

from ssdprof.commands import terminal

if TYPE_CHECKING:
    from rich.progress import Progress

    from ssdprof.progress import Advance

_ETA_FROM = 3600.0  # the ETA is estimated from these seconds: a layer may take minutes


class TerminalWatcher:
    """Draws steps as progress bars on stderr; if that is not a terminal, prints lines from time to time."""

    def __init__(self) -> None:
        self._console = terminal.err()
        self._bars: Progress | None = None
        self._depth = 0

    def say(self, text: str) -> None:
        self._console.print(Text(text))

    @contextmanager
    def step(self, text: str, total: int | None = None, *, unit: str = "") -> Iterator[Advance]:
        self._depth += 1
        try:
            if self._console.is_terminal:
                with self._shown() as bars:
                    yield from self._bar(bars, text, total, unit)
            else:
                yield self._lines(text, total, unit)
        finally:
            self._depth -= 1

    def _lines(self, text: str, total: int | None, unit: str) -> Advance:
        """Prints only outermost steps, because a log is read afterwards."""
        done = 0

        def advance(amount: int) -> None:
            nonlocal done
            done += amount
            if outermost and total is not None:
                self.say(f"{text}: {done} of {total} {unit}".rstrip())

        if outermost := self._depth == 1:
            self.say(text)
        return advance

    def _bar(self, bars: Progress, text: str, total: int | None, unit: str) -> Iterator[Advance]:
        task = bars.add_task(text, total=total, unit=unit)
        bars.refresh()

        def advance(amount: int) -> None:
            bars.advance(task, amount)
            bars.refresh()

        try:
            yield advance
        finally:
            bars.remove_task(task)

    @contextmanager
    def _shown(self) -> Iterator[Progress]:
        """The bars on screen, the outermost step's first.  They are drawn when a step reports progress, not by a
        separate thread, which would share the interpreter with the timed work."""
        if self._bars is not None:
            yield self._bars
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        self._bars = Progress(
            *columns, console=self._console, transient=True, auto_refresh=False, speed_estimate_period=_ETA_FROM
        )
        try:
            with self._bars:
                yield self._bars
        finally:
            self._bars = None
