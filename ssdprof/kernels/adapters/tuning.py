"""Tunes libraries that tune themselves, for each kind of call, in a short time.

Their tuners distinguish few sizes of the model and not the number of tokens, so the first call decides for all later
ones.  Here calls of different kinds are tuned separately, which a user of the library does not get.  The tuners still
choose among the library's own configurations by measured times, but compile them in parallel, and measure each for a
quarter of the usual time.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from types import ModuleType
from typing import Any

import triton
from triton.runtime import Autotuner
from triton.testing import do_bench

SHORT = 8192  # tokens, whose tensors fit into the L2 cache of a large GPU
_WARMUP_MS, _MEASURE_MS = 6, 25  # of each configuration; Triton's own are 25 and 100


class Tunings:
    """Keeps the choices of the modules' tuners separate for each kind of call.

    Compiled kernels are shared by all kinds.
    """

    def __init__(self, modules: Iterable[ModuleType]) -> None:
        found = [tuner for module in modules for thing in vars(module).values() if (tuner := _tuner(thing)) is not None]
        self._tuners = list({id(tuner): tuner for tuner in found}.values())
        self._kind: Hashable = object()
        self._choices = defaultdict[Hashable, list[dict[Any, Any]]](lambda: [{} for _ in self._tuners])
        for tuner in self._tuners:
            _hasten(tuner)

    def use_for(self, kind: Hashable) -> None:
        """Let the tuners see only what they chose for calls of this kind."""
        if kind == self._kind:
            return
        self._kind = kind
        for tuner, choices in zip(self._tuners, self._choices[kind], strict=True):
            tuner.cache = choices

    def zero_before_each_try(self, argument: str) -> None:
        """For kernels with counters in a buffer, which skip work if it is not zero at the start."""

        def zero(arguments: dict[str, Any], reset_only: bool = False) -> None:  # noqa: ARG001
            arguments[argument].zero_()

        for tuner in self._tuners:
            tuner.pre_hook = zero


def _tuner(thing: Any) -> Autotuner | None:
    """The autotuner around a kernel, possibly inside of other wrappers, if there is one."""
    while thing is not None and not isinstance(thing, Autotuner | type | ModuleType):
        thing = getattr(thing, "fn", None)
    return thing if isinstance(thing, Autotuner) else None


def _hasten(tuner: Autotuner) -> None:
    tuner.do_bench = partial(do_bench, warmup=_WARMUP_MS, rep=_MEASURE_MS)
    tuner.early_config_prune = partial(_compiled, tuner.fn, tuner.early_config_prune)


def _compiled(
    kernel: Any, prune: Callable[..., list[triton.Config]] | None, configs: list[triton.Config],
    arguments: dict[str, Any], **options: Any,
) -> list[triton.Config]:  # fmt: skip
    """The configurations that `prune` leaves, compiled.  The tuner calls this before it measures."""
    kept = configs if prune is None else prune(configs, arguments, **options)

    def compile_all() -> None:
        # the tuner finds and reports compile errors itself
        with triton.AsyncCompileMode(pool, ignore_errors=True):
            for config in kept:
                kernel.run(**{**arguments, **options, **config.all_kwargs(), "warmup": True})

    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        copy_context().run(compile_all)  # the mode ends with the context, also after an exception
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return kept
