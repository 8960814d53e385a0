"""The model without weights: its mixers, and a place for each part of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from accelerate import dispatch_model
from accelerate.utils import send_to_device
from torch import nn

from ssdprof.capture.forward import PromptRun, cache_name, logits
from ssdprof.capture.layers import CapturedLayer, capture_layers
from ssdprof.checkpoint.devices import DeviceMap, infer, largest_streamed, weights_by_device
from ssdprof.checkpoint.load import fetch, load_model
from ssdprof.checkpoint.mixers import find_mixers
from ssdprof.checkpoint.model import Model, open_model
from ssdprof.core.target import LayerRef, Serving
from ssdprof.errors import BadInputError

# --- mixers


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_every_mixer_is_found(name: str) -> None:
    for model in (tiny_models.shared(name), tiny_models.shared(name).base_model):
        sites = find_mixers(model)
        assert tuple(site.layer_index for site in sites) == tiny_models.OPERATOR_LAYERS[name]
        assert {site.operator for site in sites} == {tiny_models.operator_of(name)}
        assert all(model.get_submodule(site.name) is site.module for site in sites)


def test_mixers_that_no_capture_can_name_are_refused() -> None:
    first, second, _ = (one.module for one in find_mixers(tiny_models.shared("mamba2")))
    layer = nn.ModuleDict({"first": first, "second": second})
    for model, words in (
        (
            nn.Linear(2, 2),
            "Linear has no SSD or gated-delta-rule layer: its layers are of nothing with weights",
        ),
        (nn.ModuleDict({"lonely": first}), "'lonely' is in no numbered decoder layer"),
        (nn.ModuleDict({"layers": nn.ModuleList([layer])}), "Decoder layer 0 has two mixers"),
    ):
        with pytest.raises(BadInputError, match=words):
            find_mixers(model)


def test_a_layer_of_another_operator_is_refused() -> None:
    sites = find_mixers(tiny_models.shared("granitemoehybrid"))
    attention = LayerRef(index=2, name="model.layers.2.mamba", operator="ssd")
    with pytest.raises(
        BadInputError, match=r"2 of this granitemoehybrid model has no operator, not ssd; .*0, 1"
    ):
        PromptRun(None, None, 1, sites, "granitemoehybrid", (attention,)).wanted  # noqa: B018
    gdn = LayerRef(index=1, name="model.layers.1.linear_attn", operator="gdn")
    with pytest.raises(BadInputError, match=r"Layer 1 .* has ssd, not gdn"):
        PromptRun(None, None, 1, sites, "granitemoehybrid", (gdn,)).wanted  # noqa: B018


# --- places: the place of each weight, and the same bits in the model's output


Saved = Callable[[str], Path]
CPU = torch.device("cpu")
MIXTURES = ("granitemoehybrid", "qwen3_next", "nemotron_h")


def captured(
    model: Any, name: str, segment_length: int, **options: Any
) -> list[tuple[str, dict[str, torch.Tensor]]]:
    found: list[tuple[str, dict[str, torch.Tensor]]] = []

    def keep(layer: CapturedLayer) -> None:
        found.append((f"{layer.layer.index} {layer.call}", layer.inputs.tensors))

    capture_layers(
        model.base_model,
        tiny_models.prompt(70),
        tiny_models.layer_refs(name),
        ref=tiny_models.checkpoint_ref(name),
        segment_length=segment_length,
        on_layer=keep,
        **options,
    )
    return found


def check_same(found: list[tuple[str, dict[str, torch.Tensor]]], expected: list[Any]) -> None:
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (_, mine), (_, theirs) in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def some_room(located: Model) -> tuple[Any, DeviceMap]:
    """The model on the meta device, and a map with room for the embedding, two layers, and one
    streamed layer.
    """
    model = located.cut_on_meta()
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in model.layers]
    room = model.get_input_embeddings().weight.nbytes + sum(sizes[:2]) + max(sizes)
    mapped = infer(model, {"cpu": room, "disk": 0})
    assert mapped is not None
    return model, mapped


@pytest.mark.parametrize("segment_length", [70, 32])
@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_captures_of_a_model_on_the_disk_are_those_of_one_in_memory(
    saved: Saved, name: str, segment_length: int
) -> None:
    located = open_model(str(saved(name)))
    local = fetch(located)
    _, mapped = some_room(located)
    whole = load_model(local, device="cpu")
    streamed = load_model(local, device="cpu", device_map=mapped)
    assert any(parameter.is_meta for parameter in streamed.parameters())
    check_same(captured(streamed, name, segment_length), captured(whole, name, segment_length))
    assert any(parameter.is_meta for parameter in streamed.parameters())


@pytest.mark.parametrize("name", ["mamba2", *MIXTURES])
def test_captures_of_a_model_in_main_memory_are_those_of_one_on_the_device(
    saved: Saved, name: str
) -> None:
    """As with a GPU: the layers' weights are in main memory and move to the computing device, here
    the CPU.
    """
    local = fetch(open_model(str(saved(name))), head=True)
    whole, offloaded = (load_model(local, device="cpu") for _ in range(2))
    base = offloaded.base_model_prefix
    places = {
        f"{base}.{child}": CPU
        for child, _ in offloaded.base_model.named_children()
        if child != "layers"
    }
    places |= {child: CPU for child, _ in offloaded.named_children() if child != base}
    places |= {f"{base}.layers.{index}": "cpu" for index in range(local.depth)}
    dispatch_model(
        offloaded, places, main_device=CPU, skip_keys=offloaded._skip_keys_device_placement
    )
    assert any(parameter.is_meta for parameter in offloaded.parameters())
    found, expected = (
        captured(
            model,
            name,
            70,
            serving=Serving(decode=2),
            head=lambda hidden, model=model: logits(model, hidden),
        )
        for model in (offloaded, whole)
    )
    assert len(found) == 3 * len(tiny_models.layer_refs(name))
    check_same(found, expected)


@pytest.mark.parametrize("name", ["mamba2", "granitemoehybrid", "qwen3_next"])
def test_hooks_leave_a_cache_where_its_layers_are(name: str) -> None:
    """For every name of the argument, which differs between models and versions of transformers."""
    model = tiny_models.shared(name).base_model
    with torch.no_grad():
        cache = model(tiny_models.prompt(8), use_cache=True)[cache_name(model)]
    assert cache is not None
    sent = send_to_device(
        ({"another_name": cache, "hidden": torch.ones(1)}, cache), torch.device("meta")
    )
    assert sent[0]["hidden"].is_meta
    assert sent[0]["another_name"] is sent[1] is cache


def test_what_lies_where(saved: Saved) -> None:
    located = open_model(str(saved("granitemoehybrid")))
    model, mapped = some_room(located)
    found = weights_by_device(model, mapped)
    assert {place: held.layers for place, held in found.items()} == {"cpu": 2, "disk": 2}
    assert sum(held.bytes for held in found.values()) == located.weight_bytes()
    layer, module = largest_streamed(model, mapped, "cpu")
    assert layer == max(sum(p.nbytes for p in model.layers[index].parameters()) for index in (2, 3))
    experts = model.layers[3].block_sparse_moe.experts
    assert module == sum(p.nbytes for p in experts.parameters())


def test_places_of_gpus_come_first(saved: Saved) -> None:
    located = open_model(str(saved("granitemoehybrid")))
    model, _ = some_room(located)
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in model.layers]
    first = model.get_input_embeddings().weight.nbytes + sizes[0] + max(sizes)
    both = infer(model, {0: first, 1: 2**30})
    assert both is not None
    assert {place: held.layers for place, held in weights_by_device(model, both).items()} == {
        0: 1,
        1: 3,
    }
    assert largest_streamed(model, both, 0) == (0, 0)
    memory = infer(model, {0: first, "cpu": 2**30})
    assert memory is not None
    assert {place: held.layers for place, held in weights_by_device(model, memory).items()} == {
        0: 1,
        "cpu": 3,
    }
    assert largest_streamed(model, memory, 0)[0] == max(sizes[1:])


@pytest.mark.parametrize(
    "room", [{0: 1000, "cpu": 2**30}, {0: 10**5, 1: 10**5}, {"cpu": -1, "disk": 0}]
)
def test_too_little_room(saved: Saved, room: dict[int | str, int]) -> None:
    model = open_model(str(saved("granitemoehybrid"))).cut_on_meta()
    assert infer(model, room) is None
