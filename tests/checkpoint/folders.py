"""Changes of the files of a checkpoint."""

import json
from pathlib import Path
from typing import Any

import tiny_models
import torch
from safetensors.torch import save_file

from ssdprof.checkpoint.config import PICKLE
from ssdprof.checkpoint.weights import INDEX, SINGLE


def edit_json(file: Path, **changes):
    """Change entries of an object in a file, or write a new one."""
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | changes))


# --- the original format of state-spaces/mamba2-*

ORIGINAL_CONFIG: dict[str, Any] = {
    "d_model": 64,
    "d_intermediate": 0,
    "n_layer": 3,
    "vocab_size": 128,
    "ssm_cfg": {"layer": "Mamba2", "headdim": 16, "d_state": 16, "ngroups": 2, "chunk_size": 32},
    "attn_layer_idx": [],
    "attn_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 16,
    "tie_embeddings": True,
}


def original_state() -> dict[str, torch.Tensor]:
    """The tiny mamba2 model's weights with the names and the mixed dtypes of the original
    package.
    """
    state = tiny_models.shared("mamba2").state_dict()
    renamed = {
        key.replace("backbone.embeddings.", "backbone.embedding."): value
        for key, value in state.items()
    }
    kept = ("A_log", "D", "dt_bias")
    return {
        key: value.clone() if key.endswith(kept) else value.half() for key, value in renamed.items()
    }


def write_original(folder: Path, state: dict[Any, torch.Tensor], form: str):
    """Store the tiny mamba2 model in the original format, its weights as a pickle, as one file of
    safetensors, or as shards of two tensors.
    """
    (folder / "config.json").write_text(json.dumps(ORIGINAL_CONFIG))
    (folder / PICKLE).unlink(missing_ok=True)
    if form == PICKLE:
        torch.save(state, folder / PICKLE)
    elif form == SINGLE:
        save_file(state, folder / SINGLE)
    else:
        shards = {key: f"model-{number // 2:05d}.safetensors" for number, key in enumerate(state)}
        for file in set(shards.values()):
            save_file({key: state[key] for key in state if shards[key] == file}, folder / file)
        (folder / INDEX).write_text(json.dumps({"weight_map": shards}))
