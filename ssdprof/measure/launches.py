"""The Triton kernels that a call launched, and their compiled resources."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

import triton
from triton.compiler import ASTSource, CompiledKernel

from ssdprof.schema import Launch


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """When the block ends, the list has the kernels launched in it, each once, in order of the first launch.

    Stays empty in Triton's interpreter, and for libraries that launch no Triton kernel.
    """
    handles: dict[int, None] = {}

    def note(metadata: Any) -> None:
        handles[metadata.data["function"]] = None

    launches: list[Launch] = []
    with _at_launch(note):
        yield launches
    if handles:
        loaded = _loaded_kernels()
        launches += [describe(loaded[handle]) for handle in handles if handle in loaded]


@contextmanager
def counted_launches() -> Iterator[list[Any]]:
    """The list has one entry for every launch of a Triton kernel in the block."""
    seen: list[Any] = []
    with _at_launch(seen.append):
        yield seen


@contextmanager
def _at_launch(note: Callable[[Any], None]) -> Iterator[None]:
    """Call `note` with Triton's metadata of every launch in the block."""
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(note)
    try:
        yield
    finally:
        hooks.remove(note)


def describe(kernel: Any) -> Launch:
    """A compiled kernel: its compile-time arguments and options as `config`, its resources as the driver loaded it."""
    metadata, source = kernel.metadata, kernel.src
    config: dict[str, int | str | bool] = {}
    if isinstance(source, ASTSource):
        for path, value in source.constants.items():
            parameter = source.fn.params[path[0]]
            if parameter.is_constexpr and len(path) == 1:
                # bundled kernels take their constants as one argument
                grouped = isinstance(value, SimpleNamespace) or is_dataclass(value)
                for name, one in (vars(value) if grouped else {parameter.name: value}).items():
                    constant = getattr(one, "value", one)  # of Triton's constexpr
                    config[name] = constant if isinstance(constant, int | str) else str(constant)
    config |= {"num_warps": metadata.num_warps, "num_stages": metadata.num_stages}
    return Launch(
        kernel=metadata.name,
        config=config,
        registers=kernel.n_regs,
        spills=kernel.n_spills,
        shared_bytes=metadata.shared,
    )


def _loaded_kernels() -> dict[int, Any]:
    """Function handle -> compiled kernel.  Triton keeps no list of them, the garbage collector does.

    By exact type, because isinstance asks every object for its __class__, which wakes lazy modules and proxies.
    """
    kernels = (thing for thing in gc.get_objects() if type(thing) is CompiledKernel)
    return {kernel.function: kernel for kernel in kernels if kernel.function is not None}
