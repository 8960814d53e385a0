"""Reads and checks config.json, and cuts it to the first layers.  Imports neither torch nor
transformers.

Layers and sizes come from the model that transformers builds (`meta`).  This module only has the
checks that need no import of transformers.
"""

import math
import re
from pathlib import Path
from typing import Any

from ssdprof.checkpoint.hub import fetch_again
from ssdprof.checkpoint.names import KNOWN_TYPES, OTHER_SCANS, shown
from ssdprof.errors import BadInputError, library_message
from ssdprof.files import read_object

ModelConfig = dict[str, Any]  # config.json, or the part of it for the language model
# NVIDIA's ModelOpt writes this file; config.json may not mention the quantisation
MODELOPT_CONFIG = "hf_quant_config.json"
# key of a config that benchmarks/make_random_checkpoint.py has written
RANDOM_WEIGHTS = "ssdprof_random_weights"
SUPPORTED = f"Supported model types: {', '.join(KNOWN_TYPES)}."
# Keys that count modules, or list them.  transformers builds modules one by one: a damaged config
# could make it build them for hours.
_COUNTED = re.compile("(layers|experts|blocks|layer_types|block_type|pattern)$")
_LARGEST_COUNT = 4096  # more than any model has
_LARGEST_STEP = 1e38  # just below the largest number of fp32, 3.4e38
# keys of the language model's config in that of a larger model, as transformers names them
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
# keys of other parts of a larger model
_OTHER_PARTS = re.compile("vision|visual|image|video|audio|speech|sound|mtp")
# keys of lists, or strings, with one entry for each layer
PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "hybrid_override_pattern")
# keys of lists of layer indices
_LAYER_INDICES = ("attn_layer_indices", "hybrid_layer_ids", "mlp_only_layers")
# keys that `cut_config` leaves out
_DROPPED = (
    "auto_map",  # remote code
    # The weights may have been decoded since; otherwise `Model.load_config` adds it again.
    "quantization_config",
    "vision_config",  # of a part that is not loaded
    # labels of a classifier, from which transformers makes tables of any length
    "num_labels",
    "id2label",
    "label2id",
    # kernels of attention, which need not be installed here
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
)

# The original format of state-spaces/mamba2-*: a config with `ssm_cfg`, keys of the `mamba_ssm`
# package.
PICKLE = "pytorch_model.bin"
# These models were trained with this tokenizer; their repos have none.
DEFAULT_TOKENIZER = "EleutherAI/gpt-neox-20b"
# Keys of `ssm_cfg` that are sizes, with the package's defaults.
_SSM_SIZES = {
    "d_state": 128,
    "d_conv": 4,
    "expand": 2,
    "headdim": 64,
    "ngroups": 1,
    "chunk_size": 256,
}
# Keys of `ssm_cfg` that Mamba2Config has under another name.
_SSM_OPTIONS = {"bias": "use_bias", "conv_bias": "use_conv_bias", "dt_limit": "time_step_limit"}
# Keys of `ssm_cfg`, and keys beside it, with the only value that transformers' model supports.
_SSM_FIXED = {"rmsnorm": True, "D_has_hdim": False, "norm_before_gate": False, "d_ssm": None}
_ORIGINAL_FIXED: dict[str, Any] = {"attn_layer_idx": [], "d_intermediate": 0, "rms_norm": True}
# Keys of `ssm_cfg` for initial weights and for the package's own kernels.
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


def refuse(where: str, fault: str) -> BadInputError:
    """The error for a config whose message is "<where> <fault>."."""
    return BadInputError(
        f"{where} {fault}.", "The checkpoint's config is damaged, or not of this model type."
    )


def _check_counts(config: ModelConfig, where: str) -> None:
    """BadInputError for more layers, experts or blocks than any model has.

    where: names the file in the message.

    Values that are neither integers, lists nor texts are left to transformers, which refuses them
    with a message.
    """
    for key in filter(_COUNTED.search, config):
        count = len(config[key]) if isinstance(config[key], list | str) else config[key]
        if isinstance(count, int) and count > _LARGEST_COUNT:
            raise refuse(where, f"has {key} of {count}; there may be {_LARGEST_COUNT}")


def _check_steps(config: ModelConfig, where: str) -> None:
    """BadInputError for limits of time steps that transformers would accept, and only a run would
    refuse.  A missing key and a `time_step_limit` of null are allowed.

    where: names the file in the message.
    """
    limits = config.get("time_step_limit")
    steps = limits if isinstance(limits, list) else []
    # transformers reads an infinity as a mapping, too: {"__float__": "Infinity"}
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
    """The fields of `model.Model` that config.json determines.

    where: names the file in messages.  modelopt: the `MODELOPT_CONFIG`; None: there is none.

    Raises BadInputError if a file is no JSON object, if the model type is missing or no text, or if
    its recurrent layers are known to be another operator, for more layers or experts than any model
    has, for limits of time steps that no run can have, and for an original format that transformers
    lacks.  Raises MissingCapabilityError if the user may not read a file.
    """
    stored = read_object(file, where, fetch_again(file))
    original = "ssm_cfg" in stored and "model_type" not in stored
    outer = _convert_original(stored, where) if original else stored
    model_type = _check_model_type(outer, where)
    text = _text_config(outer)
    if text is not None:
        _check_model_type(text, where)
    config = outer if text is None else text
    _check_counts(config, where)
    _check_steps(config, where)
    if quantization := _quantization(stored, config, modelopt):
        config = {**config, "quantization_config": quantization}
    return {
        "config": config,
        "model_type": model_type,
        "nested": text is not None,
        "original": original,
        "named_quantization": quant_method(config),
        "random_weights": stored.get(RANDOM_WEIGHTS) is True,
    }


