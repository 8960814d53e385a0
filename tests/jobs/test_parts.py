"""Which modules belong to which part of a model, in every family; the parts of a profile add up."""

from __future__ import annotations

import pytest
import tiny_models
from prefill_fakes import cpu_trace

from ssdprof.capture.forward import prefill
from ssdprof.capture.intercept import intercept
from ssdprof.checkpoint.meta import find_mixers
from ssdprof.core.base import EXACT_FP32
from ssdprof.jobs.substitute import _modules, implemented, marking, part_times, parts_marked
from ssdprof.measure.trace import GpuWork, work


def names(model_name: str) -> dict[str, list[str]]:
    """The modules of each part, as "<class> <number>"."""
    model = tiny_models.shared(model_name)
    found = _modules(model, find_mixers(model))
    return {
        part: sorted(
            {f"{type(module).__name__} {[type(m) for m in modules].count(type(module))}" for module in modules}
        )
        for part, modules in found.items()
    }


@pytest.mark.parametrize(
    ("name", "attention", "mlps"),
    [
        ("mamba2", [], []),
        ("granitemoehybrid", ["GraniteMoeHybridAttention 1"], ["GraniteMoeHybridMLP 4", "GraniteMoeHybridMoE 4"]),
        ("bamba", ["BambaAttention 1"], ["BambaMLP 4"]),
        ("qwen3_5_text", ["Qwen3_5Attention 1"], ["Qwen3_5MLP 4"]),
        ("qwen3_next", ["Qwen3NextAttention 1"], ["Qwen3NextSparseMoeBlock 4"]),
        ("olmo_hybrid", ["OlmoHybridAttention 1"], ["OlmoHybridMLP 4"]),
    ],
)
def test_parts_are_found_by_what_modules_do(name: str, attention: list[str], mlps: list[str]) -> None:
    found = names(name)
    assert (found["attention"], found["MLP"]) == (attention, mlps)
    assert len(found["mixer"]) == len(found["gated norm"]) == 1


@pytest.mark.parametrize("name", ["nemotron_h", "falcon_h1", "zamba2"])
def test_no_module_is_part_of_two(name: str) -> None:
    model = tiny_models.shared(name)
    found = _modules(model, find_mixers(model))
    outer = [module for part in ("mixer", "attention", "MLP") for module in found[part]]
    assert found["MLP"]
    for module in outer:
        assert not set(module.modules()) & (set(outer) - {module})


def test_a_models_launches_are_those_of_its_parts() -> None:
    model = tiny_models.shared("granitemoehybrid")
    sites = find_mixers(model)
    ids = tiny_models.prompt(24)
    compute = implemented("reference", EXACT_FP32, sites)
    with parts_marked(model, sites), intercept(sites, marking("operator", compute)):
        trace = cpu_trace(lambda: prefill(model, ids, 24))
    found = {part.name: part for part in part_times(work(trace))}
    assert {"mixer", "attention", "MLP", "gated norm", "rest"} <= set(found)
    launched = [one.part for one in work(trace) if one.name == "aten::mm"]
    assert launched.count("mixer") == 2 * len(sites)  # the projections in and out
    assert "aten::mm" in found["mixer"].kernels
    assert list(found["gated norm"].kernels) == ["aten::pow"]
    assert found["gated norm"].launches == len(sites)
    marks = [event["name"] for event in trace if event.get("cat") == "user_annotation"]
    for part, count in {"operator": 3, "convolution": 3, "gated norm": 3, "mixer": 3, "attention": 1}.items():
        assert marks.count(f"ssdprof:{part}") == count
    before = cpu_trace(lambda: prefill(model, ids, 24))
    assert not [event for event in before if str(event.get("name")).startswith("ssdprof:")]  # all marks are removed


def test_parts_add_up_to_the_whole() -> None:
    some = [
        GpuWork("operator", "a", 5.0),
        GpuWork("operator", "a", 2.0),
        GpuWork("MLP", "b", 1.0),
        GpuWork(None, "c", 0.5),
        GpuWork("of another tool", "d", 0.25),
    ]
    found = part_times(some)
    assert [(part.name, part.gpu_us, part.launches) for part in found] == [
        ("operator", 7.0, 2),
        ("MLP", 1.0, 1),
        ("rest", 0.75, 2),
    ]
    assert sum(part.gpu_us for part in found) == sum(one.us for one in some)
    assert found[0].kernels == {"a": 7.0}
    (part,) = part_times([GpuWork("MLP", f"kernel {number}", float(number)) for number in range(10)])
    assert list(part.kernels) == ["kernel 9", "kernel 8", "kernel 7"], "those that take longest"
    assert part.gpu_us == 45
