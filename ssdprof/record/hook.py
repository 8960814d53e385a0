"""Waits in a process of a recorded program until the program imports a module with places.

`site/sitecustomize.py` calls `install` at the start of each Python process.  vLLM and SGLang call
it as a plugin, also in processes to which they do not pass PYTHONPATH.  Until a module with places
is imported, ssdprof imports only modules of the standard library.  The table of places, torch and
the recorder are imported with the first such module.
"""

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

VARIABLE = "SSDPROF_RECORD"
_waiting: set[str] = set()  # names of modules with places that are not wrapped yet


def find_spec(
    name: str, path: Sequence[str] | None, target: ModuleType | None = None
) -> ModuleSpec | None:
    """Find the spec of a module, as a finder in `sys.meta_path`: this Python module is that finder.

    The spec of a module with places comes from one of the other finders.  Its loader is changed so
    that it also wraps the places.  None for all other modules, and if no other finder knows the
    module.
    """
    if name not in _waiting:
        return None
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if find is None or find is find_spec:
            continue
        spec: ModuleSpec | None = find(name, path, target)
        if spec is not None:
            _wrap_after(spec)
            return spec
    return None


def _wrap_after(spec: ModuleSpec) -> None:
    """Change a module's loader, so that it wraps the places as soon as it has run the module.

    Until then the name of the module stays in `_waiting`: a program may only look for the spec, and
    import the module later.  Loaders without `exec_module` stay as they are.
    """
    loader = spec.loader
    execute = getattr(loader, "exec_module", None)
    if loader is None or execute is None:
        return

    def exec_module(module: ModuleType) -> None:
        # so that the method of the loader's class is visible again.  If another finder has asked
        # this one for the spec, the loader was changed twice, and is restored already
        vars(loader).pop("exec_module", None)
        execute(module)
        if spec.name in _waiting:
            _waiting.discard(spec.name)
            _wrap(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]


def _wrap(module: ModuleType) -> None:
    """Wrap the places of an imported module.

    An exception here, such as that of an unsupported torch, becomes a note: it must not end the
    program.
    """
    try:
        import_module("ssdprof.record.wrapping").wrap_places(module)
    except Exception as error:
        note = import_module("ssdprof.record.settings").note
        note(f"{module.__name__} is not recorded: {error!r}.")


def install() -> None:
    """Begin to wait for modules with places, and wrap at once those that are imported already.

    Has no effect in a program that is not recorded, and as the second call in a process.
    """
    settings = os.environ.get(VARIABLE)
    this = sys.modules[__name__]
    if not settings or this in sys.meta_path:
        return
    modules = set(json.loads(settings)["modules"])
    _waiting.update(modules - sys.modules.keys())
    sys.meta_path.insert(0, this)
    for name in modules & sys.modules.keys():
        _wrap(sys.modules[name])
