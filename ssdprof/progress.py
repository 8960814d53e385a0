"""How a command that takes a while says what it is doing.  Stages call a Watcher; the command line draws one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

Advance = Callable[[int], None]


class Watcher(Protocol):
    """Hears of steps as they happen.  Nothing it does changes a result."""

    def say(self, text: str) -> None:
        """One sentence that the user should see now."""

    def step(self, text: str, total: int | None = None, *, unit: str = "") -> AbstractContextManager[Advance]:
        """Something that takes a while.  The context's value is called with how much was done since the last call.

        total: in `unit`, a plural noun; None if it is unknown.  A step may hold other steps.
        """


class Unwatched:
    """A Watcher that shows nothing."""

    def say(self, text: str) -> None:
        """Ignores the text."""

    def step(self, text: str, total: int | None = None, *, unit: str = "") -> AbstractContextManager[Advance]:  # noqa: ARG002
        """Nobody sees it."""
        return nullcontext(lambda _: None)
