"""Groups options of a command into one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take dataclasses of options, although Typer needs one parameter per option.

    A parameter that is annotated with a dataclass becomes one option for each field, at its place and in their order,
    and the command is called with an instance.  Fields are declared as parameters of a command are: annotated with
    `typer.Option` or `typer.Argument`, and required if they have no default.

    Raises ValueError if two options have the same name.
    """
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    types = {one.name: one.annotation for one in parameters}
    groups = {name: type_ for name, type_ in types.items() if isinstance(type_, type) and is_dataclass(type_)}
    options: list[Parameter] = []
    for parameter in parameters:
        if parameter.name in groups:
            options += _options(groups[parameter.name])
        else:
            options.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    @wraps(command)
    def expanded(**given: Any) -> None:
        built = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **built)

    # Typer reads these two attributes
    expanded.__signature__ = Signature(options)  # type: ignore[attr-defined]
    expanded.__annotations__ = {option.name: option.annotation for option in options}
    return expanded


def _options(group: type) -> Iterator[Parameter]:
    """The fields of a dataclass as parameters, those of its base classes first."""
    types = get_type_hints(group, include_extras=True)
    for field in fields(group):
        default = Parameter.empty if field.default is MISSING else field.default
        yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=types[field.name])
