"""During capture, a model runs our operator: that of transformers would need too much memory for long prompts."""

from typing import Any

import pytest
import tiny_models
import torch

from ssdprof import kernels
from ssdprof.capture.layers import capture_layers
from ssdprof.capture.store import CapturedLayer
from ssdprof.checkpoint.meta import find_mixers


def captured_without_transformers_operator(
    name: str, model: Any, seqlen: int, monkeypatch: pytest.MonkeyPatch
) -> list[CapturedLayer]:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("transformers' own operator ran")

    site = find_mixers(model)[0]
    monkeypatch.setitem(site.namespace, site.function, forbidden)
    layers: list[CapturedLayer] = []
    capture_layers(
        model,
        tiny_models.prompt(seqlen),
        tiny_models.layer_refs(name),
        ref=tiny_models.checkpoint_ref(name),
        segment_length=None,
        on_layer=layers.append,
    )
    return layers


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_without_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = captured_without_transformers_operator(name, tiny_models.build(name).base_model, 70, monkeypatch)
    assert len(layers) == len(tiny_models.OPERATOR_LAYERS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", tiny_models.GDN)
def test_a_long_prompt_on_a_gpu_runs_on_the_fused_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: set[tuple[str, str]] = set()
    get = kernels.get

    def observed(operator: str, implementation: str) -> Any:
        ran.add((operator, implementation))
        return get(operator, implementation)

    monkeypatch.setattr(kernels, "get", observed)
    model = tiny_models.build(name, torch.bfloat16).base_model.cuda()
    layers = captured_without_transformers_operator(name, model, 32768, monkeypatch)
    assert len(layers) == len(tiny_models.OPERATOR_LAYERS[name])
    assert ran == {("gdn", "fused")}
