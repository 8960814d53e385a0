"""The config of a cut model: reduced in every key that counts layers, and without the parts that are not loaded."""

from __future__ import annotations

from typing import Any

import pytest

from ssdprof.checkpoint.describe import describe
from ssdprof.checkpoint.view import cut_config

NEMOTRON = {
    "model_type": "nemotron_h",
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
    "hybrid_override_pattern": "M-M*ME",
    "num_hidden_layers": 6,
    "num_nextn_predict_layers": 1,
    "time_step_limit": None,
}
BAMBA = {
    "model_type": "bamba",
    "num_hidden_layers": 6,
    "attn_layer_indices": [1, 4],
    "hidden_size": 64,
    "mamba_n_heads": 8,
}
ZAMBA2: dict[str, Any] = {"model_type": "zamba2", "hidden_size": 64, "hybrid_layer_ids": [6, 12, 18]}
QWEN3_5 = {
    "model_type": "qwen3_5",
    "dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "text_config": {"num_hidden_layers": 8, "mlp_only_layers": [1, 5], "layer_types": ["linear_attention"] * 8},
    "vision_config": {"depth": 27},
}


def cut(config: dict[str, Any], depth: int) -> dict[str, Any]:
    return cut_config(describe(config), depth)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (NEMOTRON, {"hybrid_override_pattern": "M-M", "num_hidden_layers": 3, "num_nextn_predict_layers": 0}),
        (BAMBA, {"attn_layer_indices": [1], "num_hidden_layers": 3}),
        (ZAMBA2, {"layers_block_type": ["linear_attention"] * 3, "hybrid_layer_ids": [], "num_hidden_layers": 3}),
        (QWEN3_5, {"layer_types": ["linear_attention"] * 3, "mlp_only_layers": [1], "model_type": "qwen3_5_text"}),
    ],
    ids=["nemotron_h", "bamba", "zamba2", "qwen3_5"],
)
def test_every_key_that_counts_layers_is_cut(config: dict[str, Any], expected: dict[str, Any]) -> None:
    found = cut(config, 3)
    assert {key: found[key] for key in expected} == expected
    again = describe(found)
    assert again.layer_count == 3
    assert again.layers[0].operator == describe(config).layers[0].operator


def test_remote_code_and_towers_are_left_out() -> None:
    assert "auto_map" not in cut(NEMOTRON, 2)
    assert "vision_config" not in cut({**QWEN3_5, "text_config": {**QWEN3_5["text_config"], "vision_config": {}}}, 2)


def test_no_limit_on_dt_is_said_by_leaving_it_out() -> None:
    assert "time_step_limit" not in cut(NEMOTRON, 2)


def test_fp8_weights_are_to_be_decoded_on_every_machine() -> None:
    found = cut(QWEN3_5, 2)
    assert found["quantization_config"] == {"quant_method": "fp8", "weight_block_size": [128, 128], "dequantize": True}
    assert found["dtype"] == "bfloat16"
    assert "dequantize" not in QWEN3_5["quantization_config"]