def _quantization(stored: ModelConfig, config: ModelConfig, modelopt: Path | None) -> object:
    """The quantization_config for transformers, of any type: from the config, or from ModelOpt's
    file beside it; None or empty if neither describes a quantisation.

    ModelOpt's FP8 becomes transformers' own format.  What MLX and other ModelOpt formats describe
    gets the method "mlx" or "modelopt", which transformers does not know.
    stored: all of config.json.  config: the language model's part of it.
    """
    for quantization in (stored.get("quantization"), stored.get("quantization_config")):
        if isinstance(quantization, dict) and {"group_size", "bits"} <= quantization.keys():
            # MLX names no method.  GPTQ and AWQ, which have these keys too, do: theirs stays.
            return {"quant_method": "mlx"} | quantization
    quantization = config.get("quantization_config")
    if not quantization and modelopt is not None:
        hint = fetch_again(modelopt)
        beside = read_object(modelopt, MODELOPT_CONFIG, hint).get("quantization")
        quantization = {"quant_method": "modelopt"}
        if isinstance(beside, dict):
            quantization = beside | quantization
    table = quantization if isinstance(quantization, dict) else {}
    if table.get("quant_method") == "modelopt" and table.get("quant_algo") == "FP8":
        return {"quant_method": "fp8", "weight_block_size": None}  # one scale for each tensor
    return quantization


def _check_model_type(config: ModelConfig, where: str) -> str:
    """The model type.

    Raises BadInputError if there is none, if it is no text, or if its recurrent layers are known to
    be another operator.
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
    """The language model's config in that of a larger model; None if `config` is that of a
    language model.

    A dtype and a quantisation that it lacks are those of the larger model.  A model type that it
    lacks is that of the larger model with "_text" at its end.  If the larger model says whether the
    head is the embedding, this counts, whatever the language model's config says.
    """
    keys = [key for key in config if key.endswith("_config") and not _OTHER_PARTS.search(key)]
    for key in sorted(keys, key=lambda key: key not in _TEXT_CONFIGS):  # the usual names first
        nested = config[key]
        if not isinstance(nested, dict):
            continue
        has_layers = "num_hidden_layers" in nested and "num_hidden_layers" not in config
        if deeper := _text_config(nested):
            nested = deeper
        elif key not in _TEXT_CONFIGS and not has_layers:
            continue
        inherited = config.keys() & {"dtype", "torch_dtype", "quantization_config"}
        text: ModelConfig = {"model_type": f"{config.get('model_type')}_text"}
        text |= {outer_key: config[outer_key] for outer_key in inherited}
        text |= nested  # the language model's own values count
        ties = config.get("tie_word_embeddings")
        if isinstance(ties, bool):
            text["tie_word_embeddings"] = ties
        return text
    return None


def quant_method(config: ModelConfig) -> str | None:
    """The quantisation of the weights, as a config names it; None if there is none, or if neither a
    name nor a key of bitsandbytes says which.
    """
    quantization = config.get("quantization_config")
    table = quantization if isinstance(quantization, dict) else {}
    default = None
    if table.get("load_in_4bit") or table.get("load_in_8bit"):
        default = "bitsandbytes"  # configs of its first releases name no method
    method = table.get("quant_method", default)
    return method if isinstance(method, str) else None


def refuse_quantization(quantization: object, label: str) -> BadInputError:
    """The error for quantised weights that transformers would load as if their codes were values.

    quantization: the quantization_config, of any type.  label: names the checkpoint.
    """
    table = quantization if isinstance(quantization, dict) else {}
    method = table.get("quant_method", quantization)
    if method == "mlx":
        return BadInputError(
            f"{label} is of MLX's format, with {shown(table.get('bits'))} bits in groups of "
            f"{shown(table.get('group_size'))}: ssdprof cannot load it.",
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
    """A language model's config for transformers, with its first `depth` decoder layers only, and
    without the keys of `_DROPPED`, such as the quantisation.

    depth: None: all layers.  dtype: the dtype in which weights are loaded, named as in torch; None:
    the one that the config names, if it does.
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
        # Some model definitions refuse null.  Without the key there is no limit, either.
        del config["time_step_limit"]
    return config


# --- the original format


def _convert_original(config: ModelConfig, where: str) -> ModelConfig:
    """The config of an original checkpoint, converted for transformers' Mamba2Config.

    Raises BadInputError for Mamba-1, for other layers, for options that transformers lacks, and for
    sizes that are missing or with which transformers' sizes cannot be computed.
    """
    ssm = config["ssm_cfg"]
    layer = ssm.get("layer", "Mamba1") if isinstance(ssm, dict) else None
    if layer != "Mamba2":
        kind = "Mamba-1" if layer == "Mamba1" else shown(layer)
        raise BadInputError(
            f"{where} describes {kind} layers; ssdprof reads Mamba-2.",
            "The Mamba-2 checkpoints of this format are state-spaces/mamba2-130m to mamba2-2.7b.",
        )
    for key, usual in _ORIGINAL_FIXED.items():
        if config.get(key) not in (None, usual):
            raise BadInputError(
                f"{where} has {key} = {shown(config[key])}, which transformers' mamba2 model does "
                "not support.",
                "Choose another checkpoint, such as state-spaces/mamba2-2.7b.",
            )
    for key in sorted(set(ssm) - {*_SSM_SIZES, *_SSM_OPTIONS, *_SSM_WITHOUT_EFFECT}):
        if key not in _SSM_FIXED or ssm[key] is not _SSM_FIXED[key]:
            raise BadInputError(
                f"{where} has {shown(key)} = {shown(ssm[key])} in ssm_cfg, which transformers' "
                "mamba2 lacks.",
                "ssdprof runs the model by transformers.  Choose a checkpoint without this option.",
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
