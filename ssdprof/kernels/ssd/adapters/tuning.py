"""Libraries that tune themselves, held to their best.

Their tuners choose by sizes of the model and not by the number of tokens, so that the first call decides for all later
ones.  Here short and long calls are tuned apart, which a user of the library does not get.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from triton.runtime import Autotuner

SHORT = 8192  # tokens; what they take fits into the L2 cache of a large GPU


class TwoTunings:
    """Keeps what the modules' tuners chose for short calls apart from what they chose for long ones."""

    def __init__(self, modules: Iterable[ModuleType]) -> None:
        found = [tuner for module in modules for thing in vars(module).values() if (tuner := _tuner(thing)) is not None]
        self._tuners = list({id(tuner): tuner for tuner in found}.values())
        self._choices: dict[bool, list[dict[Any, Any]]] = {short: [{} for _ in self._tuners] for short in (True, False)}

    def use_for(self, tokens: int) -> None:
        """Let the tuners see only what they chose for calls like one of so many tokens."""
        for tuner, choices in zip(self._tuners, self._choices[tokens <= SHORT], strict=True):
            tuner.cache = choices


def _tuner(thing: Any) -> Autotuner | None:
    """The autotuner that a kernel is wrapped in, if it is, under other wrappers or not."""
    while thing is not None and not isinstance(thing, Autotuner | type | ModuleType):
        thing = getattr(thing, "fn", None)
    return thing if isinstance(thing, Autotuner) else None
