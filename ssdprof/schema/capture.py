"""Stored captures: a manifest, and in it one record per layer and prompt."""

from __future__ import annotations

from ssdprof.schema.base import SCHEMA_VERSION, DType, Record
from ssdprof.schema.checkpoint import CheckpointRef, LayerRef, Prompt


class TensorRecord(Record):
    shape: tuple[int, ...]
    dtype: DType
    model_strides: tuple[int, ...]  # as the model passed it; the stored values are token-major
    sha256: str  # of the stored bytes


class LayerCapture(Record):
    layer: LayerRef
    seqlen: int
    file: str  # safetensors file beside the manifest
    tensors: dict[str, TensorRecord]
    remark: str = ""  # what was undone of the model's call
    scalars: dict[str, int | float | bool | str | None]  # chunk_size, dt_softplus, dt_limit_low, dt_limit_high, ...


class CaptureManifest(Record):
    schema_version: int = SCHEMA_VERSION
    checkpoint: CheckpointRef
    prompts: tuple[Prompt, ...]
    segment_length: int  # tokens per forward call of the model
    layers: tuple[LayerCapture, ...]
    complete: bool
