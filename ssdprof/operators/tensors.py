"""Access to an operator's inputs, a frozen dataclass of tensors and scalars; modules that are imported late."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any


class LazyModule:
    """Stands for a module until one of its attributes is used: the command line knows the operators without torch."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


def tensors(inputs: Any) -> dict[str, torch.Tensor]:
    """The tensors by argument name, without those that are None."""
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def scalars(inputs: Any) -> dict[str, Any]:
    """The arguments that are not tensors, without those that are None."""
    given = tensors(inputs)
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs) if field.name not in given}
    return {name: value for name, value in values.items() if value is not None}


def form(inputs: Any) -> Hashable:
    """All properties of the inputs except the values of their tensors."""
    found = ((name, one.shape, one.stride(), one.dtype) for name, one in tensors(inputs).items())
    return (type(inputs), *found, *scalars(inputs).items())
