"""The original format of state-spaces/mamba2-*: a config with `ssm_cfg`, keys of the `mamba_ssm` package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssdprof.checkpoint.sizes import LAYER_LIMIT, Sizes, shown
from ssdprof.errors import BadInputError

PICKLE = "pytorch_model.bin"
DEFAULT_TOKENIZER = "EleutherAI/gpt-neox-20b"  # these models were trained with it; their repos have no tokenizer

# Keys of `ssm_cfg` that do not change the structure of a layer, with the package's defaults.
_SSM_SIZES = {"d_state": 128, "d_conv": 4, "expand": 2, "headdim": 64, "ngroups": 1, "chunk_size": 256}


def is_original(config: Mapping[str, Any]) -> bool:
    """Whether `config` is of this format."""
    return "ssm_cfg" in config and "model_type" not in config


def convert_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The config that transformers' Mamba2Config reads, with `model_type` "mamba2".

    BadInputError for Mamba-1, for attention or MLP layers, and for layer options that Mamba2Config has no key for.
    """
    ssm = config["ssm_cfg"]
    layer = ssm.get("layer", "Mamba1") if isinstance(ssm, dict) else None
    if layer != "Mamba2":
        raise BadInputError(
            f"{where} describes {'Mamba-1' if layer == 'Mamba1' else shown(layer)} layers; ssdprof reads Mamba-2.",
            "The Mamba-2 checkpoints of this format are state-spaces/mamba2-130m to mamba2-2.7b.",
        )
    if config.get("attn_layer_idx"):
        raise BadInputError(
            f"{where} has attention layers (attn_layer_idx), which transformers' mamba2 model does not support.",
            "Choose a checkpoint without them: state-spaces/mamba2-2.7b.",
        )
    sizes, inner = Sizes(config, where), Sizes(ssm, f"ssm_cfg in {where}")
    if sizes.get("d_intermediate", 0, least=0):
        raise sizes.refuse("has MLP layers (d_intermediate), which transformers' mamba2 model does not have")
    if not config.get("rms_norm", True):
        raise sizes.refuse("has rms_norm = false; transformers' mamba2 model normalises by RMS")
    if unknown := sorted(set(ssm) - set(_SSM_SIZES) - {"layer"}):
        raise sizes.refuse(f"has {', '.join(map(shown, unknown))} in ssm_cfg, which transformers' mamba2 lacks")

    hidden, vocab, multiple = sizes.get("d_model"), sizes.get("vocab_size"), sizes.get("pad_vocab_size_multiple", 8)
    ssm_sizes = {key: inner.get(key, default) for key, default in _SSM_SIZES.items()}
    channels = ssm_sizes["expand"] * hidden
    if channels % ssm_sizes["headdim"]:
        raise sizes.refuse(f"has d_model = {hidden}: {channels} channels are not a multiple of {ssm_sizes['headdim']}")
    return {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": sizes.get("n_layer", limit=LAYER_LIMIT),
        "vocab_size": -(-vocab // multiple) * multiple,
        "num_heads": channels // ssm_sizes["headdim"],
        "head_dim": ssm_sizes["headdim"],
        "state_size": ssm_sizes["d_state"],
        "n_groups": ssm_sizes["ngroups"],
        "chunk_size": ssm_sizes["chunk_size"],
        "conv_kernel": ssm_sizes["d_conv"],
        "expand": ssm_sizes["expand"],
        "residual_in_fp32": bool(config.get("residual_in_fp32", True)),
        "tie_word_embeddings": bool(config.get("tie_embeddings", True)),
    }


def convert_key(key: str, *, head: bool = False) -> str:
    """A weight's name in transformers' Mamba2Model, without the prefix "backbone." and with another embedding.

    head: in Mamba2ForCausalLM, which has both.
    """
    return (key if head else key.removeprefix("backbone.")).replace("embedding.", "embeddings.", 1)
