"""Logits from kept hidden states, and greedy tokens, equal those of the whole model."""

from typing import Any

import pytest
import tiny_models
import torch

from ssdprof.capture.forward import PromptRun, greedy, hidden_states, logits
from ssdprof.checkpoint.meta import find_mixers

LENGTH = 70


def hidden(model: Any, segment_length: int) -> torch.Tensor:
    prompt = PromptRun(model.base_model, tiny_models.prompt(LENGTH), segment_length, find_mixers(model), "tiny")
    return hidden_states(prompt, lambda call: call.replacement() if segment_length < LENGTH else call.run_original())


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_logits_of_blocks_are_those_of_the_whole_model(name: str) -> None:
    model = tiny_models.shared(name)
    if name == "granitemoehybrid":
        assert model.config.logits_scaling == 1.0
    with torch.no_grad():
        whole = model(tiny_models.prompt(LENGTH), use_cache=False).logits
    found = hidden(model, LENGTH)
    blocks = torch.cat([logits(model, block) for block in found.split(32, dim=1)], dim=1)
    torch.testing.assert_close(blocks, whole, rtol=1e-5, atol=1e-5)
    assert "forward" not in vars(model.base_model)
    with torch.no_grad():
        assert torch.equal(model(tiny_models.prompt(LENGTH), use_cache=False).logits, whole)


def test_scaled_logits_are_scaled() -> None:
    scaled = tiny_models.build("granitemoehybrid")
    scaled.config.logits_scaling = 6.0
    found = hidden(scaled, LENGTH)
    plain = tiny_models.shared("granitemoehybrid")
    torch.testing.assert_close(6 * logits(scaled, found), logits(plain, found))


@pytest.mark.parametrize("name", ["mamba2", "granitemoehybrid", "qwen3_next"])
def test_segments_end_at_the_same_hidden_states(name: str) -> None:
    model = tiny_models.shared(name)
    whole, pieces = hidden(model, LENGTH), hidden(model, 32)
    torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", tiny_models.MODELS)
@pytest.mark.parametrize("segment_length", [40, 32])
def test_greedy_tokens_are_the_most_likely_ones(name: str, segment_length: int) -> None:
    model: Any = tiny_models.shared(name)
    ids = tiny_models.prompt(40)
    tokens = greedy(model, ids, 4, segment_length)
    text = torch.cat([ids, torch.tensor([tokens])], dim=1)
    with torch.no_grad():
        found = model(text, use_cache=False).logits[0, 39:-1]
    margins = found.max(-1).values - found.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert float(margins.max()) < 1e-4
