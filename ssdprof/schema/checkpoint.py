"""What ran: a checkpoint, its layers and the prompt."""

from __future__ import annotations

from typing import Literal

from ssdprof.schema.base import Record
from ssdprof.schema.serving import Serving

# Quantisations whose weights transformers is told to decode to 16 bit as it loads them.
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
    random_weights: bool = False  # the config says that nothing was trained


class Prompt(Record):
    kind: Literal["default", "file", "random"]
    source: str  # which text, in words: never a path
    tokenizer: str
    seqlen: int  # of each sequence; of all together if they are packed
    batch: int = 1
    token_sha256: str  # of the little-endian int64 ids
    serving: Serving = Serving()
