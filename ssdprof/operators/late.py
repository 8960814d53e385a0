"""Modules that are imported at first use: the command line knows the operators without torch."""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["deferred", "lazy", "packages", "precision", "rounding", "torch"]


def lazy(name: str, prepare: Callable[[], object] | None = None) -> Any:
    """Stands for a module until one of its attributes is used.  prepare: is called before."""

    def attribute(wanted: str) -> object:
        if prepare is not None:
            prepare()
        return getattr(import_module(name), wanted)

    module = ModuleType(name)
    module.__getattr__ = attribute  # type: ignore[method-assign]
    return module


def deferred(reference: str, *arguments: object) -> Callable[..., Any]:
    """A call of "module:function" with these arguments first; the module, in `ssdprof.kernels`, is
    imported when it is called.
    """

    def call(*more: object) -> object:
        module, _, function = reference.partition(":")
        return getattr(import_module(f"ssdprof.kernels.{module}"), function)(*arguments, *more)

    return call


if TYPE_CHECKING:
    import torch

    from ssdprof.kernels import adapters as packages
    from ssdprof.kernels import precision
    from ssdprof.operators import rounding
else:
    torch, rounding = lazy("torch"), lazy("ssdprof.operators.rounding")
    packages, precision = lazy("ssdprof.kernels.adapters"), lazy("ssdprof.kernels.precision")
