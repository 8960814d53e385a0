"""Kernels of other libraries, as `registry.Implementation`s: code that the adapters of all
operators share.

An adapter contains no code of the library.  It rejects inputs for which the library silently
returns wrong results.  Plans give no workspace, because it is measured.

Tuners of libraries choose by few sizes of the model, so that the first call decides for all later
ones.  Here calls of different kinds are tuned separately, which a user of the library does not get.
The tuners still choose among the library's configurations by measured times, but these are compiled
in parallel, and measured for a quarter of the time.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
import triton
from triton.runtime import Autotuner
from triton.testing import do_bench

from ssdprof.kernels.inputs import Inputs, Output
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, UnsupportedError

SHORT = 8192  # tokens, whose data fits into the L2 cache of a large GPU
_WARMUP_MS, _MEASURE_MS = 6, 25  # per configuration; Triton's defaults are 25 and 100
MOST_STEPS = 64  # tokens of a sequence for token-by-token kernels
INT32_ELEMENTS = 2**31  # what 32-bit offsets can address
# packages of which the modules with kernels need nothing, outermost first
_UNRUN = (
    "vllm",
    "vllm.model_executor",
    "vllm.models",
    "vllm.models.kimi_k3",
    "vllm.models.kimi_k3.nvidia",
    "vllm.models.kimi_k3.nvidia.ops",
    "sglang",
    "sglang.kernels",
    "sglang.kernels.ops",
    "sglang.kernels.ops.mamba",
    "sglang.kernels.ops.mamba.triton_ops",
)
T = TypeVar("T")


def span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one, including those that strides skip."""
    sizes_and_strides = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sizes_and_strides)


def library_kernel(
    operator: str,
    name: str,
    unsupported: Callable[[Any, Precision], str],
    call: Callable[[Any, Precision], Any],
    plan: Callable[[Any, Precision], Plan] | Plan,
) -> Implementation:
    """A library's kernel.  unsupported: why it does not take inputs; "" if it does."""
    plan_of = (lambda _inputs, _precision: plan) if isinstance(plan, Plan) else plan

    def checked(then: Callable[[Any, Precision], Any], inputs: Inputs, precision: Precision) -> Any:
        if reason := unsupported(inputs, precision):
            raise UnsupportedError(f"{name}: {reason}")
        return then(inputs, precision)

    return Implementation(
        operator=operator, name=name, run=partial(checked, call), plan=partial(checked, plan_of)
    )


def once(of: Callable[[Any], T]) -> Callable[[Any], T]:
    """`of`, called once for inputs; what it returned is kept as long as these live."""
    kept: dict[int, T] = {}

    def get(inputs: Any) -> T:
        if id(inputs) not in kept:
            kept[id(inputs)] = of(inputs)
            weakref.finalize(inputs, kept.pop, id(inputs), None)
        return kept[id(inputs)]

    return get


# what makes a call; the values and the states as the call reads them
Prepared = tuple[Callable[[], Output], tuple[torch.Tensor | None, ...]]


def prepared_kernel(
    operator: str,
    name: str,
    unsupported: Callable[[Any, Precision], str],
    prepare: Callable[[Any], Prepared],
    plan: Callable[[Any, Precision], Plan] | Plan,
) -> Implementation:
    """A library's kernel whose arguments are prepared once for inputs, and kept as long as these
    live.
    """
    prepared = once(prepare)

    def call(inputs: Inputs, _precision: Precision) -> Output:
        with torch.cuda.device(inputs.values.get_device()), torch.no_grad():
            return prepared(inputs)[0]()

    def copies(inputs: Inputs) -> list[torch.Tensor]:
        tensors = inputs.tensors
        addresses = {tensors[name].data_ptr() for name in inputs.LINEAR if name in tensors}
        read = (tensor for tensor in prepared(inputs)[1] if tensor is not None)
        return [tensor for tensor in read if tensor.data_ptr() not in addresses]

    return replace(library_kernel(operator, name, unsupported, call, plan), copies=copies)


