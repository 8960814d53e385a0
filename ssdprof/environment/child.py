"""Starts Python child processes."""

from __future__ import annotations

import os
import sys


def python(module: str) -> tuple[str, ...]:
    """The command that runs a module of the same installation.

    -P: files in the current directory do not hide modules.
    """
    return (sys.executable, "-P", "-m", module)


def search_path() -> dict[str, str]:
    """The environment variable that gives the child process the search path of this process."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
