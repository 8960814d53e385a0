"""Launching a kernel again without looking for its compiled form again.

Triton finds it by the type, the alignment and the value of every argument, at every launch; on the host that is most of
what a launch costs.  Where all of them are known to be as they were, what Triton returned the first time is launched,
by `_direct.py` if that is possible.
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
    "enable_fp_fusion": True,  # else a setting of Triton chooses, which from Triton 3.10 on is to be off
    "sanitize_overflow": False,  # or Triton builds, and drops again, a check of every integer sum and product
}
_MOST = 4096  # kept launches; a call with new sizes adds a few
_kept: dict[Hashable, Launcher] = {}
Kept = TypeVar("Kept")


class Launcher:
    """A kernel with all settled but its tensors and the number of programs.

    scalars: the arguments that follow the tensors, tuples of strides among them
    options: the compile-time arguments, in the kernel's order, and launch options such as num_warps

    From one launch to the next nothing may change that Triton specialises on: the current device, and which tensors are
    None, of which dtype, and at an address that is a multiple of 16.  See `place`.  Settings of Triton that change what
    it compiles, such as its debug mode, are those of the first launch.
    """

    def __init__(self, kernel: Any, scalars: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._kernel, self._scalars, self._options = kernel, scalars, options
        self._constants = (*scalars, *(options[name] for name in _arguments(kernel.fn) if name in options))
        self._compiled: Any = None
        self._direct: DirectLaunch | None = None

    def __call__(self, programs: int, *tensors: Any) -> None:
        grid = (programs, 1, 1)
        if self._compiled is None:  # the first launch; under the interpreter, every one
            wait_for_hash()
            # compiling makes so many objects that all of the process's are looked through in between: a twentieth of it
            with no_garbage_collection():
                self._compiled = self._kernel[grid](*tensors, *self._scalars, **self._options, **_FIXED)
            if self._compiled is not None:
                self._direct = direct_launch(self._compiled, tensors, self._constants)
        elif self._direct is None or not self._direct(programs, tensors):
            self._compiled[grid](*tensors, *self._constants)


def place(tensor: torch.Tensor | None) -> Hashable:
    """What the choice of a compiled kernel has to do with a tensor of which only the address is handed over."""
    return None if tensor is None else (tensor.dtype, tensor.device, tensor.data_ptr() % 16)


def launch(
    kernel: Any, programs: int, tensors: tuple[torch.Tensor | None, ...], scalars: tuple[Any, ...], **options: Any
) -> None:
    """`kernel[(programs,)](*tensors, *scalars, **options)`, on the current device, which must be the tensors'."""
    # 0, 0.0 and False are equal, and are different arguments
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
    """What was found out about a call, by its signature: most of a call's time on the host."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._kept: dict[Hashable, Kept] = {}

    def get(self, signature: Hashable, prepare: Callable[..., Kept], *arguments: Any) -> Kept:
        """The one kept for `signature`; else what `prepare(*arguments)` returns, kept from now on."""
        launch = self._kept.get(signature)
        if launch is None:
            if len(self._kept) >= self._most:
                self._kept.clear()
            launch = self._kept[signature] = prepare(*arguments)
        return launch

    def forget(self) -> None:
        self._kept.clear()
