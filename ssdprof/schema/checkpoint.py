"""Records of a checkpoint, its layers and the prompt."""

from __future__ import annotations

from typing import Literal

from ssdprof.schema.base import Record
from ssdprof.schema.serving import Serving

# Quantisations whose weights transformers decodes to 16 bit on loading.
DECODED_ON_LOAD = frozenset({"fp8", "mxfp8"})


class LayerRef(Record):
    index: int  # position among the model's decoder layers
    name: str  # module path in the full model, "model.layers.3.mamba"
    operator: str  # its name: see ssdprof.operators


class CheckpointRef(Record):
    requested: str  # what the user typed
    source: Literal["hub", "local", "demo"]
    repo_id: str  # hub id, folder name, "demo" or "demo-gdn"
    revision: str | None  # commit hash on the hub
    model_type: str
    layers: tuple[LayerRef, ...]  # those with an operator that ssdprof knows
    layer_count: int  # all decoder layers
    siblings: tuple[str, ...] = ()  # other members when `requested` was a family name
    quantization: str | None = None  # quant_method; its error is then part of the captured values
    trained_context: int | None = None
    random_weights: bool = False  # according to the config


class Prompt(Record):
    kind: Literal["default", "file", "random"]
    source: str  # the text, in words, without a path
    tokenizer: str
    seqlen: int  # of each sequence; of all packed sequences together
    batch: int = 1
    token_sha256: str  # of the little-endian int64 ids
    serving: Serving = Serving()
