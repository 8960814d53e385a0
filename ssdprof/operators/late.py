"""Modules that are imported at first use: the command line knows the operators without torch."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["lazy", "packages", "precision", "rounding", "torch"]


def lazy(name: str) -> Any:
    """Stands for a module until one of its attributes is used."""
    module = ModuleType(name)
    attribute = lambda wanted: getattr(import_module(name), wanted)  # noqa: E731
    module.__getattr__ = attribute  # type: ignore[method-assign]
    return module


if TYPE_CHECKING:
    import torch

    from ssdprof.kernels import adapters as packages
    from ssdprof.kernels import precision
    from ssdprof.operators import rounding
else:
    torch, rounding = lazy("torch"), lazy("ssdprof.operators.rounding")
    packages, precision = lazy("ssdprof.kernels.adapters"), lazy("ssdprof.kernels.precision")
