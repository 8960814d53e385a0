"""A prompt in segments, through whole and cut models, and the logits and tokens after it."""

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor

from ssdprof.capture import forward
from ssdprof.capture.forward import (
    PromptRun,
    counting_cache,
    greedy,
    hidden_states,
    logits,
    prefill,
)
from ssdprof.capture.intercept import intercept
from ssdprof.checkpoint.load import fetch, load_model
from ssdprof.checkpoint.mixers import find_mixers
from ssdprof.checkpoint.model import open_model
from ssdprof.core.target import split_prompt
from ssdprof.errors import BadInputError

FP32_ROUNDING = 5e-5


@pytest.mark.parametrize(
    ("seqlen", "segment_length", "segments"),
    [
        (10, 16, [(0, 10)]),
        (10, 10, [(0, 10)]),
        (10, 4, [(0, 4), (4, 8), (8, 10)]),
        (9, 4, [(0, 4), (4, 9)]),  # no segment of one token
        (5, 4, [(0, 5)]),
        (1, 4, [(0, 1)]),
    ],
)
def test_split(seqlen: int, segment_length: int, segments: list[tuple[int, int]]):
    assert split_prompt(seqlen, segment_length) == segments


def run(model: Any, ids: Tensor, segment_length: int) -> Tensor:
    with intercept(find_mixers(model), lambda call: call.replacement()):
        return prefill(model, ids, segment_length)


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_the_last_segment_ends_as_the_whole_prompt_does(name: str):
    model = tiny_models.shared(name).base_model
    ids = tiny_models.prompt(90, batch=2)
    implementation = model.config._attn_implementation
    whole = run(model, ids, 90)
    last = run(model, ids, 40)
    assert last.shape[1] == 10
    assert float((whole[:, -10:] - last).abs().max() / whole.abs().max()) < FP32_ROUNDING
    assert model.config._attn_implementation == implementation


def test_attention_that_is_more_than_causal_is_refused():
    states = torch.randn(1, 4, 8, 16)
    with pytest.raises(BadInputError, match="Linear attends with sliding_window"):
        forward._attend(torch.nn.Linear(1, 1), states, states, states, None, sliding_window=4)


# --- models that were cut before their first attention layer


@pytest.mark.parametrize(
    "name", ["granitemoehybrid", "bamba", "nemotron_h", "zamba2", "qwen3_next"]
)
def test_segments_of_a_cut_model_equal_one_piece(name: str, tmp_path: Path):
    tiny_models.shared(name).save_pretrained(tmp_path)
    local = fetch(open_model(str(tmp_path)), deepest_layer=1)
    model = load_model(local, device="cpu")
    assert counting_cache(model, [0]) is not None
    ids = tiny_models.prompt(90)
    whole = prefill(model, ids, segment_length=90)
    segments = prefill(model, ids, segment_length=40)
    torch.testing.assert_close(segments, whole[:, 80:], rtol=FP32_ROUNDING, atol=FP32_ROUNDING)


def test_a_model_with_attention_makes_its_own_cache():
    assert counting_cache(tiny_models.shared("granitemoehybrid").base_model, [0]) is None
    assert counting_cache(tiny_models.shared("falcon_h1").base_model, [0]) is None


# --- hidden states and logits


LENGTH = 70


def hidden(model: Any, segment_length: int) -> Tensor:
    prompt = PromptRun(model.base_model, tiny_models.prompt(LENGTH), segment_length, "tiny")
    return hidden_states(
        prompt, lambda call: call.replacement() if segment_length < LENGTH else call.run_original()
    )


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_logits_of_blocks_are_those_of_the_whole_model(name: str):
    model = tiny_models.shared(name)
    if name == "granitemoehybrid":
        assert model.config.logits_scaling == 1.0
    with torch.no_grad():
        whole = model(tiny_models.prompt(LENGTH), use_cache=False).logits
    states = hidden(model, LENGTH)
    blocks = torch.cat([logits(model, block) for block in states.split(32, dim=1)], dim=1)
    torch.testing.assert_close(blocks, whole, rtol=1e-5, atol=1e-5)
    assert "forward" not in vars(model.base_model)
    with torch.no_grad():
        assert torch.equal(model(tiny_models.prompt(LENGTH), use_cache=False).logits, whole)


def test_scaled_logits_are_scaled():
    scaled = tiny_models.build("granitemoehybrid")
    scaled.config.logits_scaling = 6.0
    states = hidden(scaled, LENGTH)
    plain = tiny_models.shared("granitemoehybrid")
    shapes = []
    scaled.register_forward_pre_hook(
        lambda *call: shapes.append(call[2]["input_ids"].shape), with_kwargs=True
    )
    torch.testing.assert_close(6 * logits(scaled, states), logits(plain, states))
    assert shapes == [(1, LENGTH)]


@pytest.mark.parametrize("name", tiny_models.MODELS)
@pytest.mark.parametrize("segment_length", [40, 32])
def test_greedy_tokens_are_the_most_likely_ones(name: str, segment_length: int):
    model = tiny_models.shared(name)
    ids = tiny_models.prompt(40)
    tokens = greedy(model, ids, 4, segment_length)
    text = torch.cat([ids, torch.tensor([tokens])], dim=1)
    with torch.no_grad():
        scores = model(text, use_cache=False).logits[0, 39:-1]
    margins = scores.max(-1).values - scores.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert float(margins.max()) < 1e-4
