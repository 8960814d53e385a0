"""Capture: run a model on a prompt, and take the inputs of its SSD and gated-delta-rule layers at the operator's door.

Importing this package imports nothing heavy; a name below imports what it needs when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssdprof.capture.captured import CapturedLayer as CapturedLayer
    from ssdprof.capture.layers import CaptureSummary as CaptureSummary
    from ssdprof.capture.layers import capture_layers as capture_layers
    from ssdprof.capture.memory import choose_segment_length as choose_segment_length
    from ssdprof.capture.select import select_layers as select_layers

_HOME = {
    "CaptureSummary": "layers",
    "CapturedLayer": "captured",
    "capture_layers": "layers",
    "choose_segment_length": "memory",
    "select_layers": "select",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
