"""Modules that are imported at first use: the command line knows the operators without torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["LazyModule", "packages", "precision", "rounding", "torch"]


class LazyModule:
    """Stands for a module until one of its attributes is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


if TYPE_CHECKING:
    import torch

    from ssdprof.kernels import adapters as packages
    from ssdprof.kernels import precision
    from ssdprof.operators import rounding
else:
    torch, rounding = LazyModule("torch"), LazyModule("ssdprof.operators.rounding")
    packages, precision = LazyModule("ssdprof.kernels.adapters"), LazyModule("ssdprof.kernels.precision")
