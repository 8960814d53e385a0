"""Makes a folder with a checkpoint cut to its first layers: a config of its own, and symlinks to the other files.

Stock `AutoModel.from_pretrained` loads it.  Its config names no remote code and no vision tower.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ssdprof.checkpoint.describe import Description
from ssdprof.checkpoint.layer_kinds import ZAMBA2_DEFAULT_KINDS
from ssdprof.checkpoint.weights import INDEX, is_needed
from ssdprof.core.subject import DECODED_ON_LOAD

_PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "hybrid_override_pattern")  # one entry per layer
_LAYER_INDICES = ("attn_layer_indices", "hybrid_layer_ids", "mlp_only_layers")
_WAYS: tuple[Callable[[Path, Path], object], ...] = (os.symlink, os.link, shutil.copyfile)
# Remote code; a part that is not loaded; labels of a classifier, from which transformers makes tables of any length.
_DROPPED = ("auto_map", "vision_config", "num_labels", "id2label", "label2id")


def cut_config(description: Description, depth: int, dtype: str | None = None) -> dict[str, Any]:
    """The language model's config with its first `depth` decoder layers only.

    dtype: in which its weights are loaded, named as in torch; None: what the config says of it, if anything.
    """
    config = {key: value for key, value in description.config.items() if key not in _DROPPED}
    config["num_hidden_layers"] = depth
    if dtype is not None:
        config["dtype"] = dtype
    if description.kind.name == "zamba2" and config.get("layers_block_type") is None:
        config["layers_block_type"] = ZAMBA2_DEFAULT_KINDS
    for key in _PER_LAYER:
        if isinstance(config.get(key), (list, str)):
            config[key] = config[key][:depth]
    for key in _LAYER_INDICES:
        if isinstance(config.get(key), list):
            config[key] = [index for index in config[key] if not isinstance(index, int) or index < depth]
    if "num_nextn_predict_layers" in config:
        config["num_nextn_predict_layers"] = 0  # their weights are not fetched
    if config.get("time_step_limit", ()) is None:
        del config["time_step_limit"]  # some model definitions refuse null; a missing key means no limit
    if description.quantization in DECODED_ON_LOAD:
        # Decode to 16 bit on load: the operator's inputs then do not depend on the fp8 matmul of this GPU.
        config["quantization_config"] = {**config["quantization_config"], "dequantize": True}
    return config


def link_weights(
    folder: Path, depth: int, files: Mapping[str, Path], shards: Mapping[str, str] | None, *, head: bool = False
) -> None:
    """Put the weights of the first `depth` layers into `folder`, with an index of their own.

    files: the weights files, name -> place.  shards: tensor name -> file name, None for a single file.
    head: with the language-model head.
    """
    link_all(folder, files.items())
    if shards is not None:
        kept = {key: file for key, file in shards.items() if is_needed(key, depth, head=head)}
        write_json(folder / INDEX, {"metadata": {}, "weight_map": kept})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """`content` as JSON; infinities as Python and the checkpoints write them."""
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def link_all(folder: Path, files: Iterable[tuple[str, Path]]) -> None:
    """Make every (name, place) appear in `folder`: as a symlink, else a hard link, else a copy."""
    for name, place in files:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        for way in _WAYS:
            try:
                way(place.resolve(), target)
                break
            except OSError:
                if way is _WAYS[-1]:
                    raise
