"""From a request to a report of prefill times, with a stopwatch that needs no GPU: lengths, records, interruption."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prefill_fakes import FakeBench
from ssdprof.schema import EXACT_FP32, Asked, Gates, PrecisionRecord, Prompt
from ssdprof.schema.prefill import PrefillReport
from ssdprof.schema.prefill_rows import broken_gates

from ssdprof import kernels

# TODO ssdprof.measure: rehearsal
# TODO ssdprof.operators.drawing: Peer, PeerSource
# TODO ssdprof.operators.ssd.peers: PEERS
from ssdprof.capture.forward import prefill
from ssdprof.commands.stored import runs
from ssdprof.errors import MissingCapabilityError

# TODO ssdprof.pipeline.lineup: line_up
from ssdprof.jobs.prefill import PrefillRequest, find, time_prefills

# TODO ssdprof.pipeline.prefill: prefill_of_run
from ssdprof.jobs.request import COMPARED, CaptureRequest, ModelRequest, PromptRequest
from ssdprof.progress import Unwatched
from ssdprof.store.reports import draft


class Stopwatch(FakeBench):
    """All calls take the same time, for every implementation."""

    def __init__(self, _device: torch.device) -> None:
        super().__init__({"unfused": 2.0, "fused": 1.0, "own_of_prefill:first": 1.0})

    def call_us(self, run: Any) -> float:
        run()
        return 100.0


@pytest.fixture
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = {name: kernels.get(name, "reference") for name in ("ssd", "gdn")}  # faster than the interpreter
    monkeypatch.setattr(kernels, "get", lambda operator, name: replace(reference[operator], name=name))
    monkeypatch.setattr(prefill, "require_gpu", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(prefill, "CudaBench", Stopwatch)
    monkeypatch.setattr(prefill, "traced", lambda run, device: (run(), [])[1])  # noqa: ARG005


def asked(*seqlens: int, layers: str = "all", model: str = "demo") -> CaptureRequest:
    return CaptureRequest(model=ModelRequest(model=model), prompt=PromptRequest(seqlens=seqlens), layers=layers)


def wanted(*seqlens: int, layers: str = "all", **changes: Any) -> PrefillRequest:
    settings: dict[str, Any] = {"surroundings": ("model",), "seconds": 0.01} | changes
    request = asked(*seqlens, layers=layers)
    lineup = line_up(COMPARED, "unfused", find(request).layers)
    return PrefillRequest(model=request, precision=EXACT_FP32, lineup=lineup, **settings)


def run(request: PrefillRequest, keep: Any = lambda _: None) -> PrefillReport:
    return time_prefills(request, find(request.model), Unwatched(), keep)


@pytest.mark.usefixtures("no_gpu_needed")
def test_every_length_is_kept_when_it_is_timed_the_shortest_first() -> None:
    kept: list[tuple[str, list[int]]] = []
    report = run(
        wanted(12, 8, batch=2),
        lambda partial: kept.append((partial.state, [one.seqlen for one in partial.prefill.lengths])),
    )
    assert list(dict.fromkeys(map(str, kept))) == [
        str(one) for one in (("partial", []), ("partial", [8]), ("partial", [8, 12]), ("complete", [8, 12]))
    ]
    assert (report.prefill.layers, report.prefill.layer_count) == (report.checkpoint.layer_count,) * 2
    for length in report.prefill.lengths:
        assert length.batch == 2
        assert [(case.implementation, case.status) for case in length.cases] == [
            ("unfused", "passed"),
            ("fused", "passed"),
        ]
        assert length.cases[1].logits_rms == 0


@pytest.mark.usefixtures("no_gpu_needed")
def test_the_first_layers_alone_are_timed_and_counted() -> None:
    report = run(wanted(8, layers="first:1"))
    assert report.prefill.layers < report.prefill.layer_count
    assert report.prefill.operator_layers == report.prefill.lengths[0].operator_calls == 1


@pytest.mark.usefixtures("no_gpu_needed")
def test_the_gate_is_stored_and_judges_what_was_timed() -> None:
    report = run(wanted(8, layers="first:1", gates=Gates(min_speedup=1.5)))
    assert report.gates.min_speedup == 1.5
    (broken,) = broken_gates(report)  # both took the same time
    assert (broken.row, broken.found) == (
        "prefill, model surroundings, 8 tokens, fused, exact, fp32 states",
        "1x over unfused",
    )


@pytest.mark.usefixtures("no_gpu_needed")
def test_a_budget_that_is_spent_leaves_lengths_out_by_name() -> None:
    report = run(wanted(8, budget=1e-9))
    assert report.prefill.lengths == ()
    assert report.state == "complete"
    assert [(left.seqlen, left.reason) for left in report.prefill.left_out] == [(8, "the budget of 1e-09 s was spent")]


@pytest.mark.usefixtures("no_gpu_needed")
def test_an_interrupt_within_a_length_leaves_what_was_found() -> None:
    kept: list[PrefillReport] = []

    def keep(report: PrefillReport) -> None:
        kept[:] = [report]
        if report.prefill.steps[-1].what.endswith("unfused: a profiled prefill"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(wanted(8, 12), keep)
    (report,) = kept
    (length,) = report.prefill.lengths
    assert (report.state, length.seqlen) == ("partial", 8)
    assert [(case.implementation, case.alone_us) for case in length.cases] == [("unfused", 2.0)]


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu_needed")
def test_with_both_surroundings_all_lengths_come_with_the_first_and_other_libraries_with_them_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = kernels.get("ssd", "reference")
    library = Peer(implementation=replace(base, name="library"), version="1", precisions=lambda _dtype: (EXACT_FP32,))
    monkeypatch.setitem(PEERS, "library", PeerSource(load=lambda _: library, hint="", needs_gpu=False))
    request = wanted(8, 12, surroundings=prefill.SURROUNDINGS)
    report = run(replace(request, lineup=line_up((*COMPARED, "library"), "unfused", find(request.model).layers)))
    for length in report.prefill.lengths:
        assert [(case.surroundings, case.implementation) for case in length.cases] == [
            *(("bundled", name) for name in ("unfused", "fused", "library")),
            *(("model", name) for name in ("unfused", "fused")),
        ]
        assert all(case.call for case in length.cases)
    steps = [step.what for step in report.prefill.steps]
    assert steps[0] == "Loading the model"
    ends = [what.removesuffix(", prefills in turns") for what in steps if what.endswith("turns")]
    assert ends == [
        f"{tokens} tokens, {surroundings} surroundings" for surroundings in ("bundled", "model") for tokens in (8, 12)
    ]


@pytest.mark.usefixtures("no_gpu_needed")
def test_own_kernels_take_part_at_their_own_precision_and_are_rehearsed(
    users_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rehearsed(named: Any, *_: Any) -> rehearsal.Verdict:
        return rehearsal.Verdict(status="failed" if "second" in named.name else "passed", reason="it hangs")

    monkeypatch.setattr(rehearsal, "_rehearsed", rehearsed)
    text = "from ssdprof.measure.oracle import oracle_output as first\ndef second(inputs):\n    raise AssertionError\n"
    (users_folder / "own_of_prefill.py").write_text(text)
    layers = find(asked(8)).layers
    names = ("fused", "own_of_prefill:first", "own_of_prefill:second")
    relaxed = PrecisionRecord(intermediates="relaxed", state_dtype="bf16")
    report = run(replace(wanted(8), lineup=line_up(names, "fused", layers), precision=relaxed))
    assert report.prefill.baseline == "fused"
    assert [(case.implementation, case.status, case.reason) for case in report.prefill.lengths[0].cases] == [
        ("fused", "passed", ""),
        ("own_of_prefill:first", "passed", ""),
        ("own_of_prefill:second", "failed", "it hangs"),
    ]
    assert [case.precision for case in report.prefill.lengths[0].cases] == [relaxed, EXACT_FP32, EXACT_FP32]


@pytest.mark.usefixtures("no_gpu_needed")
def test_a_library_that_is_not_there_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    report = run(replace(wanted(8), lineup=line_up(("fused", "mamba_ssm"), "unfused", find(asked(8)).layers)))
    assert [case.implementation for case in report.prefill.lengths[0].cases] == ["unfused", "fused"]
    assert report.notes[0].startswith("Not compared: mamba_ssm cannot be imported")


@pytest.mark.usefixtures("no_gpu_needed")
def test_a_run_holds_the_prefill_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "SURROUNDINGS", ("model",))
    request, folder = asked(8), runs.RunFolder(tmp_path)
    subject = find(request)
    prompt = Prompt(kind="random", source="random", tokenizer="none", seqlen=8, token_sha256="0" * 64)
    of_run = Asked(implementations=("unfused",), precisions=(EXACT_FP32,), layers=subject.layers)
    report = draft(folder, ("ssdprof", "run"), subject.ref, [prompt], 8, asked=of_run)
    found = prefill_of_run(request, 0.01, tmp_path, report, Unwatched())
    assert found.prefill is not None
    assert [case.status for case in found.prefill.lengths[0].cases] == ["passed", "passed"]
    assert runs.read(tmp_path)[1] == found
    assert found.model_copy(update={"prefill": None}) == report


def test_without_a_gpu_it_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(MissingCapabilityError, match=r"Prefill times need an NVIDIA GPU"):
        run(wanted(8))
