"""The progress of long commands, and the times of their steps.

Stages report progress to a `Watcher`; the command line has one that draws it.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Advance = Callable[[int], None]
_MOST_LINES = 100  # an outermost step with a total up to this has a line for each advance
_QUIET_S = 2.0  # the least seconds between two lines on the progress of any other step


class Watcher:
    """Receives messages and progress, and never changes a result.  This class shows nothing."""

    def say(self, text: str) -> None:
        """Show a sentence to the user at once."""

    def step(
        self,
        text: str,  # noqa: ARG002
        total: int | None = None,  # noqa: ARG002
        *,
        unit: str = "",  # noqa: ARG002
    ) -> AbstractContextManager[Advance]:
        """A context in which a long step runs.  Steps may be nested.

        The value of the context is a function for progress.  It is called with the amount of work
        that was done since the last call.

        text: the step, in words.  total: the amount of work; None if it is not known.  unit: a
        plural noun for the amounts.
        """
        return nullcontext(_ignore)


def _ignore(*_: object) -> None:
    """Do nothing with the progress of a step, or with its time."""


class LineWatcher(Watcher):
    """Prints lines on stderr.

    There is a line when a step begins, and, if its total is known, when it advances.  An inner
    step, and one with a total above `_MOST_LINES`, has a line on its progress at most every
    `_QUIET_S`, so that a log does not become long.  The outermost step also has one when its total
    is reached.

    levels: the number of levels of nested steps that have lines.
    """

    def __init__(self, levels: int = 1) -> None:
        self._levels = levels
        self._depth = 0

    def say(self, text: str) -> None:
        print(text, file=sys.stderr)

    @contextmanager
    def step(self, text: str, total: int | None = None, *, unit: str = "") -> Iterator[Advance]:
        """See `Watcher.step`."""
        self._depth += 1
        depth = self._depth
        done = 0
        last_s = time.monotonic()

        def advance(amount: int) -> None:
            nonlocal done, last_s
            done += amount
            if depth > self._levels or total is None:
                return
            always_shown = depth == 1 and (total <= _MOST_LINES or done >= total)
            if always_shown or time.monotonic() > last_s + _QUIET_S:
                self.say(f"{text}: {done:,} of {total:,} {unit}".rstrip())
                last_s = time.monotonic()

        if depth <= self._levels:
            self.say(text)
        try:
            yield advance
        finally:
            self._depth -= 1


class StepClock:
    """Times the steps of a job, and knows how much is left of its time budget.

    budget: seconds of wall-clock time from now on; None for no limit.
    on_step: called with the name and the seconds of every step that ends without an exception.
    now: the clock, in seconds.
    """

    def __init__(
        self,
        budget: float | None = None,
        on_step: Callable[[str, float], object] = _ignore,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._end_s = math.inf if budget is None else now() + budget
        self._on_step = on_step
        self.now = now

    def left(self) -> float:
        """The remaining seconds of the budget; infinite without one, and 0 when it is spent."""
        return max(0.0, self._end_s - self.now())

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Call `on_step` after the block, unless the block raises."""
        began_s = self.now()
        yield
        self._on_step(name, round(self.now() - began_s, 3))
