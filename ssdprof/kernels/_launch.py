"""Launches a kernel repeatedly without searching for its compiled form again.

At every launch, Triton finds the compiled form by the type, alignment and value of every argument.  This is most of the
host's time for a launch.  If these properties are known to be unchanged, this module launches the compiled kernel that
Triton returned the first time, through `_direct.py` if possible.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from inspect import signature
from typing import Any, Generic, TypeVar

import torch

from ssdprof.kernels._direct import DirectLaunch, direct_launch
from ssdprof.kernels._garbage import no_garbage_collection
from ssdprof.kernels._triton_hash import wait_for_hash

_FIXED = {
    "enable_fp_fusion": True,  # otherwise a setting of Triton decides, which will be off from Triton 3.10 on
    "sanitize_overflow": False,  # otherwise Triton builds, and drops again, a check of every integer sum and product
}
_MOST = 4096  # most kept launches; a call with new sizes adds a few
_kept: dict[Hashable, Launcher] = {}
Kept = TypeVar("Kept")


class Launcher:
    """A kernel with all arguments except its tensors and the number of programs.

    scalars: the arguments after the tensors, including tuples of strides
    options: compile-time arguments, in the kernel's order, and launch options such as num_warps

    Properties on which Triton specialises must be the same in all launches: the current device, and for each tensor
    whether it is None, its dtype, and whether its address is a multiple of 16 (see `place`).  Triton settings that
    affect compilation, such as its debug mode, are those of the first launch.
    """

    def __init__(self, kernel: Any, scalars: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._kernel, self._scalars, self._options = kernel, scalars, options
        self._constants = (*scalars, *(options[name] for name in _arguments(kernel.fn) if name in options))
        self._compiled: Any = None
        self._direct: DirectLaunch | None = None

    def __call__(self, programs: int, *tensors: Any) -> None:
        grid = (programs, 1, 1)
        if self._compiled is None:  # the first launch; in the interpreter, every launch
            wait_for_hash()
            # compiling creates so many objects that garbage collection would take a twentieth of the time
            with no_garbage_collection():
                self._compiled = self._kernel[grid](*tensors, *self._scalars, **self._options, **_FIXED)
            if self._compiled is not None:
                self._direct = direct_launch(self._compiled, tensors, self._constants)
        elif self._direct is None or not self._direct(programs, tensors):
            self._compiled[grid](*tensors, *self._constants)


def place(tensor: torch.Tensor | None) -> Hashable:
    """The properties of a tensor that select a compiled kernel, if the kernel receives only its address."""
    return None if tensor is None else (tensor.dtype, tensor.device, tensor.data_ptr() % 16)


def launch(
    kernel: Any, programs: int, tensors: tuple[torch.Tensor | None, ...], scalars: tuple[Any, ...], **options: Any
) -> None:
    """`kernel[(programs,)](*tensors, *scalars, **options)` on the current device, which must be that of the tensors."""
    # the key has the types too, because 0, 0.0 and False are equal but different arguments
    key = (kernel.fn, *map(place, tensors), scalars, *map(type, scalars), *options.items())
    launcher = _kept.get(key)
    if launcher is None:
        if len(_kept) >= _MOST:
            _kept.clear()
        launcher = _kept[key] = Launcher(kernel, scalars, options)
    launcher(programs, *tensors)


@cache
def _arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(signature(function).parameters)


class LaunchCache(Generic[Kept]):
    """Prepared launches by the signature of a call.  Preparing is most of a call's time on the host."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._kept: dict[Hashable, Kept] = {}

    def get(self, signature: Hashable, prepare: Callable[..., Kept], *arguments: Any) -> Kept:
        """The launch kept for `signature`.  If there is none, keep and return `prepare(*arguments)`."""
        launch = self._kept.get(signature)
        if launch is None:
            if len(self._kept) >= self._most:
                self._kept.clear()
            launch = self._kept[signature] = prepare(*arguments)
        return launch

    def forget(self) -> None:
        self._kept.clear()
