"""Adapters that make kernels of other libraries `registry.Implementation`s: the code that all
operators share.

An adapter contains no code of the library.  It rejects inputs for which the library silently
returns wrong results.  Plans have no workspace, because the workspace of a library is measured.

The tuners of a library choose by few sizes of the model, so that the first call decides for all
later ones.  Here calls of different kinds are tuned separately, which a user of the library would
not get.  The tuners still choose among the library's configurations by measured times, but the
configurations are compiled in parallel, and measured for a quarter of the time.
"""

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

# Tokens; the data of so many fits into the L2 cache of a large GPU.  Calls with more tokens are
# tuned separately.
SHORT = 8192
_WARMUP_MS, _MEASURE_MS = 6, 25  # for each configuration; Triton's defaults are 25 and 100
LONGEST_BY_TOKEN = 64  # longest sequence, in tokens, for token-by-token kernels
INT32_ELEMENTS = 2**31  # number of elements that signed 32-bit offsets can address
# Packages whose `__init__.py` is not run (`import_kernels`), because their modules with kernels
# need nothing of it.  A package comes before those inside it.
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
    """The number of elements of memory from a tensor's first to its last element, including those
    that strides skip.  The tensor must not be empty.
    """
    sizes_and_strides = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sizes_and_strides)


def bounds_of(inputs: Inputs) -> torch.Tensor:
    """(sequences + 1) integers: where each sequence begins among the positions of all sequences,
    and where the last one ends.  The rows of a batch count as packed, one after the other.
    """
    if inputs.cu_seqlens is not None:
        return inputs.cu_seqlens
    return torch.arange(inputs.sequences + 1, device=inputs.device) * inputs.length


def too_long(inputs: Inputs) -> tuple[bool, str]:
    """Whether sequences, or packed sequences on average, are too long for a token-by-token kernel,
    and the reason: one of the pairs that a generator for `registry.first_reason` yields.
    """
    sequences_in_row = 1 if inputs.cu_seqlens is None else inputs.sequences
    is_too_long = inputs.length > sequences_in_row * LONGEST_BY_TOKEN
    return is_too_long, f"token by token, for sequences of at most {LONGEST_BY_TOKEN}"


def library_kernel(
    operator: str,
    name: str,
    unsupported: Callable[[Any, Precision], str],
    call: Callable[[Any, Precision], Any],
    plan: Callable[[Any, Precision], Plan] | Plan,
) -> Implementation:
    """A library's kernel as an implementation, which the caller registers.

    unsupported: (inputs, precision) -> why the kernel does not support them; "" if it does.
    call: (inputs, precision) -> the output.
    plan: (inputs, precision) -> the plan, or the plan of all calls.
    """
    plan_of = (lambda _inputs, _precision: plan) if isinstance(plan, Plan) else plan

    def checked(
        function: Callable[[Any, Precision], Any], inputs: Inputs, precision: Precision
    ) -> Any:
        """`function(inputs, precision)`.  Raises UnsupportedError if the kernel does not support
        them.
        """
        reason = unsupported(inputs, precision)
        if reason:
            raise UnsupportedError(f"{name}: {reason}")
        return function(inputs, precision)

    return Implementation(
        operator=operator, name=name, run=partial(checked, call), plan=partial(checked, plan_of)
    )


def once(function: Callable[[Any], T]) -> Callable[[Any], T]:
    """`function`, called only once for each object of inputs, unless it raises an error.  Its
    result is kept as long as the object exists, and must not refer to it.
    """
    results: dict[int, T] = {}  # id of the inputs -> result

    def get(inputs: Any) -> T:
        if id(inputs) not in results:
            results[id(inputs)] = function(inputs)
            weakref.finalize(inputs, results.pop, id(inputs), None)
        return results[id(inputs)]

    return get


# A prepared call: () -> its output; and the values and the initial states as it reads them.  It
# does not refer to the inputs (`once`).
Prepared = tuple[Callable[[], Output], tuple[torch.Tensor | None, ...]]


def prepared_kernel(
    operator: str,
    name: str,
    unsupported: Callable[[Any, Precision], str],
    prepare: Callable[[Any], Prepared],
    plan: Callable[[Any, Precision], Plan] | Plan,
) -> Implementation:
    """A library's kernel as an implementation that prepares the library's arguments once for each
    object of inputs, and keeps them as long as the object exists.

    prepare: (inputs) -> the prepared call.  The other arguments are those of `library_kernel`.
    """
    prepared = once(prepare)

    def call(inputs: Inputs, _precision: Precision) -> Output:
        run, _ = prepared(inputs)
        with torch.cuda.device(inputs.values.get_device()), torch.no_grad():
            return run()

    def copies(inputs: Inputs) -> list[torch.Tensor]:
        """`Implementation.copies`: the tensors that the call reads instead of those in inputs; also
        zeros, if there are no initial states.
        """
        addresses = {tensor.data_ptr() for tensor in inputs.linear.values()}
        _, tensors_read = prepared(inputs)
        return [
            tensor
            for tensor in tensors_read
            if tensor is not None and tensor.data_ptr() not in addresses
        ]

    return replace(library_kernel(operator, name, unsupported, call, plan), copies=copies)


