"""An implementation in place of a model's operator, in the given layers; the parts of models of
every family.
"""

import pytest
import tiny_models
import torch
from prefill_fakes import cpu_trace

from ssdprof.capture.forward import prefill
from ssdprof.capture.intercept import OperatorCall, Result, intercept
from ssdprof.checkpoint.mixers import find_mixers
from ssdprof.errors import BadInputError
from ssdprof.jobs.substitute import (
    _modules,
    by_layer,
    implemented,
    marking,
    part_times,
    parts_marked,
)
from ssdprof.kernels.precision import Precision
from ssdprof.measure.trace import work

LENGTH = 40  # more than a chunk


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(tiny_models.prompt(LENGTH), use_cache=False).logits


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5_text"])
@pytest.mark.parametrize(
    "implementation", ["reference", pytest.param("unfused", marks=pytest.mark.slow), "fused"]
)
def test_an_implementation_computes_in_the_models_place(name, implementation):
    model = tiny_models.shared(name)
    sites = find_mixers(model)
    before = logits(model)
    with intercept(sites, implemented(implementation, Precision(), sites)) as count:
        ours = logits(model)
    assert count["calls"] == len(sites)
    assert not torch.equal(ours, before)  # sums in another order: our implementation ran
    assert float((ours - before).abs().max() / before.abs().max()) < 1e-4
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("name", ["granitemoehybrid", "olmo_hybrid"])
def test_only_the_named_layers_are_replaced(name):
    model = tiny_models.shared(name)
    sites = find_mixers(model)
    replaced = []
    left = []

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


def test_an_unknown_implementation_is_refused():
    sites = find_mixers(tiny_models.shared("mamba2"))
    with pytest.raises(BadInputError, match="no implementation 'fastest' of ssd"):
        implemented("fastest", Precision(), sites)


# --- parts of the model


def names(model_name: str) -> dict[str, list[str]]:
    """The modules of each part, as "<class> <number>"."""
    model = tiny_models.shared(model_name)
    found = _modules(model, find_mixers(model))
    return {
        part: sorted(
            {
                f"{type(module).__name__} {[type(m) for m in modules].count(type(module))}"
                for module in modules
            }
        )
        for part, modules in found.items()
    }


@pytest.mark.parametrize(
    ("name", "attention", "mlps"),
    [
        ("mamba2", [], []),
        (
            "granitemoehybrid",
            ["GraniteMoeHybridAttention 1"],
            ["GraniteMoeHybridMLP 4", "GraniteMoeHybridMoE 4"],
        ),
        ("bamba", ["BambaAttention 1"], ["BambaMLP 4"]),
        ("qwen3_5_text", ["Qwen3_5Attention 1"], ["Qwen3_5MLP 4"]),
        ("qwen3_next", ["Qwen3NextAttention 1"], ["Qwen3NextSparseMoeBlock 4"]),
        ("olmo_hybrid", ["OlmoHybridAttention 1"], ["OlmoHybridMLP 4"]),
    ],
)
def test_parts_are_found_by_what_modules_do(name, attention, mlps):
    found = names(name)
    assert (found["attention"], found["MLP"]) == (attention, mlps)
    assert len(found["mixer"]) == len(found["gated norm"]) == 1


@pytest.mark.parametrize("name", ["nemotron_h", "falcon_h1", "zamba2"])
def test_no_module_is_part_of_two(name):
    model = tiny_models.shared(name)
    found = _modules(model, find_mixers(model))
    outer = [module for part in ("mixer", "attention", "MLP") for module in found[part]]
    assert found["MLP"]
    for module in outer:
        assert not set(module.modules()) & (set(outer) - {module})


def test_a_models_launches_are_those_of_its_parts():
    model = tiny_models.shared("granitemoehybrid")
    sites = find_mixers(model)
    ids = tiny_models.prompt(24)
    compute = implemented("reference", Precision(), sites)
    with parts_marked(model, sites), intercept(sites, marking("operator", compute)):
        trace = cpu_trace(lambda: prefill(model, ids, 24))
    found = part_times(work(trace))
    assert {"mixer", "attention", "MLP", "gated norm", "rest"} <= set(found)
    launched = [(part, name) for part, name, _ in work(trace)]
    assert launched.count(("mixer", "aten::mm")) == 2 * len(sites)  # the projections in and out
    assert launched.count(("gated norm", "aten::pow")) == len(sites)
    assert "aten::mm" in found["mixer"]
    assert list(found["gated norm"]) == ["aten::pow"]
    marks = [event["name"] for event in trace if event.get("cat") == "user_annotation"]
    for part, count in {
        "operator": 3,
        "convolution": 3,
        "gated norm": 3,
        "mixer": 3,
        "attention": 1,
    }.items():
        assert marks.count(f"ssdprof:{part}") == count
    before = cpu_trace(lambda: prefill(model, ids, 24))
    # all marks are removed
    assert not [event for event in before if str(event.get("name")).startswith("ssdprof:")]


def test_parts_add_up_to_the_whole():
    some = [
        ("operator", "a", 5.0),
        ("operator", "a", 2.0),
        ("MLP", "b", 1.0),
        (None, "c", 0.5),
        ("another", "d", 0.25),
    ]
    found = part_times(some)
    assert found == {"operator": {"a": 7.0}, "MLP": {"b": 1.0}, "rest": {"c": 0.5, "d": 0.25}}
    (kernels,) = part_times(
        [("MLP", f"kernel {number}", float(number)) for number in range(10)]
    ).values()
    assert kernels == {"kernel 9": 9, "kernel 8": 8, "kernel 7": 7, "others": 21}, (
        "those that take longest"
    )
