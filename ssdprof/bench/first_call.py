"""The first call of a kernel, in which it is compiled: how long it takes, and how long it may take."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from ssdprof.bench.schema import Compiled, FirstCall
from ssdprof.kernels import _launch
from ssdprof.kernels.ssd import fused
from ssdprof.kernels.ssd.inputs import SSDOutput

TRIES = 3
_LONG = 2.0  # s for one kernel
_AGAIN = 1.0  # s; an exception that a callback swallows is raised once more


class TimeIsUp(BaseException):
    """A first call was broken off.  No Exception, which the libraries that it interrupts might handle."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait for a first call.  most: seconds for each.  until: the end of the bench, by time.monotonic."""

    most: float = math.inf
    until: float = math.inf

    @property
    def exhausted(self) -> bool:
        """There is no time for anything else either."""
        return time.monotonic() >= self.until

    @property
    def seconds(self) -> float:
        return max(0.0, min(self.most, self.until - time.monotonic()))


def first_call(run: Callable[[], SSDOutput], device: torch.device, patience: Patience) -> tuple[SSDOutput, FirstCall]:
    """Make the call and wait for the GPU.  Raises TimeIsUp.

    A call can be broken off between two steps of a compiler, and while it waits for one; not during the GPU's work.
    """
    compiled: list[Compiled] = []
    began = time.monotonic()
    with _noted(compiled), _at_most(patience.seconds):
        output = run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return output, FirstCall(seconds=time.monotonic() - began, compiled=tuple(compiled))


def took_long(first: FirstCall | None) -> bool:
    """Whether a kernel was compiled for so long that it is worth another try.

    A processor that others share has half of its speed for seconds or minutes, and what works beside a compiler is no
    cost of a kernel: the least of a few tries is.
    """
    return first is not None and any(one.seconds > _LONG for one in first.compiled)


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """As if nobody had ever called a kernel of ssdprof: none is found compiled, in memory or on disk."""
    for module in [module for name, module in sys.modules.items() if name.startswith("ssdprof.kernels")]:
        for function in vars(module).values():
            if isinstance(function, JITFunction):
                function.device_caches.clear()
    fused.forget_launches()
    _launch._kept.clear()  # what is launched the second time without asking Triton
    with TemporaryDirectory(prefix="ssdprof-") as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        yield


def least(first: FirstCall, other: FirstCall | None) -> FirstCall:
    """`first`, of whose kernels each took the least that it took in either."""
    if other is None:
        return first
    seconds = {one.kernel: one.seconds for one in other.compiled}
    compiled = (
        one.model_copy(update={"seconds": min(one.seconds, seconds[one.kernel]), "tries": one.tries + 1})
        if one.kernel in seconds
        else one
        for one in first.compiled
    )
    return first.model_copy(update={"compiled": tuple(compiled)})


def slower(one: FirstCall | None, other: FirstCall | None) -> FirstCall | None:
    """Of two first calls of the same kernels: that of the kernels which were not compiled yet."""
    return max((one, other), key=lambda first: first.seconds if first else 0.0)


@contextmanager
def _noted(compiled: list[Compiled]) -> Iterator[None]:
    """Every kernel that Triton compiles in the block, in whatever thread."""

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
    """TimeIsUp in the block when they have passed."""
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
