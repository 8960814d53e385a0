"""Mixers that repeat query and key heads before the call, as in transformers up to 5.22."""

import inspect
import textwrap
from typing import Any

import pytest
import tiny_models
import torch

from ssdprof.capture.intercept import OperatorCall, Result, intercept
from ssdprof.capture.layers import capture_layers
from ssdprof.capture.store import CapturedLayer
from ssdprof.checkpoint.meta import find_mixers
from ssdprof.schema import Serving

LENGTH = 40
REPEAT = """
        query, key = (x.repeat_interleave(self.num_v_heads // self.num_k_heads, dim=2) for x in (query, key))
"""
BEFORE = "        beta = b.sigmoid()\n"


def repeating(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny model whose mixers repeat heads: transformers' forward with the line from older versions."""
    model = tiny_models.build(name)
    mixer = type(find_mixers(model)[0].module)
    forward = inspect.unwrap(mixer.forward)
    source = inspect.getsource(forward)
    assert source.count(BEFORE) == 1
    lines = source.replace(BEFORE, REPEAT + BEFORE).splitlines(keepends=True)
    start = next(number for number, line in enumerate(lines) if line.lstrip().startswith("def "))
    scope: dict[str, Any] = {}
    exec(textwrap.dedent("".join(lines[start:])), forward.__globals__, scope)
    monkeypatch.setattr(mixer, "forward", scope["forward"])
    return model


def captured(name: str, model: Any, segment_length: int = LENGTH, decode: int = 0) -> list[CapturedLayer]:
    found: list[CapturedLayer] = []
    capture_layers(
        model.base_model,
        tiny_models.prompt(LENGTH),
        tiny_models.layer_refs(name),
        ref=tiny_models.checkpoint_ref(name),
        segment_length=segment_length,
        on_layer=found.append,
        serving=Serving(decode=decode),
        head=lambda hidden: hidden @ model.get_output_embeddings().weight.T,
    )
    return found


@pytest.mark.parametrize("segment_length", [LENGTH, 16])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_repeated_heads_are_taken_once_and_said(
    name: str, segment_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = captured(name, tiny_models.build(name))
    repeated = captured(name, repeating(name, monkeypatch), segment_length)
    for one, other in zip(plain, repeated, strict=True):
        assert one.inputs.q.shape[2] == other.inputs.q.shape[2] == 2
        assert one.inputs.v.shape[2] == other.inputs.v.shape[2] == 4
        for tensor in ("q", "k", "v", "g", "beta"):
            torch.testing.assert_close(getattr(one.inputs, tensor), getattr(other.inputs, tensor), rtol=1e-4, atol=1e-5)
        assert other.model_strides["q"][2] == 2 * 16
        assert one.remark == ""
        assert "repeats each query and key head 2 times" in other.remark


def test_repeated_heads_of_a_decode_step_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = captured("qwen3_next", repeating("qwen3_next", monkeypatch), decode=1)
    steps = [one for one in found if one.call]
    assert len(steps) == 3
    for one in steps:
        assert (one.inputs.q.shape, one.inputs.v.shape) == ((1, 1, 2, 16), (1, 1, 4, 16))
        assert one.inputs.initial_state.shape == (1, 4, 16, 16)
        assert "repeats each query and key head 2 times" in one.remark


def test_a_repeating_model_runs_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    model = repeating("qwen3_next", monkeypatch)
    ids = tiny_models.prompt(LENGTH)
    seen: list[tuple[int, ...]] = []

    def observe(call: OperatorCall) -> Result:
        seen.append(tuple(call.inputs.q.shape))
        return call.run_original()

    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        with intercept(find_mixers(model), observe):
            during = model(ids, use_cache=False).logits
    assert torch.equal(before, during)
    assert seen == [(1, LENGTH, 2, 16)] * 3


def test_equal_heads_that_the_model_made_itself_are_kept() -> None:
    """The mixer's number of key heads decides, never equal values: Olmo-Hybrid repeats no heads."""
    model = tiny_models.build("olmo_hybrid")
    with torch.no_grad():
        for site in find_mixers(model):
            for projection in (site.module.q_proj, site.module.k_proj):  # all heads of q are equal, and all heads of k
                heads = projection.weight.view(4, -1, projection.weight.shape[1])
                heads[:] = heads[:1].clone()
            width = site.module.key_dim
            kernel = site.module.conv1d.weight
            for start in (0, width):
                heads = kernel[start : start + width].view(4, -1, 1, 4)
                heads[:] = heads[:1].clone()
    for layer in captured("olmo_hybrid", model):
        assert layer.inputs.k.shape[2] == 4
        assert torch.equal(layer.inputs.k[:, :, 0], layer.inputs.k[:, :, 3])
        assert layer.remark == ""
