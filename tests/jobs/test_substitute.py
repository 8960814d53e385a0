"""An implementation in place of a model's operator: used in the given layers, and removed afterwards."""

from typing import Any

import pytest
import tiny_models
import torch

from ssdprof.capture.intercept import OperatorCall, Result, intercept
from ssdprof.checkpoint.meta import find_mixers
from ssdprof.core.base import EXACT_FP32
from ssdprof.errors import BadInputError
from ssdprof.jobs.substitute import by_layer, implemented

LENGTH = 40  # more than a chunk


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tiny_models.prompt(LENGTH), use_cache=False).logits


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5_text"])
@pytest.mark.parametrize("implementation", ["reference", "unfused", "fused"])
def test_an_implementation_computes_in_the_models_place(name: str, implementation: str) -> None:
    model = tiny_models.shared(name)
    sites = find_mixers(model)
    before = logits(model)
    with intercept(sites, implemented(implementation, EXACT_FP32, sites)) as count:
        ours = logits(model)
    assert count["calls"] == len(sites)
    assert not torch.equal(ours, before)  # sums in another order: our implementation ran
    assert float((ours - before).abs().max() / before.abs().max()) < 1e-4
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("name", ["granitemoehybrid", "olmo_hybrid"])
def test_only_the_named_layers_are_replaced(name: str) -> None:
    model = tiny_models.shared(name)
    sites = find_mixers(model)
    replaced, left = [], []

    def compute(call: OperatorCall) -> Result:
        replaced.append(call.mixer.layer_index)
        return call.run_original()

    def elsewhere(call: OperatorCall) -> Result:
        left.append(call.mixer.layer_index)
        return call.run_original()

    with intercept(sites, by_layer(sites, compute, layers={1}, elsewhere=elsewhere)):
        logits(model)
    assert replaced == [1]
    assert left == [site.layer_index for site in sites if site.layer_index != 1]


def test_elsewhere_the_model_computes_for_itself_unless_told_otherwise() -> None:
    model = tiny_models.shared("mamba2")
    before = logits(model)

    def zeros(call: OperatorCall) -> Result:
        out, final_state = call.run_original()
        return torch.zeros_like(out), final_state

    sites = find_mixers(model)
    with pytest.raises(BadInputError, match="no implementation 'fastest' of ssd"):
        implemented("fastest", EXACT_FP32, sites)
    with intercept(sites, by_layer(sites, zeros, layers=())):
        assert torch.equal(logits(model), before)
    with intercept(sites, by_layer(sites, zeros, layers=(2,))):
        assert not torch.equal(logits(model), before)
