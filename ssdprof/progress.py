"""Progress of long commands: stages call a Watcher, which the command line draws; the times of
their steps.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Advance = Callable[[int], None]
_QUIET_S = 2.0


class Watcher:
    """Receives messages and progress, and never changes a result.  This one shows nothing."""

    def say(self, text: str) -> None:
        """One sentence that the user should see now."""

    def step(
        self,
        text: str,  # noqa: ARG002
        total: int | None = None,  # noqa: ARG002
        *,
        unit: str = "",  # noqa: ARG002
    ) -> AbstractContextManager[Advance]:
        """A long step.  The context's value is called with the amount done since the last call.

        total: in `unit`, a plural noun; None if it is unknown.  A step may hold other steps.
        """
        return nullcontext(_ignore)


def _ignore(*_: object) -> None:
    """Ignore progress or a step."""


class LineWatcher(Watcher):
    """Prints lines on stderr: as steps begin and, for outermost ones, whenever they advance; for
    inner ones at most every two seconds, because a log is read afterwards.

    levels: of steps that have lines.
    """

    def __init__(self, levels: int = 1) -> None:
        self._levels, self._depth = levels, 0

    def say(self, text: str) -> None:
        print(text, file=sys.stderr)

    @contextmanager
    def step(self, text: str, total: int | None = None, *, unit: str = "") -> Iterator[Advance]:
        self._depth += 1
        depth, done, last_s = self._depth, 0, time.monotonic()

        def advance(amount: int) -> None:
            nonlocal done, last_s
            done += amount
            is_due = depth == 1 or time.monotonic() > last_s + _QUIET_S
            if depth <= self._levels and total is not None and is_due:
                self.say(f"{text}: {done:,} of {total:,} {unit}".rstrip())
                last_s = time.monotonic()

        if depth <= self._levels:
            self.say(text)
        try:
            yield advance
        finally:
            self._depth -= 1


class StepClock:
    """Times the steps of a job, and tracks its budget.

    budget: seconds of wall clock from now on; None: no limit.  on_step: gets the name and the
    seconds of every step.
    now: the clock, in seconds.
    """

    def __init__(
        self,
        budget: float | None = None,
        on_step: Callable[[str, float], object] = _ignore,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ends = math.inf if budget is None else now() + budget
        self._on_step, self.now = on_step, now

    def left(self) -> float:
        """Remaining seconds of the budget; infinite without one, and 0 when it is spent."""
        return max(0.0, self._ends - self.now())

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Call `on_step` after the block, unless it raises."""
        began = self.now()
        yield
        self._on_step(what, round(self.now() - began, 3))
