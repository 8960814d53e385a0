"""With a cached state, models compute a single token with another function than their operator."""

import copy

import pytest
import tiny_models
import torch

from ssdprof import operators
from ssdprof.capture.forward import cache_name
from ssdprof.capture.intercept import intercept
from ssdprof.capture.layers import capture_layers
from ssdprof.checkpoint.meta import find_mixers
from ssdprof.errors import BadInputError

LENGTH = 40


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_it_is_counted_and_left_to_the_model(name: str) -> None:
    model = tiny_models.shared(name)
    sites = find_mixers(model)
    step = sites[0].namespace[operators.get(sites[0].operator).door.step]
    ids = tiny_models.prompt(LENGTH + 1)
    with torch.no_grad():
        cached = model(ids[:, :-1], use_cache=True)
        key = cache_name(model)
        alone = model(ids[:, -1:], use_cache=True, **{key: copy.deepcopy(cached[key])}).logits
        with intercept(sites, lambda call: call.replacement()) as count:
            observed = model(ids[:, -1:], use_cache=True, **{key: cached[key]}).logits
    assert (count.calls, count.steps) == (0, len(sites))
    assert torch.equal(observed, alone)
    assert sites[0].namespace[operators.get(sites[0].operator).door.step] is step


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_a_prompt_in_segments_of_one_token_is_refused(name: str) -> None:
    with pytest.raises(BadInputError, match=r"With segments of 1 this \w+ model got single tokens") as raised:
        capture_layers(
            tiny_models.shared(name).base_model,
            tiny_models.prompt(6),
            tiny_models.layer_refs(name),
            ref=tiny_models.checkpoint_ref(name),
            segment_length=1,
            on_layer=lambda _: None,
        )
    assert "--segment 2" in raised.value.hint
