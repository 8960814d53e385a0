"""Segments through models that were cut before their first attention layer."""

from pathlib import Path

import pytest
import tiny_models
import torch

from ssdprof.capture.forward import counting_cache, prefill
from ssdprof.checkpoint.load import fetch, load_model
from ssdprof.checkpoint.model import open_model

FP32_ROUNDING = 5e-5


@pytest.mark.parametrize("name", ["granitemoehybrid", "bamba", "nemotron_h", "zamba2", "qwen3_next"])
def test_segments_of_a_cut_model_equal_one_piece(name: str, tmp_path: Path) -> None:
    tiny_models.shared(name).save_pretrained(tmp_path)
    local = fetch(open_model(str(tmp_path)), deepest_layer=1)
    model = load_model(local, device="cpu")
    assert counting_cache(model, [0]) is not None
    ids = tiny_models.prompt(90)
    whole = prefill(model, ids, segment_length=90)
    segments = prefill(model, ids, segment_length=40)
    torch.testing.assert_close(segments, whole[:, 80:], rtol=FP32_ROUNDING, atol=FP32_ROUNDING)


def test_a_model_with_attention_makes_its_own_cache() -> None:
    assert counting_cache(tiny_models.shared("granitemoehybrid").base_model, [0]) is None
    assert counting_cache(tiny_models.shared("falcon_h1").base_model, [0]) is None