def import_kernels(name: str) -> Any:
    """A server's module with kernels, imported without running the packages around it that patch
    torch or transformers, or that load the server.  Raises ImportError.
    """
    for package in _UNRUN:
        if package in sys.modules or not name.startswith(f"{package}."):
            continue
        spec = find_spec(package)
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError(f"No module named {package!r}")
        sys.modules[package] = bare = ModuleType(package)
        bare.__spec__, bare.__path__ = spec, list(spec.submodule_search_locations)
    return import_module(name)


def model_function(model_type: str, name: str, package: str) -> Callable[..., Any]:
    """transformers' own torch function of this name; with a package, the one that models call where
    the package is installed.

    Every modeling file with a function of this name has the same one.  Raises ImportError.
    """
    module = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    function: Callable[..., Any] | None = getattr(module, name, None)
    original: Callable[..., Any] | None = function and inspect.unwrap(function)
    if function is None or original is None or original is function:
        raise ImportError(f"transformers {package_version('transformers')} does not wrap {name}")
    if not package:
        return original
    if find_spec(package) is None:
        raise ImportError(f"transformers finds no {package} here, and calls its torch function")
    return function


def content(file: Path) -> str:
    """Name and hash of a file, for example "ssd_fused5.py, sha256 0123456789ab"."""
    return f"{file.name}, sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"


def package_version(package: str) -> str:
    """The version of an installed package, or "unknown" for a checkout."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


class Tunings:
    """Keeps the choices of the modules' tuners separately for each kind of call; all share compiled
    kernels.

    Every process chooses anew.
    """

    def __init__(self, modules: Iterable[ModuleType]) -> None:
        """Finds the tuners among the modules' names; one that several names hold counts once."""
        tuners: dict[int, Autotuner] = {}
        for module in modules:
            for thing in vars(module).values():
                if (tuner := _tuner(thing)) is not None:
                    tuners[id(tuner)] = tuner
        self._tuners = list(tuners.values())
        self._kind: Hashable = object()
        self._choices = defaultdict[Hashable, list[dict[Any, Any]]](
            lambda: [{} for _ in self._tuners]
        )
        for tuner in self._tuners:
            _hasten(tuner)

    def use_for(self, kind: Hashable) -> None:
        """Let the tuners see only their choices for calls of this kind."""
        if kind == self._kind:
            return
        self._kind = kind
        for tuner, choices in zip(self._tuners, self._choices[kind], strict=True):
            tuner.cache = choices

    def zero_before_each_try(self, argument: str) -> None:
        """Zero a buffer before each measurement, for kernels that count in it and skip work if it
        is not zero.
        """

        def zero(
            arguments: dict[str, torch.Tensor],
            reset_only: bool = False,  # noqa: ARG001
        ) -> None:
            arguments[argument].zero_()

        for tuner in self._tuners:
            tuner.pre_hook = zero


def _tuner(thing: object) -> Autotuner | None:
    """The autotuner around a kernel, possibly inside other wrappers; None if there is none."""
    while thing is not None and not isinstance(thing, Autotuner | type | ModuleType):
        thing = getattr(thing, "fn", None)
    return thing if isinstance(thing, Autotuner) else None


def _hasten(tuner: Autotuner) -> None:
    tuner.do_bench = partial(do_bench, warmup=_WARMUP_MS, rep=_MEASURE_MS)
    tuner.early_config_prune = partial(_compiled, tuner.fn, tuner.early_config_prune)
    # on disk, where a choice may come from a process whose GPU was busy
    tuner.cache_results = False


def _compiled(
    kernel: Any,
    prune: Callable[..., list[triton.Config]] | None,
    configs: list[triton.Config],
    arguments: dict[str, Any],
    **options: Any,
) -> list[triton.Config]:
    """Compile and return the configurations that `prune` leaves.  The tuner calls this before it
    measures.
    """
    kept = configs if prune is None else prune(configs, arguments, **options)

    def compile_all() -> None:
        # ignored errors are raised again, and reported, when the tuner tries the configuration
        with triton.AsyncCompileMode(pool, ignore_errors=True):
            for config in kept:
                kernel.run(**{**arguments, **options, **config.all_kwargs(), "warmup": True})

    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        copy_context().run(compile_all)  # the mode ends with the context, also after an exception
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return kept
