"""The first call of a kernel, in which it is compiled: how long it takes, and how long it may take."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton

from ssdprof.bench.schema import Compiled, FirstCall
from ssdprof.operators.operator import Output

_AGAIN = 1.0  # s; an exception that a callback swallows is raised once more


class TimeIsUp(BaseException):
    """A first call was stopped.  Not an Exception, because the interrupted library might handle one."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait for a first call.  most: seconds for each.  until: the end of the bench, by time.monotonic."""

    most: float = math.inf
    until: float = math.inf

    @property
    def exhausted(self) -> bool:
        """Whether the time of the whole bench is over."""
        return time.monotonic() >= self.until

    @property
    def seconds(self) -> float:
        return max(0.0, min(self.most, self.until - time.monotonic()))


def first_call(run: Callable[[], Output], device: torch.device, patience: Patience) -> tuple[Output, FirstCall]:
    """Make the call and wait for the GPU.  Raises TimeIsUp.

    A call can be stopped between two steps of a compiler, and while it waits for one, but not during the GPU's work.
    """
    compiled: list[Compiled] = []
    began = time.monotonic()
    with _noted(compiled), _at_most(patience.seconds):
        output = run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return output, FirstCall(seconds=time.monotonic() - began, compiled=tuple(compiled))


def slower(one: FirstCall | None, other: FirstCall | None) -> FirstCall | None:
    """The slower of two first calls of the same kernels: the faster one found them in the cache."""
    return max((one, other), key=lambda first: first.seconds if first else 0.0)


@contextmanager
def _noted(compiled: list[Compiled]) -> Iterator[None]:
    """Collects every kernel that Triton compiles in the block, in any thread."""

    def note(*, src: Any, times: triton.knobs.CompileTimes, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(Compiled(kernel=src.name, seconds=times.total / 1e6))

    before = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = note
    try:
        yield
    finally:
        triton.knobs.compilation.listener = before


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise TimeIsUp in the block after this number of seconds."""
    if math.isinf(seconds):
        yield
        return

    def ring(*_: object) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6), _AGAIN)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
