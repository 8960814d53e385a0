"""Replaces the functions of a module that are places by functions that record their calls."""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import ParamSpec, TypeVar

import torch

from ssdprof.record import recorder
from ssdprof.record.keeper import source
from ssdprof.record.place import Place
from ssdprof.record.places import PLACES
from ssdprof.record.settings import RecordSettings, note

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
P = ParamSpec("P")
T = TypeVar("T")


def wrap_places(module: ModuleType) -> None:
    """Wrap those of the module's functions that are places of recorded operators."""
    settings = RecordSettings.of(os.environ)
    if settings.when == "wrong":
        import_module("ssdprof.record.verdict")
    here = [place for place in PLACES if place.module == module.__name__]
    for place in here:
        if place.operator not in settings.operators:
            continue
        library = source(place.library)  # it imports, and the recorder's thread must not
        if changed := _wrap(module, place):
            where = f"{place.module}.{place.function} of {library}"
            note(f"{where} {changed}: its calls are not recorded.", once=True)


def _wrap(module: ModuleType, place: Place) -> str:
    """Wrap a place, also under the other names that its library has for it.  What has changed
    there, if it cannot be wrapped.
    """
    owner: object = module
    *names, name = place.function.split(".")
    for part in names:
        owner = getattr(owner, part, None)
    function = inspect.getattr_static(owner, name, None) if owner is not None else None
    is_static = isinstance(function, staticmethod)
    if isinstance(function, staticmethod):
        function = function.__func__
    if not inspect.isfunction(function):
        return "is no function"
    signature = inspect.signature(function)
    if missing := [word for word in place.parameters if word not in signature.parameters]:
        return f"has no parameter {', '.join(missing)}"
    wrapper = _recording(place, function, signature)
    setattr(owner, name, staticmethod(wrapper) if is_static else wrapper)
    for other, alias in _aliases(function, module.__name__.partition(".")[0]):
        setattr(other, alias, wrapper)
    return ""


def _aliases(function: object, library: str) -> Iterator[tuple[ModuleType, str]]:
    """Where modules of a library that are imported already have the function."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == library and isinstance(module, ModuleType):
            for alias, value in list(vars(module).items()):
                if value is function:
                    yield module, alias


def _recording(
    place: Place, function: Callable[P, T], signature: inspect.Signature
) -> Callable[P, T]:
    """The function, recorded: of the same name, signature, docstring and attributes.

    A compiler that traces the program, for which `is_compiling` is a constant, sees the library's
    function alone.
    """
    arguments: Callable[P, dict[str, object]] = functools.partial(_arguments, *_names(signature))

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return recorder.call(place, function, arguments, *args, **kwargs)

    # if the function wraps another one, programs may ask it for that one by `__wrapped__`
    vars(wrapper).update(vars(function))
    return wrapper


def _names(signature: inspect.Signature) -> tuple[list[str], dict[str, object]]:
    """The parameters that a call may give by position, and the defaults of all."""
    parameters = signature.parameters.values()
    return (
        [each.name for each in parameters if each.kind in _BY_POSITION],
        {each.name: each.default for each in parameters if each.default is not each.empty},
    )


def _arguments(
    names: list[str], defaults: dict[str, object], /, *args: object, **kwargs: object
) -> dict[str, object]:
    """The arguments of a call by name, defaults and those of **kwargs included.  The function
    itself refuses those that it does not take.
    """
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
