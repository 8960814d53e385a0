"""Waits in a process of a recorded program until it has imported a module with places.

`install` is called at the start of each Python process by `site/sitecustomize.py`, and by vLLM and
SGLang as a plugin, which they also load where PYTHONPATH is not passed on.  It imports nothing but
json: the table of places, torch and the recorder follow with the first module that has a place.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

VARIABLE = "SSDPROF_RECORD"
_waiting: set[str] = set()  # modules


def find_spec(
    name: str, path: Sequence[str] | None, target: ModuleType | None = None
) -> ModuleSpec | None:
    """This module is a finder: the spec of a module with places is that of the finder that comes
    next, whose loader also wraps; None for any other module.
    """
    if name not in _waiting:
        return None
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = None
        if find and find is not find_spec:
            spec = find(name, path, target)
        if spec is not None:
            _waiting.discard(name)
            _wrap_after(spec)
            return spec
    return None


def _wrap_after(spec: ModuleSpec) -> None:
    """Have the loader wrap the module's places as soon as its code has run."""
    loader = spec.loader
    execute = getattr(loader, "exec_module", None)
    if loader is None or execute is None:
        return

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # the class's own again
        execute(module)
        _wrap(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]


def _wrap(module: ModuleType) -> None:
    """A fault of ssdprof here, such as a torch that it cannot use, is no fault of the program."""
    try:
        import_module("ssdprof.record.wrapping").wrap_places(module)
    except Exception as error:
        print(f"ssdprof: {module.__name__} is not recorded: {error!r}", file=sys.stderr)


def install() -> None:
    """Begin to wait, in a process of a program that is recorded, unless this process does."""
    settings, this = os.environ.get(VARIABLE), sys.modules[__name__]
    if not settings or this in sys.meta_path:
        return
    modules = set(json.loads(settings)["modules"])
    _waiting.update(modules - sys.modules.keys())
    sys.meta_path.insert(0, this)
    for name in modules & sys.modules.keys():
        _wrap(sys.modules[name])
