"""Python processes that this one starts."""

from __future__ import annotations

import os
import sys


def python(module: str) -> tuple[str, ...]:
    """The command that runs a module of the same installation.

    -P: what lies in the current directory hides no module that is imported there.
    """
    return (sys.executable, "-P", "-m", module)


def search_path() -> dict[str, str]:
    """The variable with which such a process finds modules where this one finds them."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
