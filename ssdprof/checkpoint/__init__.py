"""Checkpoints: from a model id, a folder or a demo to local files, the layers with an operator, and the model."""

from importlib import import_module
from typing import Any


class _Library:
    """A module that is imported when it is used: stored captures need none of these, and they take seconds."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


accelerate: Any = _Library("accelerate")
transformers: Any = _Library("transformers")
