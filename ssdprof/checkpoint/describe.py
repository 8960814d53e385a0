"""Reads the layers with an operator, and their sizes, from config.json.  Imports neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssdprof.checkpoint import original
from ssdprof.checkpoint.layer_dims import LayerDims
from ssdprof.checkpoint.model_types import MODEL_TYPES, OTHER_SCANS, ModelType
from ssdprof.checkpoint.sizes import Sizes, shown
from ssdprof.errors import BadInputError, library_message
from ssdprof.schema import LayerRef
from ssdprof.schema.checkpoint import DECODED_ON_LOAD

# Methods that transformers loads.  It ignores others with a warning, and would load the codes as weights.
QUANT_METHODS = DECODED_ON_LOAD | {
    *("compressed-tensors", "fbgemm_fp8", "torchao", "bitsandbytes", "gptq", "awq", "mxfp4", "hqq", "quanto")
}


@dataclass(frozen=True, kw_only=True)
class Description:
    """The contents of a config.json.

    config: the language model's own config in transformers' format: flat, and converted from the original format.
    kinds: the kind of every decoder layer.
    layers: those of them with an SSD or gated-delta-rule operator.
    """

    model_type: str  # as the config says; "mamba2" for the original format
    kind: ModelType
    config: Mapping[str, Any]
    kinds: tuple[str, ...]
    layers: tuple[LayerRef, ...]
    dims: LayerDims
    quantization: str | None
    original: bool

    @property
    def layer_count(self) -> int:
        return len(self.kinds)

    @property
    def max_positions(self) -> int | None:
        """The context length in the config, in tokens; None if there is none."""
        positions = self.config.get("max_position_embeddings")
        return positions if isinstance(positions, int) and positions > 0 else None

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids; None if the config does not state it."""
        size = self.config.get("vocab_size")
        return size if isinstance(size, int) else None

    def depth(self, deepest_layer: int | None) -> int:
        """Decoder layers to load so that layer `deepest_layer` can run; all for None.

        More than deepest_layer + 1 if the model definition needs an attention layer.
        BadInputError if the model has no such layer.
        """
        if deepest_layer is None:
            return self.layer_count
        if not 0 <= deepest_layer < self.layer_count:
            raise BadInputError(
                f"There is no layer {deepest_layer}: the model's layers are 0 to {self.layer_count - 1}.",
                f"Layers with the operator: {', '.join(str(layer.index) for layer in self.layers)}.",
            )
        least = self.kinds.index("full_attention") + 1 if self.kind.needs_attention else 0
        return max(deepest_layer + 1, least)


def read_config(path: Path, where: str) -> dict[str, Any]:
    """The object in a JSON file.  `Infinity` is accepted: Python's json reads it and checkpoints hold it.

    BadInputError if it is not a JSON object.
    """
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadInputError(
            f"{where} is not valid JSON: {library_message(error)}.", "Fetch or copy the file again."
        ) from None
    if not isinstance(config, dict):
        raise BadInputError(f"{where} holds no JSON object.", "Is this a model's config?")
    return config


def describe(config: Mapping[str, Any], where: str = "config.json") -> Description:
    """The description in `config`.  where: its name in messages.

    BadInputError: a model type without SSD or gated-delta-rule layers, remote code only, no such layer in this
    config, unknown quantisation, sizes that no model has or that contradict each other.
    """
    is_original = original.is_original(config)
    if is_original:
        config = original.convert_config(config, where)
    kind = _model_type(config, where)
    text = _text_config(config, kind, where)
    quantization = quant_method(config, where)

    sizes = Sizes(text, where)
    kinds = kind.kinds(sizes)
    layers = tuple(
        LayerRef(index=index, name=kind.paths[layer].format(index), operator=kind.operator)
        for index, layer in enumerate(kinds)
        if layer in kind.paths
    )
    if not layers:
        raise BadInputError(
            f"{where} has no SSD or gated-delta-rule layer: its {len(kinds)} are {' and '.join(sorted(set(kinds)))}.",
            "Sizes of such layers in a config mean nothing when no layer has them."
            + (
                ' The hybrid models of this family have an "h" in their name.'
                if kind.name == "granitemoehybrid"
                else ""
            ),
        )
    if kind.needs_attention and "full_attention" not in kinds:
        raise sizes.refuse("has no attention layer, which transformers needs to build this model")
    sizes.check_common()
    return Description(
        model_type=kind.name,
        kind=kind,
        config=text,
        kinds=tuple(kinds),
        layers=layers,
        dims=kind.dims(sizes),
        quantization=quantization,
        original=is_original,
    )


def quant_method(config: Mapping[str, Any], where: str) -> str | None:
    """The quantisation of the weights, or None; BadInputError for a method that ssdprof does not load."""
    nested = config.get("text_config")
    found = config.get("quantization_config") or (
        nested.get("quantization_config") if isinstance(nested, dict) else None
    )
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else None
    if method is None and isinstance(found, dict) and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        method = "bitsandbytes"  # configs of its first releases name no method
    if not isinstance(method, str) or method not in QUANT_METHODS:
        raise refuse_quantization(method, where)
    return method


def refuse_quantization(method: object, where: str) -> BadInputError:
    """The error for weights that would load as if their codes were values."""
    return BadInputError(
        f"{where} is quantised by {shown(method)}, which ssdprof cannot load.",
        "Take the unquantised checkpoint; NVIDIA's are named ...-BF16.",
    )


def _model_type(config: Mapping[str, Any], where: str) -> ModelType:
    name = config.get("model_type")
    if isinstance(name, str) and name in MODEL_TYPES:
        return MODEL_TYPES[name]
    supported = f"Supported model types: {', '.join(MODEL_TYPES)}."
    if isinstance(name, str) and name in OTHER_SCANS:
        raise BadInputError(f"{where} is of type {name}: {OTHER_SCANS[name]}.", supported)
    if config.get("auto_map"):
        raise BadInputError(
            f"{where} is of type {shown(name)}, whose code is in the repo itself; ssdprof runs no remote code.",
            supported,
        )
    if name is None:
        raise BadInputError(f"{where} has no model_type.", supported)
    raise BadInputError(f"{where} is of type {shown(name)}, which has no layer that ssdprof measures.", supported)


def _text_config(config: Mapping[str, Any], kind: ModelType, where: str) -> Mapping[str, Any]:
    """The language model's own config, with the outer config's values for all parts."""
    if kind.text_type is None:
        return config
    nested = config.get("text_config")
    if not isinstance(nested, dict):
        raise BadInputError(
            f"{where} has no text_config, where a {kind.name} config describes its layers.",
            f"A config of the language model alone has model_type {kind.text_type}.",
        )
    outer = {key: config[key] for key in ("dtype", "torch_dtype", "quantization_config") if key in config}
    return {**outer, **nested, "model_type": kind.text_type}
