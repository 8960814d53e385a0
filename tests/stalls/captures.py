"""A folder of stored captures: three SSD layers of one prompt."""

from pathlib import Path

import torch
from kernels.kernel_cases import SSDCase

from ssdprof.capture.layers import CapturedLayer
from ssdprof.capture.store import CaptureWriter
from ssdprof.core.subject import CheckpointRef, LayerRef

LAYERS = (2, 5, 7)


def store_layers(folder: Path, case: SSDCase) -> Path:
    """Every layer has the same inputs."""
    layers = tuple(LayerRef(index=i, name=f"layers.{i}", operator="ssd") for i in LAYERS)
    checkpoint = CheckpointRef(
        requested="x", source="local", repo_id="x", revision=None, model_type="m", layers=layers, layer_count=8
    )
    inputs = case.inputs()
    strides = {name: value.stride() for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    with CaptureWriter(folder, checkpoint=checkpoint, prompts=(), segment_length=case.seqlen) as writer:
        for layer in layers:
            writer.add(CapturedLayer(layer=layer, inputs=inputs, model_strides=strides))
    return folder
