"""Records of stored captures: a manifest with one record per layer and prompt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from ssdprof.schema.base import SCHEMA_VERSION, Record, StoredDType
from ssdprof.schema.checkpoint import CheckpointRef, LayerRef, Prompt
from ssdprof.schema.serving import CallRef


class TensorRecord(Record):
    shape: tuple[int, ...]
    dtype: StoredDType
    model_strides: tuple[int, ...]  # as the model passed it; the stored values are token-major
    sha256: str  # of the stored bytes


Scalar = int | float | bool | str | None


class LayerCapture(Record):
    """The stored inputs of one call of a layer's operator.

    call: which one; None: the whole of a prompt.
    remark: a sentence for the report if the inputs differ from the model's call or its config.
    scalars: arguments that are not tensors: chunk_size, dt_softplus, dt_limit_low, dt_limit_high, ...
    scalars_sha256: `scalars_hash` of them.
    """

    layer: LayerRef
    seqlen: int  # of the call
    call: CallRef | None = None
    file: str  # safetensors file in the manifest's folder
    tensors: dict[str, TensorRecord]
    remark: str = ""
    scalars: dict[str, Scalar]
    scalars_sha256: str

    @property
    def whole(self) -> bool:
        """Whether it is of whole sequences: no chunk, and no decode step."""
        return self.call is None or self.call.kind == "packed"

    @property
    def is_step(self) -> bool:
        """Whether it is of a decode step."""
        return self.call is not None and self.call.kind == "decode"


class CaptureManifest(Record):
    schema_version: int = SCHEMA_VERSION
    checkpoint: CheckpointRef
    prompts: tuple[Prompt, ...]
    segment_length: int  # tokens per forward call of the model
    layers: tuple[LayerCapture, ...]
    complete: bool


class StoredCapture(Record):
    """A folder of captures, as `ssdprof capture` prints it."""

    folder: str
    manifest: CaptureManifest


def scalars_hash(scalars: Mapping[str, Scalar]) -> str:
    """SHA-256 of names, types and values, in the order of names: 1, 1.0 and true differ."""
    return hashlib.sha256(json.dumps(dict(scalars), sort_keys=True).encode()).hexdigest()
