"""config.json -> layers and sizes, or a refusal with its reason.  No test here loads a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models

from ssdprof.checkpoint.describe import QUANT_METHODS, describe, read_config
from ssdprof.checkpoint.layer_dims import SSDLayerDims
from ssdprof.errors import BadInputError, ExitCode
from ssdprof.schema.sizes import GDNSizes

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
GRANITE_MICRO = {**GRANITE_H_SMALL, "hidden_size": 2560, "mamba_n_heads": 128, "layer_types": ["attention"] * 40}
BAMBA = {
    "model_type": "bamba",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "attn_layer_indices": [9, 18, 27],
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 256,
    "mamba_expand": 2,
}
NANO_9B = {
    "model_type": "nemotron_h",
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
    "hidden_size": 4480,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
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
    "attn_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
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


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(BadInputError) as caught:
        describe(config)
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    assert caught.value.hint
    return f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_layers_and_sizes_are_those_of_the_model(name: str) -> None:
    model = tiny_models.shared(name)
    found = describe(model.config.to_dict())
    assert tuple(layer.index for layer in found.layers) == tiny_models.OPERATOR_LAYERS[name]
    assert found.layer_count == model.config.num_hidden_layers
    for layer in found.layers:
        module = model.get_submodule(layer.name)
        heads = found.dims.nheads if isinstance(found.dims, SSDLayerDims) else found.dims.value_heads
        assert module.A_log.shape == (heads,)
        assert layer.operator == ("ssd" if name in tiny_models.SSD else "gdn")


@pytest.mark.parametrize(
    ("config", "layers", "of", "dims"),
    [
        (GRANITE_H_SMALL, 36, 40, SSDLayerDims(nheads=128, headdim=64, dstate=128, ngroups=1, chunk_size=256)),
        (BAMBA, 29, 32, SSDLayerDims(nheads=128, headdim=64, dstate=128, ngroups=1, chunk_size=256)),
        (NANO_9B, 27, 56, SSDLayerDims(nheads=128, headdim=80, dstate=128, ngroups=8, chunk_size=128)),
        (MAMBA2_2_7B, 64, 64, SSDLayerDims(nheads=80, headdim=64, dstate=128, ngroups=1, chunk_size=256)),
        (QWEN3_5, 48, 64, GDNSizes(key_heads=16, value_heads=48, key_dim=128, value_dim=128)),
    ],
    ids=["granite-4.0-h-small", "Bamba-9B", "Nemotron-Nano-9B-v2", "mamba2-2.7b", "Qwen3.5-27B"],
)
def test_published_configs(config: dict[str, Any], layers: int, of: int, dims: object) -> None:
    found = describe(config)
    assert (len(found.layers), found.layer_count, found.dims) == (layers, of, dims)


def test_a_vision_language_config_names_the_layers_of_the_whole_model() -> None:
    assert describe(QWEN3_5).layers[3].name == "model.language_model.layers.4.linear_attn"


def test_the_original_format_pads_its_vocabulary() -> None:
    config = describe(MAMBA2_2_7B).config
    assert config["vocab_size"] == 50288
    assert config["num_heads"] * config["head_dim"] == config["expand"] * config["hidden_size"]


def test_depth_keeps_what_the_model_definition_insists_on() -> None:
    assert describe(GRANITE_H_SMALL).depth(0) == 1
    assert describe(tiny_models.shared("olmo_hybrid").config.to_dict()).depth(0) == 4
    with pytest.raises(BadInputError, match="no layer 40"):
        describe(GRANITE_H_SMALL).depth(40)


# --- refusals


def test_sizes_in_a_config_without_such_layers_do_not_count() -> None:
    text = refusal(GRANITE_MICRO)
    assert "no SSD or gated-delta-rule layer" in text
    assert '"h"' in text


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("mamba", "Mamba-1"), ("falcon_mamba", "Mamba-1"), ("jamba", "Mamba-1"), ("kimi_linear", "Kimi Delta Attention")],
)
def test_other_scans_are_refused_by_name(model_type: str, reason: str) -> None:
    text = refusal({"model_type": model_type, "num_hidden_layers": 4})
    assert reason in text
    assert "granitemoehybrid" in text  # the supported types


def test_types_without_a_scan_and_remote_code_are_told_apart() -> None:
    assert "no layer that ssdprof measures" in refusal({"model_type": "llama"})
    assert "no remote code" in refusal({"model_type": "plamo2", "auto_map": {"AutoModel": "modeling.Model"}})
    assert "no model_type" in refusal({"hidden_size": 64})
    assert describe(NANO_9B).model_type == "nemotron_h"  # a known type needs no remote code


@pytest.mark.parametrize("quantization", [{"quant_method": "modelopt"}, {"bits": 4}, "int4", {"quant_method": ["fp8"]}])
def test_unknown_quantisation_is_refused(quantization: object) -> None:
    text = refusal({**GRANITE_H_SMALL, "quantization_config": quantization})
    assert "which ssdprof cannot load" in text
    assert "BF16" in text


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_known_quantisation_is_recorded(method: str) -> None:
    assert describe({**GRANITE_H_SMALL, "quantization_config": {"quant_method": method}}).quantization == method
    nested = {**QWEN3_5, "quantization_config": {"quant_method": method}}
    assert describe(nested).quantization == method


def test_every_accepted_quantisation_is_one_that_transformers_decodes() -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    assert QUANT_METHODS - {"bitsandbytes"} <= set(AUTO_QUANTIZATION_CONFIG_MAPPING)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 41}, "layer_types"),
        ({"layer_types": ["mamba"] * 10**5, "num_hidden_layers": 40}, "layer_types"),
        ({"layer_types": "mamba"}, "layer_types"),
        ({"layer_types": ["mamba"] * 39 + ["conv"]}, "conv"),
        ({"layer_types": ["mamba"] * 39 + [["mamba"]]}, "layer_types"),
        ({"mamba_n_heads": -128}, "mamba_n_heads"),
        ({"mamba_n_heads": 3}, "mamba_n_heads"),
        ({"mamba_n_groups": 3}, "mamba_n_groups"),
        ({"mamba_d_head": 63}, "mamba_d_head"),
        ({"mamba_d_state": 2**60}, "mamba_d_state"),
        ({"mamba_d_state": 128.0}, "mamba_d_state"),
        ({"mamba_d_state": True}, "mamba_d_state"),
        ({"mamba_d_state": {"__float__": "Infinity"}}, "mamba_d_state"),
        ({"mamba_chunk_size": 0}, "mamba_chunk_size"),
        ({"hidden_size": 10**15}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"vocab_size": float("inf")}, "vocab_size"),
        ({"intermediate_size": 10**12}, "intermediate_size"),
        ({"num_local_experts": 10**9}, "num_local_experts"),
    ],
)
def test_absurd_sizes_are_refused_by_key(change: dict[str, Any], named: str) -> None:
    assert named in refusal({**GRANITE_H_SMALL, **change})


@pytest.mark.parametrize(
    ("config", "change", "named"),
    [
        (BAMBA, {"attn_layer_indices": [32]}, "attn_layer_indices"),
        (BAMBA, {"attn_layer_indices": "9"}, "attn_layer_indices"),
        (NANO_9B, {"hybrid_override_pattern": "MXM"}, "'X'"),
        (NANO_9B, {"hybrid_override_pattern": "M" * 10**6}, "hybrid_override_pattern"),
        (NANO_9B, {"hybrid_override_pattern": None}, "hybrid_override_pattern"),
        (QWEN3_5, {"text_config": None}, "text_config"),
        (QWEN3_5, {"text_config": {**QWEN3_5["text_config"], "linear_num_value_heads": 17}}, "linear_num_value_heads"),
        (MAMBA2_2_7B, {"ssm_cfg": {}}, "Mamba-1"),
        (MAMBA2_2_7B, {"ssm_cfg": "Mamba2"}, "Mamba-2"),
        (MAMBA2_2_7B, {"ssm_cfg": {"layer": "Mamba2", "D_has_hdim": True}}, "D_has_hdim"),
        (MAMBA2_2_7B, {"attn_layer_idx": [9, 18]}, "attn_layer_idx"),
        (MAMBA2_2_7B, {"d_intermediate": 4096}, "d_intermediate"),
        (MAMBA2_2_7B, {"d_model": 10**9}, "d_model"),
        (MAMBA2_2_7B, {"n_layer": 10**9}, "n_layer"),
    ],
)
def test_configs_that_contradict_themselves_are_refused(
    config: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    assert named in refusal({**config, **change})


# --- reading the file


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b'"granite"', b"\xff\xfe", b"[" * 100_000, b'{"a": 1e}'])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(BadInputError, match=r"^the config "):
        read_config(file, "the config")


def test_infinity_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"time_step_limit": [0.0, Infinity]}')
    assert read_config(file, "the config")["time_step_limit"] == [0.0, float("inf")]
