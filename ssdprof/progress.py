"""Progress of long commands: stages call a Watcher, which the command line implements."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

Advance = Callable[[int], None]


class Watcher(Protocol):
    """Receives messages and progress.  It never changes a result."""

    def say(self, text: str) -> None:
        """One sentence that the user should see now."""

    def step(self, text: str, total: int | None = None, *, unit: str = "") -> AbstractContextManager[Advance]:
        """A long step.  The context's value is called with the amount done since the last call.

        total: in `unit`, a plural noun; None if it is unknown.  A step may hold other steps.
        """


class Unwatched:
    """A Watcher that shows nothing."""

    def say(self, text: str) -> None:
        """Ignores the text."""

    def step(self, *_: object, **__: object) -> AbstractContextManager[Advance]:
        """Ignores the step."""
        return nullcontext(lambda _: None)
