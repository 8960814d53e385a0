"""Replaces those functions of a module that are places by functions that record their calls."""

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

_POSITIONAL_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
P = ParamSpec("P")
T = TypeVar("T")


def wrap_places(module: ModuleType) -> None:
    """Wrap the functions of a module that are places of the operators to be recorded.

    A note names those that are no longer as their places say.  Raises KeyError if the program has
    removed the settings from its environment.
    """
    settings = RecordSettings.of(os.environ)
    if settings.when == "wrong":
        # it imports the kernels of all operators: now, so that the first call need not wait
        import_module("ssdprof.record.verdict")
    for place in PLACES:
        if place.module != module.__name__ or place.operator not in settings.operators:
            continue
        # called here because it imports modules, which the recorder's thread must not, and caches
        # its result
        library = source(place.library)
        changed = _wrap(module, place)
        if changed:
            where = f"{place.module}.{place.function} of {library}"
            note(f"{where} {changed}: its calls are not recorded.", once=True)


def _wrap(module: ModuleType, place: Place) -> str:
    """Wrap the function of a place, also where modules of its library have imported it already.

    Returns what prevents this, such as "has no parameter q": then nothing is wrapped.  Empty if
    nothing prevents it.
    """
    owner: object = module
    *owner_names, name = place.function.split(".")
    for owner_name in owner_names:
        owner = getattr(owner, owner_name, None)
    attribute = None if owner is None else inspect.getattr_static(owner, name, None)
    if attribute is None:
        return "is missing"
    is_static = isinstance(attribute, staticmethod)
    function = attribute.__func__ if is_static else attribute
    if not inspect.isfunction(function):
        return "is no function"
    signature = inspect.signature(function)
    missing = [name for name in place.parameters if name not in signature.parameters]
    if missing:
        return f"has no parameter {', '.join(missing)}"
    wrapper = _recording(place, function, signature)
    setattr(owner, name, staticmethod(wrapper) if is_static else wrapper)
    for other, alias in _aliases(function, module.__name__.partition(".")[0]):
        setattr(other, alias, wrapper)
    return ""


def _aliases(function: object, library: str) -> Iterator[tuple[ModuleType, str]]:
    """The imported modules of a library that have the function, with the name that it has there.

    library: the first part of the modules' names.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == library and isinstance(module, ModuleType):
            for alias, value in list(vars(module).items()):
                if value is function:
                    yield module, alias


def _recording(
    place: Place, function: Callable[P, T], signature: inspect.Signature
) -> Callable[P, T]:
    """A function that calls this one and records the call.  It has the same name, signature,
    docstring and attributes.

    While torch's compiler traces the program, it only calls the library's function.  `is_compiling`
    is a constant for the compiler, which therefore does not see the recorder.
    """
    parameters = signature.parameters.values()
    positional = [each.name for each in parameters if each.kind in _POSITIONAL_KINDS]
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}

    def arguments(*args: P.args, **kwargs: P.kwargs) -> dict[str, object]:
        """The arguments of a call by name, including defaults and those of **kwargs, without those
        of *args.

        Does not check them: the function itself refuses wrong arguments.
        """
        return {**defaults, **dict(zip(positional, args, strict=False)), **kwargs}

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return recorder.call(place, function, arguments, *args, **kwargs)

    # `functools.wraps` sets `__wrapped__` to `function`.  If the function itself wraps another one,
    # programs may expect that one there
    vars(wrapper).update(vars(function))
    return wrapper
