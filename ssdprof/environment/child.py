"""Python processes of this installation: children, and those that torchrun started.  Imports no torch."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

from ssdprof.errors import BadInputError


def python(module: str) -> tuple[str, ...]:
    """The command that runs a module of the same installation.

    -P: files in the current directory do not hide modules.
    """
    return (sys.executable, "-P", "-m", module)


def search_path() -> dict[str, str]:
    """The environment variable that gives the child process the search path of this process."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def started(environment: Mapping[str, str] = os.environ) -> int:
    """Processes that torchrun started, this one included; 1 without torchrun.

    BadInputError for a WORLD_SIZE that torchrun does not set.
    """
    count = environment.get("WORLD_SIZE") or "1"
    if not re.fullmatch(r"[1-9][0-9]{0,8}", count):
        raise BadInputError(f"WORLD_SIZE={count!r} is not a number of processes.", "Run: unset WORLD_SIZE")
    return int(count)
