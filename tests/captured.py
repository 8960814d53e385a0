"""Captures made by hand and stored in a folder."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cases import checkpoint
from kernels.kernel_cases import SSDCase

from ssdprof.capture.layers import CapturedLayer
from ssdprof.capture.store import CaptureWriter
from ssdprof.core.target import CallRef, LayerRef, Prompt

LAYERS = (2, 5, 7)


def layer(index: int, operator: str = "ssd") -> LayerRef:
    return LayerRef(index=index, name=f"layers.{index}", operator=operator)


def store(
    folder: Path, captured: Iterable[tuple[LayerRef, Any, CallRef | None]], *prompts: Prompt
) -> Path:
    """captured: a layer, its inputs, and the call of the model if it is not the whole prompt."""
    captured = list(captured)
    ref = checkpoint(layers=tuple(dict.fromkeys(layer for layer, *_ in captured)))
    with CaptureWriter(folder, checkpoint=ref, prompts=prompts, segment_length=64) as writer:
        for layer, inputs, call in captured:
            writer.add(CapturedLayer(layer=layer, inputs=inputs, call=call))
    return folder


def store_layers(folder: Path, case: SSDCase) -> Path:
    """Three SSD layers of one prompt, with the same inputs."""
    inputs = case.inputs()
    return store(folder, [(layer(index), inputs, None) for index in LAYERS])