def import_kernels(name: str) -> Any:
    """Import a server's module with kernels.  The packages around it (`_UNRUN`) are not run,
    because they patch torch or transformers, or load the whole server; in this process they stay
    empty for whoever imports them later.  Packages that are imported already stay as they are.
    Raises ImportError.
    """
    for package in _UNRUN:
        if package in sys.modules or not name.startswith(f"{package}."):
            continue
        spec = find_spec(package)
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError(f"No module named {package!r}")
        empty_package = ModuleType(package)
        empty_package.__spec__ = spec
        empty_package.__path__ = list(spec.submodule_search_locations)
        sys.modules[package] = empty_package
    return import_module(name)


def model_function(model_type: str, name: str, package: str) -> Callable[..., Any]:
    """The function `name` in the modeling file of `model_type`, as transformers defines it in
    torch.  With a package, the function that models call if this package is installed.

    All modeling files that have a function of this name have the same.  Raises ImportError if the
    file does not wrap such a function, or if the package is not installed.
    """
    module = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None or inspect.unwrap(function) is function:
        raise ImportError(f"transformers {package_version('transformers')} does not wrap {name}")
    if not package:
        original: Callable[..., Any] = inspect.unwrap(function)
        return original
    if find_spec(package) is None:
        raise ImportError(f"transformers finds no {package} here, and calls its torch function")
    return function


def content(file: Path) -> str:
    """Name of a file, and the first 12 digits of its hash, for example "ssd_fused5.py, sha256
    0123456789ab".
    """
    return f"{file.name}, sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"


def package_version(package: str) -> str:
    """The version of a package, or "unknown" for one without metadata, such as a checkout."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


class Tunings:
    """The tuners of a library's modules.  Their choices are kept separately for each kind of call;
    compiled kernels are shared.  Each process chooses anew.
    """

    def __init__(self, modules: Iterable[ModuleType]) -> None:
        """Finds the tuners among the globals of the modules."""
        tuners: dict[int, Autotuner] = {}  # by id, because several globals may be the same tuner
        for module in modules:
            for value in vars(module).values():
                tuner = _tuner(value)
                if tuner is not None:
                    tuners[id(tuner)] = tuner
        self._tuners = list(tuners.values())
        self._kind: Hashable = object()  # equal to no kind
        self._choices = defaultdict[Hashable, list[dict[Any, Any]]](
            lambda: [{} for _ in self._tuners]
        )
        for tuner in self._tuners:
            _hasten(tuner)

    def use_for(self, kind: Hashable) -> None:
        """Give the tuners their choices for calls of this kind, and no others."""
        if kind == self._kind:
            return
        self._kind = kind
        for tuner, choices in zip(self._tuners, self._choices[kind], strict=True):
            tuner.cache = choices

    def zero_before_each_try(self, argument: str) -> None:
        """Have the tuners zero the argument with this name before each launch that they measure,
        for kernels that count in it and skip work if it is not zero.
        """

        def zero(
            arguments: dict[str, torch.Tensor],
            reset_only: bool = False,  # noqa: ARG001
        ) -> None:
            arguments[argument].zero_()

        for tuner in self._tuners:
            tuner.pre_hook = zero


def _tuner(value: object) -> Autotuner | None:
    """The autotuner that a kernel is, or that wrappers around it contain; None if `value` is
    anything else.
    """
    while value is not None and not isinstance(value, Autotuner | type | ModuleType):
        value = getattr(value, "fn", None)
    return value if isinstance(value, Autotuner) else None


def _hasten(tuner: Autotuner) -> None:
    """Have the tuner measure for a shorter time, compile in parallel, and store no choice on disk,
    where it would be used although the GPU may have been busy.
    """
    tuner.do_bench = partial(do_bench, warmup=_WARMUP_MS, rep=_MEASURE_MS)
    tuner.early_config_prune = partial(_compiled, tuner.fn, tuner.early_config_prune)
    tuner.cache_results = False


def _compiled(
    kernel: Any,
    prune: Callable[..., list[triton.Config]] | None,
    configs: list[triton.Config],
    arguments: dict[str, Any],
    **options: Any,
) -> list[triton.Config]:
    """Compile the configurations that `prune` leaves, in parallel, and return them.  The tuner
    calls this as its `early_config_prune`, before it measures.

    arguments: those of the kernel by position, by name.  options: the others, with the launch's
    grid and warmup=False.
    """
    if prune is not None:
        configs = prune(configs, arguments, **options)
    pool = ThreadPoolExecutor(os.cpu_count())

    def compile_all() -> None:
        compile_only = options | {"warmup": True}
        # an ignored error is raised again, and reported, when the tuner tries the configuration
        with triton.AsyncCompileMode(pool, ignore_errors=True):
            for config in configs:
                kernel.run(**arguments, **compile_only, **config.all_kwargs())

    try:
        copy_context().run(compile_all)  # the mode ends with the context, also after an exception
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return configs
