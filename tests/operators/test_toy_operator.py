"""A new operator, registered from one file and unknown to the package, works in every stage."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from captured import layer, store
from cases import prompt, task_of, value
from command_line import ending, passing
from fakes import note_runs, pretend_gpu
from operators import toy
from verdict import assert_passes

from ssdprof import operators
from ssdprof.capture.store import load as load_captures
from ssdprof.core.case import Generated
from ssdprof.core.outcome import Outcome
from ssdprof.errors import BadInputError
from ssdprof.kernels import registry
from ssdprof.kernels.precision import Precision
from ssdprof.store.reports import load

SEQLEN = 40
LAYERS = (layer(0, "toy"), layer(3, "toy"))


@pytest.fixture(autouse=True)
def registered(registries_of_its_own: None, in_empty_folder: None):
    operators.register(toy.OPERATOR)
    toy.register_implementations()


def generated(seqlen: int = SEQLEN) -> toy.ToyInputs:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, seqlen, 2, 8, generator=generator).bfloat16()
    return toy.ToyInputs(x=x, a=-torch.rand(2, seqlen, 2, generator=generator))


@pytest.fixture
def captures() -> Path:
    return store(
        Path("captures"), [(layer, generated(), None) for layer in LAYERS], prompt(SEQLEN, batch=2)
    )


def ssdprof(command: str) -> str:
    return passing(command).out


def test_from_stored_captures_to_reports(captures: Path):
    read = load_captures(captures)[1](load_captures(captures)[0].layers[0]).inputs
    for name, tensor in generated().tensors.items():
        assert torch.equal(read.tensors[name], tensor)

    ssdprof(f"run {captures} --out run --states all")
    report = load("run")[1]
    assert Outcome(report).passed
    assert len(report.cases) == len(LAYERS) * 2 * 6
    assert {case.result for case in report.cases} == {"passed"}
    case = report.cases[0]
    assert [tensor.tensor for tensor in case.accuracy] == ["out", "final_states"]
    assert str(case.dims) == "2 heads x 8, bf16"
    assert case.accuracy[1].vs_oracle.elements == 2 * 2 * 8

    shown = ssdprof("accuracy run")
    assert "out" in shown
    assert "states" in shown
    assert (
        json.loads(ssdprof("export run --format json"))["cases"][0]["task"]["dims"]["operator"]
        == "toy"
    )
    assert "2 heads x 8" in ssdprof("export run")


def test_a_wrong_implementation_of_it_is_found(captures: Path, monkeypatch):
    def wrong(inputs: toy.ToyInputs, precision: Precision) -> toy.OutputPair:
        out, state = toy.running_sum(inputs, precision)
        out[1, 20, 1, 3] += 1
        return out, state

    right = registry.get("toy", "fused")
    monkeypatch.setitem(registry._implementations, ("toy", "fused"), replace(right, run=wrong))
    ending(1, f"run {captures} --out run")
    report = load("run")[1]
    (out, states) = next(case for case in report.cases if case.implementation == "fused").accuracy
    assert out.reason
    assert out.vs_oracle.worst_position == (1, 20, 1, 3)
    assert not states.reason


def test_it_is_benched(monkeypatch):
    note_runs(monkeypatch, "toy", real=True, unfused=300.0, fused=100.0)
    pretend_gpu(monkeypatch)
    ssdprof("bench toy --shape toy-1b,3x16 --seq 40 --out cells")
    report = load("cells")[1]
    assert (report.kind, report.target) == ("bench", "toy")
    assert [
        ((task_of(case, Generated).shape, task_of(case, Generated).shape_words), case.result)
        for case in report.cases
    ] == [
        (("toy-1b", "2x8"), "passed"),
        (("toy-1b", "2x8"), "passed"),
        (("3x16", "3x16"), "passed"),
        (("3x16", "3x16"), "passed"),
    ]
    for fused in report.cases[1::2]:
        assert value(report.speedup(fused)) == pytest.approx(3.0)


def test_the_comparator_knows_it_by_its_inputs():
    output = toy.running_sum(generated(), Precision(state_dtype=torch.float16))
    assert_passes(output, generated(), Precision(state_dtype=torch.float16))
    with pytest.raises(AssertionError, match="final_states"):
        assert_passes((output[0], output[1] * 1.01), generated(), Precision())


def test_what_is_not_there_yet_is_refused_in_a_sentence(captures: Path, monkeypatch):
    monkeypatch.delitem(registry._implementations, ("toy", "unfused"))
    assert "There is no implementation 'unfused' of toy" in ending(2, f"run {captures}").err
    with pytest.raises(BadInputError, match="There is no operator 'tay'"):
        operators.get("tay")
    with pytest.raises(ValueError, match="registered already"):
        operators.register(toy.OPERATOR)
