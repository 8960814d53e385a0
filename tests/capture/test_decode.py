"""Decode steps: the model generates, and the inputs of its steps are captured."""

from collections import defaultdict
from typing import Any

import pytest
import tiny_models
import torch
from capture.exact import FP32_ROUNDING, capture, difference, oracle
from torch import Tensor

from ssdprof import operators
from ssdprof.capture.forward import cache_name
from ssdprof.capture.intercept import intercept
from ssdprof.capture.layers import token_major
from ssdprof.checkpoint.mixers import find_mixers
from ssdprof.core.target import Serving
from ssdprof.errors import BadInputError
from ssdprof.operators.ssd import bind_step

LENGTH = 40
STEPS = 2


def greedy(model: Any, ids: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Greedy generation of a causal language model: tokens (b, steps), and the last step's
    logits.
    """
    cache = {}
    tokens = []
    new = ids
    with torch.no_grad():
        for _ in range(steps + 1):
            output = model(new, use_cache=True, **cache)
            name = cache_name(model)
            cache = {name: output[name]}
            new = output.logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(new)
    return torch.cat(tokens[:steps], 1), output.logits


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_the_captured_inputs_give_what_the_model_computed_and_no_bit_is_changed(name: str):
    model = tiny_models.shared(name)
    sites = find_mixers(model)
    ids = tiny_models.prompt(LENGTH, batch=2)
    tokens, logits = greedy(model, ids, STEPS)
    namespace = sites[0].namespace
    step = operators.get(sites[0].operator).binding.step
    original = namespace[step]
    computed = []
    seen = []

    def recording(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        computed.append(result[0] if isinstance(result, tuple) else result)
        return result

    namespace[step] = recording
    try:
        with intercept(
            sites,
            lambda call: call.run_original(),
            lambda call: seen.append(token_major(call.inputs)),
        ) as n:
            again, observed = greedy(model, ids, STEPS)
    finally:
        namespace[step] = original
    assert torch.equal(again, tokens)
    assert torch.equal(observed, logits)
    assert (n["calls"], n["steps"]) == (len(sites), STEPS * len(sites)) == (len(sites), len(seen))
    for inputs, out in zip(seen, computed, strict=True):
        expected = oracle(inputs)[0]
        assert expected.shape[:2] == (2, 1)
        assert difference(out.reshape(expected.shape), expected) < FP32_ROUNDING


@pytest.mark.parametrize("segment_length", [LENGTH, 16])
@pytest.mark.parametrize("name", ["mamba2", "nemotron_h", "qwen3_next", "olmo_hybrid"])
def test_steps_go_on_where_the_prompt_ended(name: str, segment_length: int):
    """The first step's initial state is the final state of the prompt's inputs, and so on from step
    to step.
    """
    layers = defaultdict(list)
    for captured in capture(
        name, tiny_models.prompt(LENGTH, batch=2), Serving(decode=STEPS), segment_length
    )[0]:
        layers[captured.layer].append(captured)
    assert len(layers) == len(tiny_models.OPERATOR_LAYERS[name])
    for calls in layers.values():
        prompt, *steps = sorted(calls, key=lambda captured: captured.call is not None)
        assert prompt.call is None
        state = oracle(prompt.inputs)[1]
        for number, step in enumerate(steps, 1):
            assert step.call
            assert (step.call.kind, step.call.number, step.call.count) == ("decode", number, STEPS)
            assert difference(step.inputs.initial, state) < FP32_ROUNDING
            state = oracle(step.inputs)[1]


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_the_tokens_are_those_that_the_model_would_generate(name: str):
    """The model's operators and ours round differently; the tiny models' margins are larger than
    the difference.
    """
    model = tiny_models.shared(name)
    ids = tiny_models.prompt(LENGTH)
    tokens, _ = greedy(model, ids, 4)
    fed = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: fed.append(args[0].clone())
    )
    try:
        capture(name, ids, Serving(decode=4))
    finally:
        hook.remove()
    assert torch.equal(torch.cat(fed[-4:], 1), tokens)


def test_a_prompt_of_one_token_is_no_step():
    captured, _ = capture("mamba2", tiny_models.prompt(1), Serving(decode=1))
    assert [layer.call.kind if layer.call else "prompt" for layer in captured] == ["prompt"] * 3 + [
        "decode"
    ] * 3


def test_a_model_that_decodes_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch):
    site = find_mixers(tiny_models.shared("mamba2"))[0]

    forward = type(site.module).forward

    def bypassing(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if hidden_states.shape[1] == 1:
            return hidden_states
        result: Tensor = forward(self, hidden_states, *args, **kwargs)
        return result

    # sites are found by the bytecode of what is wrapped
    bypassing.__wrapped__ = forward  # type: ignore[attr-defined]
    monkeypatch.setattr(type(site.module), "forward", bypassing)
    with pytest.raises(
        BadInputError, match="computed 0 steps where 3 layers and 2 generated tokens make 6"
    ):
        capture("mamba2", tiny_models.prompt(LENGTH), Serving(decode=STEPS))


def test_what_differs_within_a_head_is_no_step_of_this_operator():
    b, h, p, n = 2, 4, 8, 16
    dt = torch.rand(b, h, 1).expand(-1, -1, p)
    A = -torch.rand(h)[:, None, None].expand(-1, p, n)
    state = torch.randn(b, h, p, n)
    x = torch.randn(b, h, p)
    B = torch.randn(b, 1, n)
    mixer = torch.nn.Module()
    inputs = bind_step(mixer, state, x, dt, A, B, B)[0]
    assert (inputs.x.shape, inputs.dt.shape, inputs.A.shape) == ((b, 1, h, p), (b, 1, h), (h,))
    with pytest.raises(ValueError, match="dt differs between the channels of a head"):
        bind_step(mixer, state, x, torch.rand(b, h, p), A, B, B)
    with pytest.raises(ValueError, match="A differs between the channels"):
        bind_step(mixer, state, x, dt, -torch.rand(h, p, n), B, B)
