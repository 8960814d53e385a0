"""Loads a user's kernel: an importable function of the operator's inputs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import reduce
from importlib import import_module, metadata
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from ssdprof import operators
from ssdprof.errors import BadInputError, library_message
from ssdprof.kernels import device as device  # sets interpreter mode before the user's kernels are defined
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan
from ssdprof.operators import tensors
from ssdprof.operators.operator import Operator, Output

GROUP = "ssdprof.implementations"


def entry_points() -> tuple[str, ...]:
    """The names that installed packages register."""
    return tuple(sorted(metadata.entry_points(group=GROUP).names))


def entry_point(name: str) -> str:
    """The module:function that a package registers under `name`.  BadInputError if several packages register one."""
    found = sorted({point.value for point in metadata.entry_points(group=GROUP, name=name)})
    if len(found) > 1:
        raise BadInputError(f"Several installed packages register {name!r}.", f"Name one of: {', '.join(found)}.")
    return found[0]


def load(reference: str) -> Callable[..., Any]:
    """The function "module:function".  Raises BadInputError with the message of a failed import."""
    name, _, attribute = reference.partition(":")
    if not name or not attribute:
        missing = "function" if name else "module"
        raise BadInputError(f"{reference!r} names no {missing}.", "Give MODULE:FUNCTION.")
    try:
        with _current_directory_first(), redirect_stdout(sys.stderr):  # keep stdout free for the command's data
            module = import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # any exit of the user's module: pytest's skip is not an Exception
        raise BadInputError(
            f"The module of {reference} cannot be imported: {library_message(error)}.",
            "Give MODULE:FUNCTION, where MODULE is importable, also from the current directory.",
        ) from error
    try:
        function = reduce(getattr, attribute.split("."), module)
    except AttributeError:
        file = getattr(module, "__file__", None) or "built in"
        raise BadInputError(f"The module {name} ({file}) has no {attribute!r}.", "Give MODULE:FUNCTION.") from None
    if not callable(function):
        raise BadInputError(
            f"{reference} is not a function, but of type {type(function).__name__}.",
            "Name a function of the operator's inputs: docs/your-own-kernel.md.",
        )
    return function


def implementation(operator: Operator[Any], name: str, function: Callable[..., Any]) -> Implementation:
    """The function as an implementation of the operator."""
    has_precision = takes_precision(function)

    def run(inputs: Any, precision: Precision) -> Output:
        with torch.cuda.device(_index(inputs)):  # Triton launches on the current GPU
            return _pair(name, function(inputs, precision=precision) if has_precision else function(inputs))

    def plan(_inputs: Any, _precision: Precision) -> Plan:
        return Plan(variant=name, launches=0)

    return Implementation(operator=operator.name, name=name, run=run, plan=plan)


def takes_precision(function: Callable[..., Any]) -> bool:
    """Whether the function has a parameter `precision`, and so runs at every requested precision."""
    try:
        return "precision" in signature(function).parameters
    except ValueError:  # a built-in has no signature
        return False


def refuse_other_operator(operator: Operator[Any], name: str, function: Callable[..., Any]) -> None:
    """BadInputError if the function's annotations name the inputs of another operator."""
    types = {str(getattr(note, "__name__", note)).rpartition(".")[2] for note in _annotations(function)}
    for other in map(operators.get, operators.names()):
        if other.name != operator.name and other.inputs.__name__ in types:
            raise BadInputError(
                f"{name} takes {other.inputs.__name__}, and these layers are {operator.outline.layers} layers.",
                f"Name a function that takes {operator.inputs.__name__}, or run a model with other layers.",
            )


def _annotations(function: Callable[..., Any]) -> list[Any]:
    try:
        return [parameter.annotation for parameter in signature(function).parameters.values()]
    except ValueError:
        return []


def _index(inputs: Any) -> int:
    """The index of the inputs' GPU; -1 on a CPU, for which `torch.cuda.device` does nothing."""
    index = tensors.device(inputs).index
    return -1 if index is None else index


def _pair(name: str, output: Any) -> Output:
    if not isinstance(output, tuple | list) or len(output) != 2:
        raise TypeError(f"{name} must return (out, final_states), not {_type(output)}")
    for what, tensor in zip(("out", "final_states"), output, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must return tensors, and {what} is {_type(tensor)}")
    return output[0], output[1]


def _type(thing: Any) -> str:
    size = f" of {len(thing)}" if isinstance(thing, tuple | list) else ""
    return f"{type(thing).__name__}{size}"


@contextmanager
def _current_directory_first() -> Iterator[None]:
    """Put the current directory first on sys.path, as for a script; afterwards last, for later imports."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)
