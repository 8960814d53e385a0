"""The model without weights: its mixers, and a place for each part of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from accelerate import dispatch_model
from accelerate.utils import send_to_device
from capture.exact import capture, check_same
from targets import slow
from torch import nn

from ssdprof.capture.forward import PromptRun, cache_name
from ssdprof.checkpoint.load import (
    DeviceMap,
    fetch,
    infer_devices,
    largest_streamed,
    load_model,
    weights_by_device,
)
from ssdprof.checkpoint.mixers import find_mixers
from ssdprof.checkpoint.model import Model, open_model
from ssdprof.core.target import LayerRef, Serving
from ssdprof.errors import BadInputError

# --- mixers


@tiny_models.every_model
def test_every_mixer_is_found(name):
    for model in (tiny_models.shared(name), tiny_models.shared(name).base_model):
        sites = find_mixers(model)
        assert tuple(site.layer_index for site in sites) == tiny_models.OPERATOR_LAYERS[name]
        assert {site.operator for site in sites} == {tiny_models.operator_of(name)}
        assert all(model.get_submodule(site.name) is site.module for site in sites)


def test_mixers_that_no_capture_can_name_are_refused():
    first, second, _ = (mixer.module for mixer in find_mixers(tiny_models.shared("mamba2")))
    layer = nn.ModuleDict({"first": first, "second": second})
    for model, words in (
        (
            nn.Linear(2, 2),
            "Linear has no SSD, GDN or KDA layer: its layers are of nothing with weights",
        ),
        (nn.ModuleDict({"lonely": first}), "'lonely' is in no numbered decoder layer"),
        (nn.ModuleDict({"layers": nn.ModuleList([layer])}), "Decoder layer 0 has two mixers"),
    ):
        with pytest.raises(BadInputError, match=words):
            find_mixers(model)


def test_a_layer_of_another_operator_is_refused():
    model = tiny_models.shared("granitemoehybrid")
    ids = tiny_models.prompt(2)
    for index, operator, words in (
        (2, "ssd", r"2 of this granitemoehybrid model has no operator, not ssd; .*0, 1"),
        (1, "gdn", "Layer 1 .* has ssd, not gdn"),
    ):
        layer = LayerRef(index=index, name="layer", operator=operator)
        with pytest.raises(BadInputError, match=words):
            PromptRun(model, ids, 2, "granitemoehybrid", (layer,)).wanted  # noqa: B018


# --- places: the place of each weight, and the same bits in the model's output


Saved = Callable[[str], Path]
CPU = torch.device("cpu")
MIXTURES = ("granitemoehybrid", "qwen3_next", "nemotron_h")


def some_room(located: Model) -> tuple[Any, DeviceMap]:
    """The model on the meta device, and a map with room for the embedding, two layers, and one
    streamed layer.
    """
    model = located.cut_on_meta()
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in model.layers]
    room = model.get_input_embeddings().weight.nbytes + sum(sizes[:2]) + max(sizes)
    mapped = infer_devices(model, {"cpu": room, "disk": 0})
    assert mapped is not None
    return model, mapped


@pytest.mark.parametrize("segment_length", [*slow(70), 32])
@tiny_models.every_model
def test_captures_of_a_model_on_the_disk_are_those_of_one_in_memory(
    saved: Saved, name, segment_length
):
    located = open_model(str(saved(name)))
    local = fetch(located)
    _, mapped = some_room(located)
    whole = load_model(local, device="cpu")
    streamed = load_model(local, device="cpu", device_map=mapped)
    assert any(parameter.is_meta for parameter in streamed.parameters())
    ids = tiny_models.prompt(70)
    on_disk, in_memory = (
        capture(name, ids, segment_length=segment_length, model=model)[0]
        for model in (streamed, whole)
    )
    check_same(on_disk, in_memory)
    assert any(parameter.is_meta for parameter in streamed.parameters())


@pytest.mark.parametrize("name", ["mamba2", *MIXTURES])
def test_captures_of_a_model_in_main_memory_are_those_of_one_on_the_device(saved: Saved, name):
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
    places |= {f"{base}.layers.{index}": "cpu" for index in range(len(offloaded.base_model.layers))}
    dispatch_model(
        offloaded, places, main_device=CPU, skip_keys=offloaded._skip_keys_device_placement
    )
    assert any(parameter.is_meta for parameter in offloaded.parameters())
    streamed, expected = (
        capture(name, tiny_models.prompt(70), Serving(decode=2), model=model)[0]
        for model in (offloaded, whole)
    )
    assert len(streamed) == 3 * len(tiny_models.layer_refs(name))
    check_same(streamed, expected)


@pytest.mark.parametrize("name", ["mamba2", "granitemoehybrid", "qwen3_next"])
def test_hooks_leave_a_cache_where_its_layers_are(name):
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


def layers_of(model, mapped: DeviceMap | None) -> dict[int | str, int]:
    assert mapped is not None
    return {device: held.layers for device, held in weights_by_device(model, mapped).items()}


def test_what_each_device_holds(saved: Saved):
    located = open_model(str(saved("granitemoehybrid")))
    model, mapped = some_room(located)
    by_device = weights_by_device(model, mapped)
    assert layers_of(model, mapped) == {"cpu": 2, "disk": 2}
    assert sum(held.bytes for held in by_device.values()) == located.weight_bytes()
    layer, module = largest_streamed(model, mapped, "cpu")
    assert layer == max(sum(p.nbytes for p in model.layers[index].parameters()) for index in (2, 3))
    experts = model.layers[3].block_sparse_moe.experts
    assert module == sum(p.nbytes for p in experts.parameters())


def test_places_of_gpus_come_first(saved: Saved):
    located = open_model(str(saved("granitemoehybrid")))
    model, _ = some_room(located)
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in model.layers]
    first = model.get_input_embeddings().weight.nbytes + sizes[0] + max(sizes)
    both = infer_devices(model, {0: first, 1: 2**30})
    assert layers_of(model, both) == {0: 1, 1: 3}
    assert largest_streamed(model, both, 0) == (0, 0)
    memory = infer_devices(model, {0: first, "cpu": 2**30})
    assert layers_of(model, memory) == {0: 1, "cpu": 3}
    assert largest_streamed(model, memory, 0)[0] == max(sizes[1:])


@pytest.mark.parametrize(
    "room", [{0: 1000, "cpu": 2**30}, {0: 10**5, 1: 10**5}, {"cpu": -1, "disk": 0}]
)
def test_too_little_room(saved: Saved, room: dict[int | str, int]):
    model = open_model(str(saved("granitemoehybrid"))).cut_on_meta()
    assert infer_devices(model, room) is None
