"""Reads and checks config.json, and cuts it to the first layers.  Imports neither torch nor
transformers.

Layers and sizes come from the model that transformers builds (`meta`); here are only those checks
that should not wait for its import.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from ssdprof.checkpoint.names import KNOWN_TYPES, OTHER_SCANS, shown
from ssdprof.errors import BadInputError, library_message
from ssdprof.files import read_object

ModelConfig = dict[str, Any]  # config.json, or the part of it for the language model
_AGAIN = "Fetch or copy the file again."
# NVIDIA's tool writes it; config.json may not mention the quantisation
MODELOPT_CONFIG = "hf_quant_config.json"
# a config's key, as benchmarks/make_random_checkpoint.py writes it
RANDOM_WEIGHTS = "ssdprof_random_weights"
SUPPORTED = f"Supported model types: {', '.join(KNOWN_TYPES)}."
# Keys of what transformers builds one by one, and more of it than any model has: it would take
# forever
_COUNTED = re.compile("(layers|experts|blocks|layer_types|block_type|pattern)$")
_MOST = 4096
_LARGEST_STEP = 1e38  # of fp32
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
_OTHER_PARTS = re.compile("vision|visual|image|video|audio|speech|sound|mtp")
# one entry per layer
PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "hybrid_override_pattern")
_LAYER_INDICES = ("attn_layer_indices", "hybrid_layer_ids", "mlp_only_layers")
# Remote code; a part that is not loaded; labels of a classifier, from which transformers makes
# tables of any length.  The kernels of attention, which need not be installed here.  What the
# config says of a quantisation, which the weights may not have.
_DROPPED = (
    "auto_map",
    "quantization_config",
    "vision_config",
    "num_labels",
    "id2label",
    "label2id",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
)

# The original format of state-spaces/mamba2-*: a config with `ssm_cfg`, keys of the `mamba_ssm`
# package.
PICKLE = "pytorch_model.bin"
# these models were trained with it; their repos have no tokenizer
DEFAULT_TOKENIZER = "EleutherAI/gpt-neox-20b"
# Keys of `ssm_cfg` that do not change the structure of a layer, with the package's defaults.
_SSM_SIZES = {
    "d_state": 128,
    "d_conv": 4,
    "expand": 2,
    "headdim": 64,
    "ngroups": 1,
    "chunk_size": 256,
}
# Keys that Mamba2Config has under another name, keys that it has only with the package's default,
# and keys of initial weights and of the package's own kernels.
_SSM_OPTIONS = {"bias": "use_bias", "conv_bias": "use_conv_bias", "dt_limit": "time_step_limit"}
_SSM_FIXED = {"rmsnorm": True, "D_has_hdim": False, "norm_before_gate": False, "d_ssm": None}
# beside `ssm_cfg`
_ORIGINAL_FIXED: dict[str, Any] = {"attn_layer_idx": [], "d_intermediate": 0, "rms_norm": True}
_SSM_WITHOUT_EFFECT = (
    "layer",
    "A_init_range",
    "dt_min",
    "dt_max",
    "dt_init_floor",
    "conv_init",
    "use_mem_eff_path",
    "sequence_parallel",
)


def refuse(where: str, what: str) -> BadInputError:
    """The error for a config: "<where> <what>."."""
    return BadInputError(
        f"{where} {what}.", "The checkpoint's config is damaged, or not of this model type."
    )


def _check_counts(config: ModelConfig, where: str) -> None:
    """BadInputError for more layers or experts than any model has.  transformers says what else is
    wrong.
    """
    for key in filter(_COUNTED.search, config):
        count = len(config[key]) if isinstance(config[key], list | str) else config[key]
        if isinstance(count, int) and count > _MOST:
            raise refuse(where, f"has {key} of {count}; there may be {_MOST}")


def _check_steps(config: ModelConfig, where: str) -> None:
    """BadInputError for limits of time steps that only a run would refuse."""
    limits = config.get("time_step_limit")
    # an infinity may be a text or a table
    steps = limits if isinstance(limits, list) else []
    numbers = [step for step in steps if isinstance(step, int | float)]
    in_order = numbers == sorted(numbers) and all(
        abs(step) < _LARGEST_STEP or abs(step) == math.inf for step in numbers
    )
    if limits is not None and not (len(steps) == 2 and in_order):
        raise refuse(
            where,
            f"has time_step_limit = {shown(limits)}, which is not two numbers of fp32 in order",
        )
    for key in config.keys() & {"time_step_min", "time_step_max", "time_step_floor"}:
        if not isinstance(config[key], int | float) or not 0 < config[key] < _LARGEST_STEP:
            raise refuse(
                where, f"has {key} = {shown(config[key])}, which is not a positive number of fp32"
            )


def describe(file: Path, where: str, modelopt: Path | None = None) -> dict[str, Any]:
    """What config.json says of a model: fields of `model.Model`.  where: names it in messages.

    modelopt: the `MODELOPT_CONFIG`, if there is one.  BadInputError if it is not a JSON object, of
    a model type whose recurrent layers are known to be another operator, or with sizes that no
    model has or that contradict each other.
    """
    stored = read_object(file, where, _AGAIN)
    original = "ssm_cfg" in stored and "model_type" not in stored
    outer = _convert_original(stored, where) if original else stored
    model_type = _check_model_type(outer, where)
    text = _text_config(outer)
    if text is not None:
        _check_model_type(text, where)
    config = outer if text is None else text
    _check_counts(config, where)
    _check_steps(config, where)
    if codes := _quantization(stored, config, modelopt):
        config = {**config, "quantization_config": codes}
    return {
        "config": config,
        "model_type": model_type,
        "nested": text is not None,
        "original": original,
        "named_quantization": quant_method(config),
        "random_weights": stored.get(RANDOM_WEIGHTS) is True,
    }


def _quantization(stored: ModelConfig, config: ModelConfig, modelopt: Path | None) -> object:
    """What the config, or ModelOpt's file beside it, says of quantised weights, as transformers
    takes it.  Formats that it does not know have the method "mlx" or "modelopt".
    """
    for codes in (stored.get("quantization"), stored.get("quantization_config")):
        if isinstance(codes, dict) and {"group_size", "bits"} <= codes.keys():
            return {"quant_method": "mlx", **codes}
    codes = config.get("quantization_config")
    if not codes and modelopt is not None:
        beside = read_object(modelopt, MODELOPT_CONFIG, _AGAIN).get("quantization")
        codes = {**(beside if isinstance(beside, dict) else {}), "quant_method": "modelopt"}
    table = codes if isinstance(codes, dict) else {}
    # one scale for each tensor
    if (table.get("quant_method"), table.get("quant_algo")) == ("modelopt", "FP8"):
        return {"quant_method": "fp8", "weight_block_size": None}
    return codes


def _check_model_type(config: ModelConfig, where: str) -> str:
    """The model type; BadInputError if there is none, or if its recurrent layers are known to be
    another operator.
    """
    name = config.get("model_type")
    if name is None:
        raise BadInputError(f"{where} has no model_type.", SUPPORTED)
    if not isinstance(name, str):
        raise BadInputError(
            f"{where} is of type {shown(name)}, which has no layer that ssdprof measures.",
            SUPPORTED,
        )
    if name in OTHER_SCANS:
        raise BadInputError(f"{where} is of type {name}: {OTHER_SCANS[name]}.", SUPPORTED)
    return name


def _text_config(config: ModelConfig) -> ModelConfig | None:
    """The language model's config in that of a larger model, with its outer values; None: it
    describes only that.
    """
    keys = [key for key in config if key.endswith("_config") and not _OTHER_PARTS.search(key)]
    for key in sorted(keys, key=lambda key: key not in _TEXT_CONFIGS):
        nested = config[key]
        if not isinstance(nested, dict):
            continue
        if deeper := _text_config(nested):
            nested = deeper
        elif key not in _TEXT_CONFIGS and (
            "num_hidden_layers" not in nested or "num_hidden_layers" in config
        ):
            continue
        outer = {
            key: config[key]
            for key in ("dtype", "torch_dtype", "quantization_config")
            if key in config
        }
        text = {"model_type": f"{config.get('model_type')}_text", **outer, **nested}
        ties = config.get("tie_word_embeddings")
        return {**text, "tie_word_embeddings": ties} if isinstance(ties, bool) else text
    return None


def quant_method(config: ModelConfig) -> str | None:
    """The quantisation of the weights, as a config names it.  None: there is none, or it has no
    name.
    """
    codes = config.get("quantization_config")
    table = codes if isinstance(codes, dict) else {}
    # Configs of bitsandbytes' first releases name no method.
    first = "bitsandbytes" if table.get("load_in_4bit") or table.get("load_in_8bit") else None
    method = table.get("quant_method", first)
    return method if isinstance(method, str) else None


def refuse_quantization(codes: object, label: str) -> BadInputError:
    """The error for weights that would load as if their codes were values.  codes: what the config
    says of them.
    """
    table = codes if isinstance(codes, dict) else {}
    method = table.get("quant_method", codes)
    if method == "mlx":
        return BadInputError(
            f"{label} is of MLX's format, with {shown(table['bits'])} bits in groups of "
            f"{shown(table['group_size'])}: ssdprof cannot load it.",
            "Take the checkpoint that it was converted from: without mlx-community and without "
            "-4bit in its name.",
        )
    algorithm = f" as {shown(table['quant_algo'])}" if table.get("quant_algo") else ""
    return BadInputError(
        f"{label} is quantised by {shown(method)}{algorithm}, which ssdprof cannot load.",
        "Take the unquantised checkpoint; NVIDIA's are named ...-BF16.",
    )


def cut_config(
    config: ModelConfig, depth: int | None = None, *, dtype: str | None = None
) -> ModelConfig:
    """A language model's config with its first `depth` decoder layers only (all for None), as
    transformers reads it, for plain weights.

    dtype: in which its weights are loaded, named as in torch; None: what the config says of it, if
    anything.
    """
    config = {key: value for key, value in config.items() if key not in _DROPPED}
    if dtype is not None:
        config["dtype"] = dtype
    if depth is not None:
        config["num_hidden_layers"] = depth
        for key in PER_LAYER:
            if isinstance(config.get(key), (list, str)):
                config[key] = config[key][:depth]
        for key in _LAYER_INDICES:
            if isinstance(config.get(key), list):
                config[key] = [
                    index for index in config[key] if not isinstance(index, int) or index < depth
                ]
    if "num_nextn_predict_layers" in config:
        config["num_nextn_predict_layers"] = 0  # their weights are not fetched
    if config.get("time_step_limit", ()) is None:
        # some model definitions refuse null; a missing key means no limit
        del config["time_step_limit"]
    return config


# --- the original format


def _convert_original(config: ModelConfig, where: str) -> ModelConfig:
    """The config for Mamba2Config.  BadInputError for Mamba-1, other layers, and options that it
    has no key for.
    """
    ssm = config["ssm_cfg"]
    layer = ssm.get("layer", "Mamba1") if isinstance(ssm, dict) else None
    if layer != "Mamba2":
        raise BadInputError(
            f"{where} describes {'Mamba-1' if layer == 'Mamba1' else shown(layer)} layers; ssdprof "
            "reads Mamba-2.",
            "The Mamba-2 checkpoints of this format are state-spaces/mamba2-130m to mamba2-2.7b.",
        )
    for key, usual in _ORIGINAL_FIXED.items():
        if config.get(key) not in (None, usual):
            raise BadInputError(
                f"{where} has {key} = {shown(config[key])}, which transformers' mamba2 model does "
                "not support.",
                "Choose a checkpoint without: state-spaces/mamba2-2.7b.",
            )
    for key in sorted(set(ssm) - {*_SSM_SIZES, *_SSM_OPTIONS, *_SSM_WITHOUT_EFFECT}):
        if key not in _SSM_FIXED or ssm[key] is not _SSM_FIXED[key]:
            raise BadInputError(
                f"{where} has {shown(key)} = {shown(ssm[key])} in ssm_cfg, which transformers' "
                "mamba2 lacks.",
                "ssdprof runs the model by transformers.",
            )
    try:
        sizes = {key: ssm.get(key, default) for key, default in _SSM_SIZES.items()}
        multiple = config.get("pad_vocab_size_multiple", 8)
        converted = {
            "model_type": "mamba2",
            "architectures": ["Mamba2ForCausalLM"],
            "hidden_size": config["d_model"],
            "num_hidden_layers": config["n_layer"],
            "vocab_size": -(-config["vocab_size"] // multiple) * multiple,
            "num_heads": sizes["expand"] * config["d_model"] // sizes["headdim"],
            "head_dim": sizes["headdim"],
            "state_size": sizes["d_state"],
            "n_groups": sizes["ngroups"],
            "chunk_size": sizes["chunk_size"],
            "conv_kernel": sizes["d_conv"],
            "expand": sizes["expand"],
            "residual_in_fp32": bool(config.get("residual_in_fp32", True)),
            "tie_word_embeddings": bool(config.get("tie_embeddings", True)),
        }
    except (KeyError, TypeError, ArithmeticError) as error:
        raise refuse(where, f"has no usable sizes: {library_message(error)}") from error
    return converted | {name: ssm[key] for key, name in _SSM_OPTIONS.items() if key in ssm}
