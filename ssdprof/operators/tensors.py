"""Access to an operator's inputs, a frozen dataclass of tensors and scalars."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields
from typing import Any

from ssdprof.operators.late import torch


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
