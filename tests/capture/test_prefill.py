"""A prompt in segments gives the same results as in one piece."""

from typing import Any

import pytest
import tiny_models
import torch

from ssdprof.capture.forward import lower_right_attention, prefill
from ssdprof.capture.intercept import intercept
from ssdprof.checkpoint.meta import find_mixers
from ssdprof.errors import BadInputError
from ssdprof.schema.serving import split_prompt

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
def test_split(seqlen: int, segment_length: int, segments: list[tuple[int, int]]) -> None:
    assert split_prompt(seqlen, segment_length) == segments


def run(model: Any, ids: torch.Tensor, segment_length: int) -> torch.Tensor:
    with intercept(find_mixers(model), lambda call: call.replacement()):
        return prefill(model, ids, segment_length)


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_the_last_segment_ends_as_the_whole_prompt_does(name: str) -> None:
    model = tiny_models.shared(name).base_model
    ids = tiny_models.prompt(90, batch=2)
    implementation = model.config._attn_implementation
    whole, last = run(model, ids, 90), run(model, ids, 40)
    assert last.shape[1] == 10
    assert float((whole[:, -10:] - last).abs().max() / whole.abs().max()) < FP32_ROUNDING
    assert model.config._attn_implementation == implementation


def test_attention_is_restored_after_ctrl_c() -> None:
    model = tiny_models.build("bamba").base_model
    before = model.config._attn_implementation

    def interrupt(*_: Any) -> None:
        assert model.config._attn_implementation != before
        raise KeyboardInterrupt

    model.layers[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        prefill(model, tiny_models.prompt(20), 8)
    assert model.config._attn_implementation == before


def test_attention_that_is_more_than_causal_is_refused() -> None:
    from transformers import AttentionInterface

    model = tiny_models.shared("bamba").base_model
    states = torch.randn(1, 4, 8, 16)
    with lower_right_attention(model):
        attend = AttentionInterface()[model.config._attn_implementation]
        with pytest.raises(BadInputError, match="Linear attends with sliding_window"):
            attend(torch.nn.Linear(1, 1), states, states, states, None, sliding_window=4)
