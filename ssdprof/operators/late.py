"""Modules that are imported when they are first used, so that the command line knows the operators
without importing torch.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["deferred", "lazy", "packages", "precision", "rounding", "torch"]


def lazy(name: str, prepare: Callable[[], object] | None = None) -> Any:
    """A stand-in for the module `name`, which is imported when an attribute of the stand-in is
    used.

    prepare: called before each such use.
    """

    def module_attribute(attribute: str) -> object:
        if prepare is not None:
            prepare()
        return getattr(import_module(name), attribute)

    module = ModuleType(name)
    module.__getattr__ = module_attribute  # type: ignore[method-assign]
    return module


def deferred(reference: str, *arguments: object) -> Callable[..., Any]:
    """The function `reference` with its first arguments bound.  Its module is imported when it is
    first called.

    reference: "module:function", with a module in `ssdprof.kernels`.
    """

    def call(*later_arguments: object, **options: object) -> object:
        module_name, _, name = reference.partition(":")
        function = getattr(import_module(f"ssdprof.kernels.{module_name}"), name)
        return function(*arguments, *later_arguments, **options)

    return call


if TYPE_CHECKING:
    import torch

    from ssdprof.kernels import adapters as packages
    from ssdprof.kernels import precision
    from ssdprof.operators import rounding
else:
    torch, rounding = lazy("torch"), lazy("ssdprof.operators.rounding")
    packages, precision = lazy("ssdprof.kernels.adapters"), lazy("ssdprof.kernels.precision")
