"""`run` as a job, on stored captures of two tiny layers: what is requested, compared, timed, and
kept.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from captured import store
from cases import layer, prompt
from fakes import QUICK, FakeTimer, inputs, needs_interpreter, note_runs

from ssdprof import kernels, operators
from ssdprof.core.base import intermediates_of, precisions_for, states_of
from ssdprof.core.outcome import Outcome
from ssdprof.core.report import Report
from ssdprof.core.target import Serving
from ssdprof.jobs import limits, replay, target
from ssdprof.jobs import run as job
from ssdprof.jobs.options import RunOptions
from ssdprof.jobs.replay import heads_by_memory
from ssdprof.jobs.target import find_to_replay
from ssdprof.kernels import GDNInputs, SSDInputs, registry
from ssdprof.measure.trace import PREFIX
from ssdprof.progress import Watcher
from ssdprof.store.reports import load

pytestmark = pytest.mark.usefixtures("in_empty_folder")
LAYERS = (layer(0), layer(3))
TOKENS = "5" * 64


def captured(*chosen: int) -> RunOptions:
    """The request to replay captures, which this stores."""
    store(
        Path("captures"), [(one, inputs(), None) for one in LAYERS], prompt(40, token_sha256=TOKENS)
    )
    return RunOptions(model="captures", layers=",".join(map(str, chosen)) or "all")


def replayed(*layers: int, **wanted) -> Report:
    request = replace(captured(*layers), **wanted, out=Path("kept"), command=("ssdprof", "run"))
    folder, report = job.run(request, find_to_replay(request), None, Watcher())
    assert load(folder)[1] == report
    return report


def names(report: Report) -> list[str]:
    return [case.name for case in report.cases]


@needs_interpreter
def test_every_requested_case_is_there_in_its_order_and_on_a_cpu_not_timed():
    report = replayed(states=("fp32", "fp16"))
    assert (report.kind, report.id, report.command, report.complete) == (
        "run",
        "kept",
        ("ssdprof", "run"),
        True,
    )
    assert [", ".join(one) for one in report.requested] == names(report)
    assert names(report)[:5] == [
        "layer 0, 40 tokens, unfused, exact, fp32 states",
        "layer 0, 40 tokens, fused, exact, fp32 states",
        "layer 0, 40 tokens, unfused, relaxed, fp32 states",
        "layer 0, 40 tokens, fused, relaxed, fp32 states",
        "layer 0, 40 tokens, unfused, exact, fp16 states",
    ]
    assert len(report.cases) == 16
    assert report.captured == LAYERS
    assert Outcome(report).passed
    assert {
        (case.inputs, case.samples, case.workspace_bytes, case.reason) for case in report.cases
    } == {(TOKENS, (), None, "")}


@needs_interpreter
def test_a_trace_has_the_cases_of_the_first_layer_one_after_another_with_their_kernels():
    replayed(intermediates="exact", states=("fp32",), trace=Path("trace.json"))
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    marks = sorted(
        (one["ts"], one["ts"] + one["dur"], one["name"])
        for one in events
        if one["name"].startswith(PREFIX)
    )
    calls = [one for one in marks if one[2].endswith(" states")]
    assert [name for _, _, name in calls] == [
        f"{PREFIX}{one} exact, fp32 states" for one in ("unfused", "fused")
    ]
    assert calls[0][1] <= calls[1][0]
    unfused, fused = (
        [one[2] for one in marks if begin < one[0] and one[1] < end] for begin, end, _ in calls
    )
    assert len(unfused) == 5
    assert fused == [f"{PREFIX}_fused_kernel"]


@needs_interpreter
def test_a_call_that_fails_in_its_trace_fails_its_case(monkeypatch):
    fused = kernels.get("ssd", "fused")
    left = [1]

    def once(*given):
        left.pop()
        return fused.run(*given)

    monkeypatch.setitem(registry._implementations, ("ssd", "fused"), replace(fused, run=once))
    report = replayed(0, intermediates="exact", states=("fp32",), trace=Path("/dev/null"))
    assert [(case.result, case.reason[:23]) for case in report.cases] == [
        ("passed", ""),
        ("failed", "in its trace: IndexErro"),
    ]


@needs_interpreter
def test_the_bundled_baseline_passes_at_all_six_precisions():
    report = replayed(3, implementations=("unfused",), states=("fp32", "fp16", "bf16"))
    assert [case.result for case in report.cases] == ["passed"] * 6, [
        case.why for case in report.cases
    ]
    assert {case.precision for case in report.cases} == {
        *precisions_for("bf16", "all", ("fp32", "fp16", "bf16"))
    }
    for case in report.cases:
        assert case.layer == LAYERS[1]
        assert case.dims.sizes["nheads"] == 2
        assert all((case.variant, case.plan, case.launches))
        exact = intermediates_of(case.precision) == "exact"
        for accuracy in case.accuracy:
            against = None if exact else f"unfused exact, {states_of(case.precision)} states"
            assert (accuracy.vs_baseline and accuracy.vs_baseline.against) == against


def test_the_interpreters_kernels_are_not_timed_beside_a_gpu(monkeypatch):
    timers = []
    monkeypatch.setattr(limits, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(replay, "INTERPRETED", True)
    for name in ("measure_ceilings", "forget_peak"):
        monkeypatch.setattr(replay, name, lambda _: None)
    monkeypatch.setattr(replay, "read_clocks", lambda: None)
    monkeypatch.setattr(replay, "Comparer", lambda **own: timers.append(own["timer"]))
    report = SimpleNamespace(prompts=(), ceilings=None)
    writer = SimpleNamespace(report=report, process="one", folder=Path(), update=lambda **_: None)
    replay.Replay(writer, RunOptions(model="captures"), lambda *_: (), None, Watcher())
    assert timers == [None]


@needs_interpreter
@pytest.mark.parametrize("stop_at", [5, 13])
def test_an_interrupted_run_goes_on_as_if_it_had_not_stopped(stop_at, monkeypatch):
    plain = replay.Comparer
    began = []

    class Noted(plain):  # type: ignore[misc, valid-type]
        def compare(self, entries, label: str, *rest):
            began.append(label)
            return super().compare(entries, label, *rest)

    def ran(stop_at: int | None, out: str) -> Report:
        timer = FakeTimer(stop_at=stop_at)
        monkeypatch.setattr(
            replay, "Comparer", lambda **own: Noted(**(own | {"timer": timer, "sampling": QUICK}))
        )
        place = dict(model="captures", out=Path(out), trace=Path(f"{out}.json"))
        target.run(RunOptions(**place))
        request = RunOptions(**place, intermediates="exact", states=("fp32",))
        return job.run(request, find_to_replay(request), None, Watcher())[1]

    note_runs(monkeypatch, unfused=300.0, fused=100.0)
    captured()
    whole = ran(None, "whole")
    with pytest.raises(KeyboardInterrupt):
        ran(stop_at, "kept")
    done = {case.layer for case in load("kept")[1].cases if case.samples}
    assert len(done) == (stop_at > 5) == Path("kept.json").exists()
    began.clear()
    report = ran(None, "kept")
    assert began == [one.name for one in LAYERS if one not in done]
    assert [case.changed(samples=()) for case in report.cases] == [
        case.changed(samples=()) for case in whole.cases
    ]
    assert all(len(case.samples) == 2 for case in report.cases)
    assert (report.captured, report.remarks, report.complete) == (
        whole.captured,
        whole.remarks,
        True,
    )


def test_chunks_and_decode_steps_are_requested_as_calls_of_their_own():
    asked = RunOptions(
        model="", implementations=("fused",), intermediates="exact", states=("fp32", "bf16")
    )
    resolved = replay.resolve_implementations(asked, ("ssd",))
    of = prompt(50, serving=Serving(chunk=40, decode=1))
    found = SimpleNamespace(layers=LAYERS[:1])
    requested = [", ".join(one) for one in job._requested(found, [of], resolved, "bf16", asked)]
    assert requested == [
        *(
            (
                f"layer 0, {size} tokens, chunk {number} of 2 of 50 tokens, {name}, exact, "
                f"{states} states"
            )
            for number, size in ((1, 40), (2, 10))
            for states in ("fp32", "bf16")
            for name in ("unfused", "fused")
        ),
        "layer 0, 1 token, decode step 1 of 1 after 50 tokens, unfused_step, exact, fp32 states",
        "layer 0, 1 token, decode step 1 of 1 after 50 tokens, recurrent, exact, fp32 states",
    ]


@pytest.mark.gpu
def test_on_a_gpu_everything_is_measured():
    report = replayed(3, implementations=("unfused",), intermediates="exact", states=("fp32",))
    (case,) = report.cases
    assert limits.device() == torch.device("cuda", 0)
    assert (case.result, report.ceilings is None) == ("passed", False), case.why
    assert case.call_us.value > case.device_us.value > 0
    assert case.workspace_bytes
    assert {launch.kernel for launch in case.launches} >= {
        "_chunk_scan_kernel",
        "_state_passing_kernel",
    }
    assert all(launch.registers for launch in case.launches)


def test_heads_are_counted_by_how_long_they_remember():
    """exp(-0.2 x 64) and less is forgotten within 64 tokens; exp(-0.0001 x 16,384) is not forgotten
    at all.
    """
    rates = torch.tensor([-0.2, -0.3, -0.02, -0.001, -0.0001, 0.0, -torch.inf, 0.5])
    shape = (1, 40, len(rates), 16)
    q, k, v = (torch.randn(shape) for _ in range(3))
    gdn = GDNInputs(q=q, k=k, v=v, g=rates.expand(1, 40, -1), beta=torch.rand(1, 40, len(rates)))
    packed = replace(gdn, cu_seqlens=torch.tensor([0, 0, 17, 40]))
    rates = rates.clamp(max=0)
    ssd = SSDInputs(x=v, dt=torch.ones(1, 40, len(rates)), A=rates, B=q[:, :, :1], C=k[:, :, :1])
    for given in (gdn, packed, ssd):
        assert heads_by_memory(operators.get(given.operator), given) == (3, 1, 1, 3)
