"""A length through all contenders, on the CPU: statuses, rounds, Amdahl's law, parts, and
refusals.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from cases import environment, task_of
from fakes import RAN
from prefill_fakes import ONCE, REST_US, FakeTimer, cpu_trace

from ssdprof import kernels
from ssdprof.capture.conv_and_norm import ConvAndNorm
from ssdprof.checkpoint.mixers import find_mixers
from ssdprof.core.base import EXACT_FP32, KernelOrigin
from ssdprof.core.case import Case, Prefill
from ssdprof.core.report import Report
from ssdprof.errors import BadInputError
from ssdprof.jobs.compare import Comparer
from ssdprof.jobs.options import PrefillOptions
from ssdprof.jobs.prefill import _PromptRun, sampling_plan
from ssdprof.kernels import UnsupportedError
from ssdprof.kernels.registry import Implementation
from ssdprof.measure.isolate import IsolatedFirstCall
from ssdprof.measure.trace import Trace
from ssdprof.progress import StepClock
from ssdprof.store.header import draft
from ssdprof.store.reports import Writer

pytestmark = pytest.mark.slow
US = {"unfused": 100.0, "fused": 40.0, "library": 60.0}
LAYERS = 3
LENGTH = 12


def contender(name: str, run=None, kind="bundled") -> Implementation:
    """It computes with the reference, which is faster here than kernels in the interpreter, unless
    `run` is given.
    """
    base = kernels.get("ssd", "reference")

    def noted(inputs, precision):
        RAN.append((name, US.get(name, 1.0)))
        return (run or base.run)(inputs, precision)

    return Implementation(operator="ssd", name=name, run=noted, plan=base.plan, kind=kind)


def unseen(run: Callable[[], object]) -> Trace:
    """A profiler that sees nothing; then there are few rounds."""
    run()
    return []


class Ticking:
    """A clock on which every prefill and every profile takes a second."""

    def __init__(self):
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def profile(self, run: Callable[[], object]) -> Trace:
        self.seconds += 1
        return cpu_trace(run)


def prompt_run(
    *contenders: Implementation,
    conv_and_norm: KernelOrigin = "model",
    profile: Callable[[Callable[[], object]], Trace] = unseen,
    segment: int = LENGTH,
    seconds: float = 0.01,
) -> tuple[_PromptRun, FakeTimer]:
    RAN.clear()
    by_name = {each.name: each for each in contenders}
    timer = FakeTimer()
    model = tiny_models.shared("mamba2")
    mixers = find_mixers(model)
    one = _PromptRun(
        request=PrefillOptions(model="tiny", seconds=seconds),
        resolve=lambda _, name: by_name[name],
        model=model,
        ids=tiny_models.prompt(LENGTH),
        segment_length=segment,
        mixers=mixers,
        layer=tiny_models.layer_refs("mamba2")[1],
        bundled=ConvAndNorm(mixers) if conv_and_norm == "bundled" else None,
        timer=timer,
        profile=profile,
        comparer=Comparer(timer=timer, sampling=ONCE, isolated=IsolatedFirstCall()),
    )
    prefill = Prefill(
        kind="prefill",
        conv_and_norm=conv_and_norm,
        layers=LAYERS,
        layer_count=LAYERS,
        operator_layers=LAYERS,
        operator_calls=one.operator_calls,
        segment_length=segment,
        alone=one.layer,
        attention="",
        convolution="torch",
    )
    for each in contenders:
        one.cases[each.name] = Case(
            task=prefill,
            batch=1,
            seqlen=LENGTH,
            implementation=each.name,
            kind=each.kind,
            precision=EXACT_FP32,
            baseline="" if each.name == "unfused" else "unfused",
            status="ran",
        )
    return one, timer


def timed(one: _PromptRun, clock: StepClock | None = None) -> Report:
    header = draft(
        kind="prefill", target="tiny", environment=environment(gpu=False), baseline="unfused"
    )
    writer = Writer(Path("nowhere"), header, None)
    one.run(writer, clock or StepClock())
    return writer.report


def cases(report: Report) -> dict[str, Case]:
    return {case.implementation: case for case in report.cases}


def call_us(case: Case) -> float | None:
    return case.call_us and case.call_us.value


def of(case: Case) -> Prefill:
    return task_of(case, Prefill)


@pytest.mark.parametrize("kind", ["model", "bundled"])
def test_times_ratios_and_amdahls_law_agree_where_the_operator_is_all_that_differs(
    kind: KernelOrigin,
):
    one, _ = prompt_run(*map(contender, US), conv_and_norm=kind)
    report = timed(one)
    found = cases(report)
    assert list(found) == list(US)
    assert one.first_token().shape == (1,)
    for name, case in found.items():
        assert (of(case).conv_and_norm, of(case).operator_calls, of(case).alone.index) == (
            kind,
            LAYERS,
            1,
        )
        assert case.result == "passed", case.why
        assert call_us(case) == pytest.approx(REST_US + LAYERS * US[name])
        assert of(case).alone_us == pytest.approx(US[name])
        if name == "unfused":
            assert report.speedup(case) is None
            continue
        speedup = report.speedup(case)
        expected = (REST_US + LAYERS * US["unfused"]) / (REST_US + LAYERS * US[name])
        assert speedup.value == pytest.approx(expected)
        assert report.predicted(case) == pytest.approx(expected)
        assert report.faster(case) == "faster"
        assert (of(case).logits_rms, of(case).same_token) == (0.0, True)


def test_in_segments_the_operator_counts_once_for_each_and_the_profile_is_of_a_whole_prefill():
    """Later segments have initial states, and may compile or tune kernels that the first call did
    not need.
    """
    ran = []

    def profile(run: Callable[[], object]) -> Trace:
        ran.append(RAN[-3 * LAYERS :].count(("unfused", 100.0)))
        run()
        return []

    one, _ = prompt_run(contender("unfused"), contender("fused"), profile=profile, segment=4)
    report = timed(one)
    case = cases(report)["fused"]
    assert (of(case).segment_length, of(case).operator_calls) == (4, 3 * LAYERS)
    assert report.predicted(case) == pytest.approx((REST_US + 9 * 100) / (REST_US + 9 * 40))
    assert ran[0] == 3 * LAYERS


def test_all_take_turns_and_nothing_moves_without_a_warm_up():
    one, timer = prompt_run(*map(contender, US))
    timed(one)
    first = min(timer.events.index(f"call {name}") for name in US)
    calls = [event for event in timer.events if event.startswith("call ")]
    assert "reallocate" not in timer.events[first:]
    for number in range(0, len(calls), 3):
        assert sorted(calls[number : number + 3]) == ["call fused", "call library", "call unfused"]


def test_with_time_enough_every_recording_lies_elsewhere():
    clock = StepClock(now=Ticking().now)
    one, timer = prompt_run(contender("unfused"), profile=cpu_trace, seconds=5.0)
    (case,) = timed(one, clock).cases
    assert case.call_us is not None
    assert len(case.samples[0].us) == timer.events.count("reallocate") >= 5


def test_while_a_users_kernel_runs_the_parent_knows_its_case(monkeypatch):
    told = []
    known = set[str]()
    monkeypatch.setattr("ssdprof.environment.child.tell", told.append)
    monkeypatch.setattr(IsolatedFirstCall, "verdict", lambda *_: ("ran", ""))

    def run(inputs, precision):
        word, _, case = next(line for line in reversed(told) if line != "alive").partition(" ")
        known.add(Case.model_validate_json(case).implementation if word == "case" and case else "")
        return kernels.get("ssd", "reference").run(inputs, precision)

    report = timed(prompt_run(contender("unfused"), contender("k:f", run, "own"))[0])
    assert (known, told[-1], cases(report)["k:f"].result) == ({"k:f"}, "case", "passed")


def raising(error: BaseException) -> Callable[..., Any]:
    def run(*_):
        raise error

    return run


def times(factor: float) -> Callable[..., Any]:
    """Multiplies the output of the reference."""

    def run(inputs, precision):
        out, final_states = kernels.get("ssd", "reference").run(inputs, precision)
        return out * factor, final_states

    return run


def test_what_goes_wrong_is_a_status_and_has_no_time():
    wrong = {
        "refusing": raising(UnsupportedError("refusing: no bf16")),
        "large": raising(torch.OutOfMemoryError("8 GiB more\nand a page of advice")),
        "broken": raising(RuntimeError("misaligned address")),
        "nan": times(math.nan),
    }
    one, timer = prompt_run(contender("unfused"), *map(contender, wrong, wrong.values()))
    found = cases(timed(one))
    assert {name: found[name].result for name in wrong} == {
        "refusing": "refused",
        "large": "out of memory",
        "broken": "failed",
        "nan": "nonfinite",
    }
    assert found["large"].why == "8 GiB more"
    assert found["broken"].why.startswith(
        "RuntimeError: misaligned address (test_prefill_length.py:"
    )
    assert all(found[name].call_us is None for name in wrong)
    assert {event for event in timer.events if event.startswith("call")} == {"call unfused"}


def test_another_answer_shows_and_without_its_baseline_a_case_has_no_speedup():
    report = timed(prompt_run(contender("unfused"), contender("fused", times(0)))[0])
    assert (of(cases(report)["fused"]).logits_rms or 0) > 0.1
    broken = contender("unfused", raising(RuntimeError("no")))
    report = timed(prompt_run(broken, contender("fused"))[0])
    case = cases(report)["fused"]
    assert case.call_us is not None
    assert report.speedup(case) is None
    (case,) = timed(prompt_run(broken)[0]).cases  # no error if nothing passed
    assert case.result == "failed"


def test_a_model_that_bypasses_its_operator_is_refused():
    one, _ = prompt_run(contender("unfused"), segment=1)
    with pytest.raises(BadInputError, match=r"bypasses its operator|single token"):
        timed(one)


def test_every_step_is_told_with_its_seconds():
    steps = []
    ticking = Ticking()
    clock = StepClock(on_step=lambda *step: steps.append(step), now=ticking.now)
    one, _ = prompt_run(contender("unfused"), contender("fused"), profile=ticking.profile)
    timed(one, clock)
    assert steps == [
        (f"{one.what}, one layer's operator alone", 0),
        (f"{one.what}, unfused: a profiled prefill", 1),
        (f"{one.what}, fused: a profiled prefill", 1),
        (f"{one.what}, prefills in turns", 0),
    ]


def test_what_a_budget_does_not_reach_is_named_and_the_rest_is_kept():
    ticking = Ticking()
    one, _ = prompt_run(*map(contender, US), profile=ticking.profile)
    found = cases(timed(one, StepClock(1.5, now=ticking.now)))
    assert list(found) == ["unfused", "fused"]
    assert one.seen == ["unfused", "fused"]
    assert all(of(case).parts.keys() >= {"mixer", "gated norm", "rest"} for case in found.values())
    assert all(case.call_us is None and "0 s of the" in case.why for case in found.values())

    def slow(run: Callable[[], object]) -> Trace:
        """The duration of a round, which exceeds the remaining time."""
        return [event | {"dur": 1e6} for event in cpu_trace(run)]

    (case,) = timed(prompt_run(contender("unfused"), profile=slow)[0], StepClock(10)).cases
    assert (case.result, case.call_us) == ("passed", None)
    assert "s of the budget were left" in case.why

    one, timer = prompt_run(contender("unfused"), profile=ticking.profile)
    timed(one, StepClock(0.5, now=ticking.now))
    assert timer.events.count("call unfused") == 2, "of the operator alone"


def test_where_the_host_is_slower_than_the_gpu_turns_are_as_few_as_the_host_allows():
    """A round takes 1 ms in the profile, but each call takes a second on the clock: five recordings
    do not fit.
    """
    ticking = Ticking()

    def moved(seconds: float) -> bool:
        one, timer = prompt_run(contender("unfused"), profile=cpu_trace, seconds=seconds)
        plain = timer.call_us

        def slow(run: Callable[[], Any]) -> float:
            ticking.seconds += 1
            return plain(run)

        timer.call_us = slow  # type: ignore[method-assign]
        (case,) = timed(one, StepClock(now=ticking.now)).cases
        assert case.call_us is not None
        return "reallocate" in timer.events[timer.events.index("call unfused") :]

    assert not moved(14.0)
    assert moved(15.0)


@pytest.mark.parametrize(
    ("round_s", "moves"), [(0.1, True), (1.3, True), (1.4, False), (10.0, False), (math.inf, False)]
)
def test_long_prefills_are_timed_where_they_lie_and_a_few_times(round_s, moves):
    plan = sampling_plan(round_s, 20.0, 0.01)
    assert (plan.warmup_rounds > 0) == moves
    if moves:
        assert plan.min_recordings * (plan.warmup_rounds + plan.min_rounds) * round_s <= 20
    else:
        assert (plan.min_recordings, plan.max_rounds) == (3, 1)
