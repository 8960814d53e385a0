"""Mixers are found in the model, and belong to decoder layers."""

import subprocess
import sys

import pytest
import tiny_models
from torch import nn

from ssdprof.checkpoint.meta import find_mixers, match_layers
from ssdprof.errors import BadInputError
from ssdprof.schema import LayerRef


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_every_mixer_is_found(name: str) -> None:
    for model in (tiny_models.shared(name), tiny_models.shared(name).base_model):
        sites = find_mixers(model)
        assert tuple(site.layer_index for site in sites) == tiny_models.OPERATOR_LAYERS[name]
        assert {site.operator for site in sites} == {"ssd" if name in tiny_models.SSD else "gdn"}
        assert all(model.get_submodule(site.name) is site.module for site in sites)


def test_a_model_without_an_operator_is_refused() -> None:
    with pytest.raises(BadInputError, match="No layer of Linear"):
        find_mixers(nn.Linear(2, 2))


def test_a_mixer_outside_numbered_layers_is_refused() -> None:
    mixer = find_mixers(tiny_models.shared("mamba2"))[0].module
    with pytest.raises(BadInputError, match="'lonely' is in no numbered decoder layer"):
        find_mixers(nn.ModuleDict({"lonely": mixer}))


def test_two_mixers_in_one_decoder_layer_are_refused() -> None:
    mixers = [site.module for site in find_mixers(tiny_models.shared("mamba2"))[:2]]
    layer = nn.ModuleDict({"first": mixers[0], "second": mixers[1]})
    with pytest.raises(BadInputError, match="Decoder layer 0 has two mixers"):
        find_mixers(nn.ModuleDict({"layers": nn.ModuleList([layer])}))


def test_a_layer_of_another_operator_is_refused() -> None:
    sites = find_mixers(tiny_models.shared("granitemoehybrid"))
    attention = LayerRef(index=2, name="model.layers.2.mamba", operator="ssd")
    with pytest.raises(BadInputError, match=r"2 of this granitemoehybrid model has no operator, not ssd; .*0, 1"):
        match_layers(sites, [attention], "granitemoehybrid")
    gdn = LayerRef(index=1, name="model.layers.1.linear_attn", operator="gdn")
    with pytest.raises(BadInputError, match=r"Layer 1 .* has ssd, not gdn"):
        match_layers(sites, [gdn], "granitemoehybrid")


def test_importing_capture_imports_no_transformers() -> None:
    code = "import sys, ssdprof.capture.layers, ssdprof.capture.store; print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
