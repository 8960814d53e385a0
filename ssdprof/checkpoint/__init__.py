"""Checkpoints: from a model id, a folder or a demo to local files, the layers with an operator, and the model."""

from typing import Any

from ssdprof.operators.late import LazyModule

accelerate: Any = LazyModule("accelerate")  # stored captures need neither, and their imports take seconds
transformers: Any = LazyModule("transformers")
