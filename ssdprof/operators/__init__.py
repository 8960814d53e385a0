"""The registry of operators.  A line in `_MODULES` registers one that ships with ssdprof.

Importing this package imports no torch: `outline`, `outlines` and `shapes` serve the command line, `get` loads the
whole record.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ssdprof.errors import BadInputError
from ssdprof.operators.outline import Outline
from ssdprof.operators.shapes import Shapes

if TYPE_CHECKING:
    from ssdprof.operators.operator import Operator

_MODULES = {  # name -> a package with OUTLINE, whose module `operator` has OPERATOR
    "ssd": "ssdprof.operators.ssd",
    "gdn": "ssdprof.operators.gdn",
}
_registered: dict[str, Operator[Any]] = {}


def register(operator: Operator[Any]) -> Operator[Any]:
    """Add an operator from outside the package.  ValueError if the name is taken."""
    if operator.name in names():
        raise ValueError(f"an operator {operator.name!r} is registered already")
    _registered[operator.name] = operator
    return operator


def names() -> tuple[str, ...]:
    """Every operator's name, in order of registration."""
    return (*_MODULES, *_registered)


def is_bundled(name: str) -> bool:
    """Whether the operator's kernels are those of `ssdprof.kernels`."""
    return name in _MODULES


def get(name: str) -> Operator[Any]:
    """The whole record, which imports torch.  BadInputError for an unknown name."""
    if name in _MODULES:
        operator: Operator[Any] = import_module(f"{_MODULES[name]}.operator").OPERATOR
        return operator
    return _registered[_known(name)]


def of(inputs: object) -> Operator[Any]:
    """The operator of inputs of this type.  TypeError if there is none."""
    for name in names():
        operator = get(name)
        if isinstance(inputs, operator.inputs):
            return operator
    raise TypeError(f"no operator takes {type(inputs).__name__}")


def shapes(name: str) -> Shapes:
    """The operator's shapes, without torch.  BadInputError for an unknown name."""
    if name in _MODULES:
        module = import_module(f"{_MODULES[name]}.shapes")
        return Shapes(shapes=module.SHAPES, parse=module.parse, grammar=module.GRAMMAR)
    return _registered[_known(name)].drawing


def outline(name: str) -> Outline:
    """The part of the record that needs no torch.  BadInputError for an unknown name."""
    if name in _MODULES:
        found: Outline = import_module(_MODULES[name]).OUTLINE
        return found
    return _registered[_known(name)].outline


def outlines() -> tuple[Outline, ...]:
    """The outlines of all operators."""
    return tuple(outline(name) for name in names())


def _known(name: str) -> str:
    if name not in names():
        raise BadInputError(f"There is no operator {name!r}.", f"Choose from: {', '.join(names())}.")
    return name
