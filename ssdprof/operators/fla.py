"""flash-linear-attention, with its calls to other libraries turned off, so that its own kernels are
timed.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType

PACKAGE = "flash-linear-attention"
_ALONE = "FLA_DISABLE_BACKEND_DISPATCH"  # fla reads this variable when it is imported


def keep_alone() -> None:
    """Called before models are built: transformers imports fla with their code."""
    os.environ.setdefault(_ALONE, "1")


def imported(module: str) -> ModuleType:
    """A module of fla.

    Raises ImportError if it is not installed, and if it was imported before while it passed calls
    to other libraries.
    """
    if module in sys.modules and os.environ.get(_ALONE) != "1":
        raise ImportError(
            f"fla was imported before {_ALONE}=1 was set, and may call other libraries"
        )
    os.environ[_ALONE] = "1"
    return import_module(module)
