"""From a request to a report of prefill times, with a timer that needs no GPU: lengths, budget,
interruption.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import task_of
from prefill_fakes import ONCE, FakeTimer

from ssdprof import kernels
from ssdprof.core.base import EXACT_FP32
from ssdprof.core.case import Prefill
from ssdprof.core.conditions import parse_gate
from ssdprof.core.outcome import broken
from ssdprof.core.report import Report
from ssdprof.errors import MissingCapabilityError
from ssdprof.jobs import prefill as job
from ssdprof.jobs.options import COMPARED, PrefillOptions
from ssdprof.jobs.prefill import find, time_prefills
from ssdprof.kernels import registry
from ssdprof.measure import isolate
from ssdprof.operators import implementations
from ssdprof.progress import Watcher
from ssdprof.report.statements import caveats
from ssdprof.store.reports import load

pytestmark = pytest.mark.usefixtures("users_folder")


class EqualTimes(FakeTimer):
    """All calls take the same time, for every implementation."""

    def __init__(self, _device: torch.device):
        super().__init__()

    def record(self, run) -> tuple[Any, Any]:
        output = run()
        return (run, output), output

    def device_us(self, graph) -> float:
        run, output = graph
        for own, new in zip(output, run(), strict=True):
            own.copy_(new)
        return 2.0

    def call_us(self, run) -> float:
        run()
        return 100.0


@pytest.fixture
def no_gpu_needed(monkeypatch):
    for operator in ("ssd", "gdn"):
        for name in COMPARED:  # the reference is faster than the interpreter
            reference = replace(kernels.get(operator, "reference"), name=name)
            monkeypatch.setitem(registry._implementations, (operator, name), reference)
    monkeypatch.setattr(job, "require_gpu", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(job, "CudaTimer", EqualTimes)
    monkeypatch.setattr(job, "FIRST_LOOK", ONCE)
    monkeypatch.setattr(job, "traced", lambda run, device: (run(), [])[1])  # noqa: ARG005


def timed(
    *seqlens: int,
    layers: str = "all",
    names: tuple[str, ...] = COMPARED,
    baseline: str = "unfused",
    **fields,
) -> Report:
    asked = PrefillOptions(
        model="demo",
        seqlens=seqlens,
        layers=layers,
        implementations=names,
        baseline=baseline,
        **({"seconds": 0.01} | fields),
    )
    folder, report = time_prefills(asked, find(asked), Watcher())
    assert load(folder)[1] == report
    return report


def results(report: Report) -> list[tuple[int, str, str]]:
    return [(case.seqlen, case.implementation, case.result) for case in report.cases]


@pytest.mark.usefixtures("no_gpu_needed")
def test_every_length_is_timed_the_shortest_first(monkeypatch):
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    report = timed(12, 8, copies=2, names=(*COMPARED, "mamba_ssm"))
    assert report.absent[0].startswith("mamba_ssm cannot be imported")
    (caveat,) = [line for line in caveats(report) if line.startswith("Not compared: ")]
    assert "mamba_ssm cannot be imported" in caveat
    assert (report.complete, report.missing, report.baseline) == (True, (), "unfused")
    assert results(report) == [(size, name, "passed") for size in (8, 12) for name in COMPARED]
    for case in report.cases:
        prefill = task_of(case, Prefill)
        assert (prefill.layers, prefill.layer_count) == (report.model.layer_count,) * 2
        assert (case.batch, prefill.conv_and_norm, bool(case.samples)) == (2, "model", True)
        assert case.call_us == (100,) * 3
        assert prefill.logits_rms == 0
    assert next(iter(report.first.steps)) == "Loading the model"


@pytest.mark.usefixtures("no_gpu_needed")
def test_of_the_first_layers_alone_a_gate_judges_what_was_timed():
    report = timed(8, layers="first:1", conditions=(parse_gate("speedup:1.5"),))
    (unfused, _) = report.cases
    assert task_of(unfused, Prefill).layers < task_of(unfused, Prefill).layer_count
    assert (
        task_of(unfused, Prefill).operator_layers,
        task_of(unfused, Prefill).operator_calls,
    ) == (1, 1)
    (verdict,) = broken(report)  # both took the same time
    assert (
        verdict.case == "prefill, model convolution and norm, 8 tokens, fused, exact, fp32 states"
    )
    assert verdict.actual == "1x"


@pytest.mark.usefixtures("no_gpu_needed")
def test_a_budget_that_is_spent_leaves_lengths_out_by_name():
    report = timed(8, budget=1e-9)
    assert (report.cases, report.complete, report.missing) == ((), True, ())
    assert [(one.case_key, one.reason) for one in report.left_out] == [
        ("prefill, model convolution and norm, 8 tokens", "the budget of 1e-09 s was spent")
    ]


@pytest.mark.usefixtures("no_gpu_needed")
def test_an_interrupt_within_a_length_leaves_what_was_found(monkeypatch):
    whole: Callable[..., None] = job._PromptRun._whole_prefill

    def interrupted(self: job._PromptRun, name: str):
        if name == "fused":
            raise KeyboardInterrupt
        whole(self, name)

    monkeypatch.setattr(job._PromptRun, "_whole_prefill", interrupted)
    with pytest.raises(KeyboardInterrupt, match="marked as partial: 1 case"):
        timed(8, 12, out=Path("kept"))
    report = load("kept")[1]
    assert (report.complete, results(report)) == (False, [(8, "unfused", "passed")])
    (case,) = report.cases
    assert (task_of(case, Prefill).alone_us, case.samples) == (2.0, ())
    monkeypatch.setattr(job._PromptRun, "_whole_prefill", whole)
    again = timed(8, 12, out=Path("kept"))
    assert results(again) == [(size, name, "passed") for size in (8, 12) for name in COMPARED]
    assert again.complete
    assert all(case.samples for case in again.cases)


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu_needed")
def test_all_lengths_come_with_the_models_own_convolution_first_and_other_libraries_with_it_alone(
    monkeypatch,
):
    library = replace(kernels.get("ssd", "reference"), name="library", kind="library", version="1")
    known = implementations.resolve
    monkeypatch.setattr(
        implementations,
        "resolve",
        lambda of, word: library if word == "library" else known(of, word),
    )
    report = timed(8, 12, names=(*COMPARED, "library"), conv_and_norm="bundled")
    assert [case.name for case in report.cases] == [
        f"prefill, {kind} convolution and norm, {size} tokens, {name}, exact, fp32 states"
        for kind, names in (("model", (*COMPARED, "library")), ("bundled", COMPARED))
        for size in (8, 12)
        for name in names
    ]
    assert all(case.samples for case in report.cases)
    ends = [
        one.removesuffix(", prefills in turns")
        for one in report.first.steps
        if one.endswith("turns")
    ]
    assert ends == [
        f"{size} tokens, {kind} convolution and norm"
        for kind in ("model", "bundled")
        for size in (8, 12)
    ]


@pytest.mark.usefixtures("no_gpu_needed")
def test_own_kernels_take_part_at_their_own_precision_and_are_first_called_elsewhere(
    users_folder: Path, monkeypatch
):
    def tried(implementation, *_) -> isolate.CallVerdict:
        hangs = implementation.name.endswith("second")
        return ("failed", "it hangs") if hangs else ("ran", "")

    monkeypatch.setattr(isolate, "_tried", tried)
    text = (
        "from ssdprof.measure.accuracy import oracle_output as first\ndef second(inputs):\n   "
        " raise AssertionError\n"
    )
    (users_folder / "own_of_prefill.py").write_text(text)
    relaxed = "relaxed, bf16 states"
    names = ("fused", "own_of_prefill:first", "own_of_prefill:second")
    report = timed(8, names=names, baseline="fused", intermediates="relaxed", state_dtype="bf16")
    assert report.baseline == "fused"
    assert [
        (case.implementation, case.result, case.why, case.precision) for case in report.cases
    ] == [
        ("fused", "passed", "", relaxed),
        ("own_of_prefill:first", "passed", "", EXACT_FP32),
        ("own_of_prefill:second", "failed", "it hangs", EXACT_FP32),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused():
    with pytest.raises(MissingCapabilityError, match=r"Prefill times need an NVIDIA GPU"):
        timed(8)
