"""Turns a model's call of its operator into the operator's inputs, without a copy and with the model's strides.

Models pass the keyword arguments of their forward through to the operator (`use_cache`, `output_router_logits`, ...).
Those have no effect on it and are dropped; those that a production kernel uses and that the inputs cannot express
are refused by name.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ssdprof import operators
from ssdprof.errors import BadInputError
from ssdprof.operators.operator import BoundCall


def bind(
    operator: str, mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, step: bool = False
) -> BoundCall:
    """The call of `mixer` as inputs of its operator.  step: it is a call of the operator's `step`.

    Raises BadInputError for a call that the operator's inputs cannot express; the message names the argument.
    """
    binding = operators.get(operator).binding
    binder = binding.bind_step if step else binding.bind
    if binder is None:
        raise BadInputError(f"Decode steps of {operator} layers cannot be captured.", "Leave out --decode.")
    for name in binding.refused:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise BadInputError(f"{type(mixer).__name__} passes {name} to its operator, which a capture cannot hold.")
    try:
        return binder(mixer, *args, **kwargs)
    except (ValueError, TypeError) as error:
        raise BadInputError(
            f"{type(mixer).__name__} calls its {operator} operator in an unknown way: {error}."
        ) from error
