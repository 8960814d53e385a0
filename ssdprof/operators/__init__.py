"""The registry of operators.  Importing this module imports no torch, and nor does `get`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ssdprof.errors import BadInputError
from ssdprof.operators import gdn, kda, ssd
from ssdprof.operators.operator import Operator

if TYPE_CHECKING:
    from ssdprof.operators.definition import Definition

_OPERATORS: dict[str, Operator] = {
    operator.name: operator for operator in (ssd.OPERATOR, gdn.OPERATOR, kda.OPERATOR)
}


def register(operator: Operator) -> Operator:
    """Add an operator from outside the package, and return it.  Raises ValueError if its name is
    taken.
    """
    if operator.name in _OPERATORS:
        raise ValueError(f"an operator {operator.name!r} is registered already")
    _OPERATORS[operator.name] = operator
    return operator


def names() -> tuple[str, ...]:
    """Every operator's name, in order of registration."""
    return tuple(_OPERATORS)


def get(name: str) -> Operator:
    """The operator of this name.  Raises BadInputError if there is none."""
    if name not in _OPERATORS:
        raise BadInputError(
            f"There is no operator {name!r}.", f"Choose from: {', '.join(names())}."
        )
    return _OPERATORS[name]


def records() -> tuple[Operator, ...]:
    """All operators, in order of registration."""
    return tuple(_OPERATORS.values())


def definitions() -> Iterator[tuple[Operator, Definition]]:
    """Each operator with each of its definitions; none for an operator without.  Imports torch."""
    for operator in records():
        for definition in operator.load_definitions():
            yield operator, definition
