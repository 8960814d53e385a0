"""Interception of operator calls, in every family: it sees the operator's inputs and does not change the model."""

from typing import Any

import pytest
import tiny_models
import torch
from capture.exact import FP32_ROUNDING, difference, oracle

from ssdprof.capture.forward import cache_name
from ssdprof.capture.intercept import OperatorCall, Result, intercept
from ssdprof.checkpoint.meta import find_mixers
from ssdprof.errors import BadInputError

LENGTH = 70  # two chunks and a part of one


def logits(model: Any, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tiny_models.prompt(LENGTH), use_cache=False, **kwargs).logits


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_observing_changes_no_bit_and_sees_what_the_operator_computes_from(name: str) -> None:
    model = tiny_models.shared(name)
    before = logits(model)
    sites = find_mixers(model)
    seen = []

    def observe(call: OperatorCall) -> Result:
        out, final_state = call.run_original()
        seen.append(call.mixer)
        assert difference(out, oracle(call.inputs)[0]) < FP32_ROUNDING
        assert final_state is None
        return out, final_state

    with intercept(sites, observe) as count:
        during = logits(model)
    assert torch.equal(before, during)
    assert seen == list(sites)
    assert count.calls == len(sites)
    assert torch.equal(before, logits(model))


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_on_our_operator_logits_are_the_same_to_rounding(name: str) -> None:
    model = tiny_models.shared(name)
    with intercept(find_mixers(model), lambda call: call.replacement()) as count:
        ours = logits(model)
    assert count.calls == len(tiny_models.OPERATOR_LAYERS[name])
    assert difference(ours, logits(model)) < FP32_ROUNDING


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_final_states_go_where_the_model_asks_for_them(name: str) -> None:
    model = tiny_models.shared(name)
    ids = tiny_models.prompt(LENGTH)
    returned = []

    def handler(call: OperatorCall) -> Result:
        assert call.wants_final_state
        out, final_state = call.replacement()
        returned.append(final_state)
        return out, final_state

    with torch.no_grad(), intercept(find_mixers(model), handler):
        output = model(ids, use_cache=True)
    cache = output[cache_name(model)]
    for site, final_state in zip(find_mixers(model), returned, strict=True):
        assert torch.equal(cache.layers[site.layer_index].recurrent_states[0], final_state)


@pytest.mark.parametrize("name", ["bamba", "olmo_hybrid"])
def test_our_handler_runs_whatever_was_bound_at_import(name: str) -> None:
    """With hub kernels installed, the global is a module of another package, which must not be called."""
    model = tiny_models.build(name)
    site = find_mixers(model)[0]

    class HubKernel(torch.nn.Module):
        def forward(self, *_: Any, **__: Any) -> None:
            raise AssertionError("the hub's kernel ran")

    fallback, kernel = site.namespace[site.function], HubKernel()
    site.namespace[site.function] = kernel
    try:
        with intercept(find_mixers(model), lambda call: call.replacement()):
            ours = logits(model)
        assert site.namespace[site.function] is kernel
    finally:
        site.namespace[site.function] = fallback
    assert difference(ours, logits(model)) < FP32_ROUNDING


def test_a_call_from_an_unknown_mixer_is_an_error() -> None:
    model = tiny_models.shared("mamba2")
    with (
        pytest.raises(BadInputError, match="mamba2_chunk_scan was called outside the mixers"),
        intercept(find_mixers(model)[:1], lambda call: call.replacement()),
    ):
        logits(model)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_everything_is_restored_after_an_error(error: type[BaseException]) -> None:
    model = tiny_models.build("zamba2")
    sites = find_mixers(model)
    before, original = logits(model), sites[0].namespace[sites[0].function]

    def fail(call: OperatorCall) -> Result:
        if call.mixer is sites[2]:
            raise error("stop")
        return call.replacement()

    with pytest.raises(error, match="stop"), intercept(sites, fail):
        logits(model)
    assert sites[0].namespace[sites[0].function] is original
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert torch.equal(logits(model), before)
