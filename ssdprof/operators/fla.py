"""Imports flash-linear-attention (fla) with its calls to other libraries turned off, so that fla's
own kernels are timed.
"""

import os
import sys
from importlib import import_module
from types import ModuleType

PACKAGE = "flash-linear-attention"
_ALONE = "FLA_DISABLE_BACKEND_DISPATCH"  # environment variable that fla reads when it is imported


def keep_alone() -> None:
    """Turn off fla's calls to other libraries, unless the user has set the variable, or has
    imported fla, which has then read it.  Must run before models are built, because transformers
    imports fla for them.
    """
    if "fla" not in sys.modules:
        os.environ.setdefault(_ALONE, "1")


def imported(module: str) -> ModuleType:
    """The module of fla with this full name, imported with fla's calls to other libraries turned
    off, whatever the user has set.

    Raises ImportError if fla is not installed, and if the module is imported already and these
    calls are not turned off.
    """
    if module in sys.modules and os.environ.get(_ALONE) != "1":
        raise ImportError(
            f"fla was imported before {_ALONE}=1 was set, and may call other libraries"
        )
    os.environ[_ALONE] = "1"
    return import_module(module)
