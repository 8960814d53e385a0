"""Times the steps of a job, and tracks its budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ssdprof.core.report import StepTime


class StepClock:
    """budget: seconds of wall clock from now on; None: no limit.  on_step: called after every step.

    now: the clock, in seconds.
    """

    def __init__(
        self,
        budget: float | None = None,
        on_step: Callable[[StepTime], object] = lambda _: None,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ends = math.inf if budget is None else now() + budget
        self._on_step, self.now = on_step, now

    def left(self) -> float:
        """Remaining seconds of the budget; infinite without one, and 0 when it is spent."""
        return max(0.0, self._ends - self.now())

    def within(self, what: str) -> StepClock:
        """The same clock for a part of the job."""

        def on_step(step: StepTime) -> None:
            self._on_step(step.model_copy(update={"what": f"{what}, {step.what}"}))

        part = StepClock(None, on_step, now=self.now)
        part._ends = self._ends
        return part

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Call `on_step` after the block, unless it raises."""
        began = self.now()
        yield
        self._on_step(StepTime(what=what, seconds=round(self.now() - began, 3)))
