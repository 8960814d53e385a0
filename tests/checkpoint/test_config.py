"""config.json -> layers and sizes, or a refusal with its reason; and the config of a cut model."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING

from ssdprof.capture.layers import gated_heads
from ssdprof.checkpoint.model import Model, open_model
from ssdprof.errors import BadInputError, ExitCode

Open = Callable[[dict[str, Any]], Model]

# Excerpts of published configs: the keys with the layers and their sizes.
GRANITE_H_SMALL = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 40,
    "hidden_size": 4096,
    "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 256,
    "mamba_expand": 2,
    "max_position_embeddings": 131072,
}
BAMBA = {
    "model_type": "bamba", "num_hidden_layers": 32, "hidden_size": 4096,
    "attn_layer_indices": [9, 18, 27], "mamba_n_heads": 128, "mamba_d_head": "auto",
    "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_chunk_size": 256, "mamba_expand": 2,
}  # fmt: skip
NANO_9B = {
    "model_type": "nemotron_h",
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "hidden_size": 4480,
    "mamba_num_heads": 128,
    "mamba_head_dim": 80,
    "ssm_state_size": 128,
    "n_groups": 8,
    "chunk_size": 128,
}
MAMBA2_2_7B = {
    "d_model": 2560,
    "d_intermediate": 0,
    "n_layer": 64,
    "vocab_size": 50277,
    "ssm_cfg": {"layer": "Mamba2"},
    "attn_layer_idx": [],
    "pad_vocab_size_multiple": 16,
    "tie_embeddings": True,
}
QWEN3_5 = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "vision_config": {"model_type": "qwen3_5", "depth": 27},
}


@pytest.fixture
def opened(tmp_path) -> Open:
    def write(config: dict[str, Any]) -> Model:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return open_model(str(tmp_path))

    return write


def refusal(opened: Open, config: dict[str, Any]) -> str:
    with pytest.raises(BadInputError) as caught:
        model = opened(config)
        model.sizes(model.layers[0])
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    assert caught.value.hint
    return f"{caught.value.message} {caught.value.hint}"


@tiny_models.every_model
def test_layers_and_sizes_are_those_of_the_model(opened: Open, name):
    model = tiny_models.shared(name)
    checkpoint = opened(model.config.to_dict())
    assert tuple(layer.index for layer in checkpoint.layers) == tiny_models.OPERATOR_LAYERS[name]
    assert checkpoint.layer_count == model.config.num_hidden_layers
    for layer in checkpoint.layers:
        sizes = checkpoint.sizes(layer)
        assert (
            gated_heads(model.get_submodule(layer.name))
            == sizes["nheads" if layer.operator == "ssd" else "value_heads"]
        )
        assert layer.operator == tiny_models.operator_of(name)


@pytest.mark.parametrize(
    ("config", "layers", "of", "words"),
    [
        (GRANITE_H_SMALL, 36, 40, "128x64, N 128, G 1, chunk 256"),
        (BAMBA, 29, 32, "128x64, N 128, G 1, chunk 256"),
        (NANO_9B, 27, 56, "128x80, N 128, G 8, chunk 128"),
        (MAMBA2_2_7B, 64, 64, "80x64, N 128, G 1, chunk 256"),
        (QWEN3_5, 48, 64, "16/48 heads, K 128, V 128"),
    ],
    ids=["granite-4.0-h-small", "Bamba-9B", "Nemotron-Nano-9B-v2", "mamba2-2.7b", "Qwen3.5-27B"],
)
def test_published_configs(opened: Open, config, layers, of, words):
    model = opened(config)
    # a known type needs no remote code
    assert model.ref.model_type in ("mamba2", config.get("model_type"))
    assert (len(model.layers), model.layer_count, model.size_words(model.layers[-1])) == (
        layers,
        of,
        words,
    )


def test_the_original_format_pads_its_vocabulary(opened: Open):
    config = opened(MAMBA2_2_7B).config
    assert config["vocab_size"] == 50288
    assert config["num_heads"] * config["head_dim"] == config["expand"] * config["hidden_size"]


def test_depth_keeps_what_the_model_definition_insists_on(opened: Open):
    assert opened(tiny_models.shared("olmo_hybrid").config.to_dict()).depth(0) == 4
    granite = opened(GRANITE_H_SMALL)
    assert granite.depth(0) == 1
    with pytest.raises(BadInputError, match="no layer 40"):
        granite.depth(40)


# --- larger models, and types that nobody listed


@pytest.mark.parametrize(
    ("outer", "key", "inner"),
    [
        ("qwen3_5", "text_config", "qwen3_5_text"),
        ("minicpmv4_6", "text_config", "qwen3_5_text"),
        ("minicpmv4_7", "text_config", "qwen3_5_moe_text"),
        ("minicpm_ocr", "text_config", "qwen3_5_text"),
        ("jev", "text_config", "qwen3_5_text"),
        ("nemotron_h_omni", "llm_config", "nemotron_h"),
        ("nemo_speechlm", "text_config", "nemotron_h"),
        ("unheard", "thinker_config", "qwen3_5_text"),
    ],
)
def test_the_language_model_of_a_larger_one(opened: Open, outer, key, inner):
    text = tiny_models.shared(inner).config.to_dict()
    tower = {"model_type": "vit", "num_hidden_layers": 2}
    config = {"model_type": outer, "vision_config": tower, key: text, "audio_config": tower}
    model = opened({"model_type": outer, "outer_config": config} if outer == "unheard" else config)
    assert tuple(layer.index for layer in model.layers) == tiny_models.OPERATOR_LAYERS[inner]
    assert model.layers[0].name.startswith("model.language_model.layers.0.")
    assert model.ref.model_type == outer


def test_a_type_of_transformers_outside_of_the_table(opened: Open):
    model = opened(CONFIG_MAPPING["lara_mini"](num_hidden_layers=3).to_dict())
    assert {layer.operator for layer in model.layers} == {"gdn"}


# --- refusals


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        *(({"model_type": name}, "Mamba-1") for name in ("mamba", "falcon_mamba", "jamba")),
        (
            {"model_type": "llama", "num_hidden_layers": 1},
            "layer: its layers are of LlamaAttention and LlamaMLP.",
        ),
        ({"model_type": "plamo2", "auto_map": {"AutoModel": "modeling.Model"}}, "no remote code"),
        ({"model_type": "plamo2"}, "transformers does not know"),
        ({"hidden_size": 64}, "no model_type"),
    ],
)
def test_other_types_are_refused_with_the_reason(opened: Open, config, reason):
    text = refusal(opened, config)
    assert reason in text
    assert "granitemoehybrid" in text  # the supported types


@pytest.mark.parametrize(
    "quantization",
    [
        *({"quant_method": method} for method in ("modelopt", "made_up", ["fp8"])),
        {"bits": 4},
        "int4",
    ],
)
def test_unknown_quantisation_is_refused(opened: Open, tmp_path, quantization):
    codes = torch.ones(8, dtype=torch.uint8)
    save_file({"model.layers.0.in_proj.weight": codes}, tmp_path / "model.safetensors")
    text = refusal(opened, {**GRANITE_H_SMALL, "quantization_config": quantization})
    assert "which ssdprof cannot load" in text
    assert "BF16" in text


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_known_quantisation_is_recorded(opened: Open, method):
    for config in (GRANITE_H_SMALL, QWEN3_5):
        assert (
            opened({**config, "quantization_config": {"quant_method": method}}).named_quantization
            == method
        )


STEPS: list[list[float]] = [[0.0, 1.0, 2.0], [0.0, 1e300], [0.0, -0.5], [math.nan, 1.0]]


@pytest.mark.parametrize(
    ("config", "change", "named"),
    [
        (
            GRANITE_H_SMALL,
            {"num_hidden_layers": 10**9},
            "num_hidden_layers of 1000000000; there may be 4096",
        ),
        *((GRANITE_H_SMALL, {"time_step_limit": limits}, "time_step_limit") for limits in STEPS),
        (GRANITE_H_SMALL, {"time_step_floor": 1e300}, "time_step_floor"),
        (
            GRANITE_H_SMALL,
            {"layer_types": ["mamba"] * 10**5, "num_hidden_layers": 40},
            "layer_types of 100000",
        ),
        (GRANITE_H_SMALL, {"num_local_experts": 10**9}, "num_local_experts"),
        (GRANITE_H_SMALL, {"num_hidden_layers": 41}, "layer_types"),
        (GRANITE_H_SMALL, {"mamba_d_state": 2**60}, "It accepts the config without mamba_d_state"),
        (GRANITE_H_SMALL, {"mamba_d_state": 128.0}, "mamba_d_state"),
        (GRANITE_H_SMALL, {"vocab_size": -1}, "It accepts the config without vocab_size = -1"),
        (GRANITE_H_SMALL, {"mamba_chunk_size": 0}, "has chunk_size = 0"),
        (GRANITE_H_SMALL, {"mamba_chunk_size": 10**9}, "has chunk_size = 1000000000"),
        (BAMBA, {"attn_layer_indices": "9"}, "attn_layer_indices"),
        (NANO_9B, {"hybrid_override_pattern": "MXM"}, "X"),
        (NANO_9B, {"hybrid_override_pattern": "M" * 10**6}, "hybrid_override_pattern"),
        (QWEN3_5, {"text_config": None}, "text_config"),
        (MAMBA2_2_7B, {"ssm_cfg": {}}, "Mamba-1"),
        (MAMBA2_2_7B, {"ssm_cfg": "Mamba2"}, "Mamba-2"),
        (MAMBA2_2_7B, {"attn_layer_idx": [9, 18]}, "attn_layer_idx"),
        (MAMBA2_2_7B, {"d_intermediate": 4096}, "d_intermediate"),
        (MAMBA2_2_7B, {"d_model": "wide"}, "no usable sizes"),
        (MAMBA2_2_7B, {"n_layer": 10**9}, "num_hidden_layers"),
    ],
)
def test_damaged_configs_are_refused_by_key(opened: Open, config, change, named):
    assert named in refusal(opened, {**config, **change})


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1, 2]", b'"granite"', b"\xff\xfe", b"[" * 100_000, b'{"a": 1e}']
)
def test_a_config_that_is_no_json_object_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(
        BadInputError, match=r"^config.json of .* (is not valid JSON|holds no JSON object)"
    ):
        open_model(str(tmp_path))


# --- the config of a cut model: reduced in every key that counts layers, without the parts that are
#   not loaded

NEMOTRON = {
    "model_type": "nemotron_h",
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
    "hybrid_override_pattern": "M-M*ME",
    "num_hidden_layers": 6,
    "num_nextn_predict_layers": 1,
    "time_step_limit": None,
}
BAMBA_6 = {**BAMBA, "num_hidden_layers": 6, "attn_layer_indices": [1, 3, 4]}
ZAMBA2 = {"model_type": "zamba2", "hybrid_layer_ids": [6, 12, 18]}
QWEN3_5_FP8 = {
    "model_type": "qwen3_5",
    "dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "text_config": {
        "num_hidden_layers": 8,
        "mlp_only_layers": [1, 5],
        "layer_types": ["linear_attention"] * 8,
    },
    "vision_config": {"depth": 27},
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            NEMOTRON,
            {
                "hybrid_override_pattern": "M-M",
                "num_hidden_layers": 3,
                "num_nextn_predict_layers": 0,
            },
        ),
        (BAMBA_6, {"attn_layer_indices": [1], "num_hidden_layers": 3}),
        (
            ZAMBA2,
            {
                "layers_block_type": ["linear_attention"] * 3,
                "hybrid_layer_ids": [],
                "num_hidden_layers": 3,
            },
        ),
        (
            QWEN3_5_FP8,
            {
                "layer_types": ["linear_attention"] * 3,
                "mlp_only_layers": [1],
                "model_type": "qwen3_5_text",
            },
        ),
    ],
    ids=["nemotron_h", "bamba", "zamba2", "qwen3_5"],
)
def test_every_key_that_counts_layers_is_cut(opened: Open, config, expected):
    cut = opened(config).cut_config(3)
    assert {key: cut[key] for key in expected} == expected
    assert opened(cut).layer_count == 3


def test_what_is_left_out_and_what_is_added(opened: Open, tmp_path):
    text = QWEN3_5_FP8["text_config"]
    assert "vision_config" not in opened(
        {**QWEN3_5_FP8, "text_config": {**text, "vision_config": {}}}
    ).cut_config(2)
    nemotron = opened(NEMOTRON).cut_config(2)
    assert "auto_map" not in nemotron
    assert "time_step_limit" not in nemotron  # no limit on dt is said by leaving it out
    codes = torch.ones(8, dtype=torch.uint8)
    save_file({"model.layers.0.in_proj.weight": codes}, tmp_path / "model.safetensors")
    config = opened(QWEN3_5_FP8).load_config(2, "bfloat16")
    assert config["quantization_config"] == {  # is decoded on every machine
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "dequantize": True,
    }
    assert config["dtype"] == "bfloat16"
