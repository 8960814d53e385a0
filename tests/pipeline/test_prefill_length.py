"""A length through all contenders, on the CPU: statuses, rounds, Amdahl's law, parts, and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from prefill_fakes import REST_US, FakeBench, cpu_trace

from ssdprof import kernels
from ssdprof.capture.conv_and_norm import ConvAndNorm
from ssdprof.checkpoint.meta import find_mixers
from ssdprof.errors import BadInputError
from ssdprof.kernels import UnsupportedError
from ssdprof.kernels.registry import Implementation
from ssdprof.measure.trace import Trace
from ssdprof.kernels.registry import Implementation
# TODO ssdprof.pipeline.prefill_contender: Contender, Prompted
from ssdprof.jobs.prefill import sampling_plan
# TODO ssdprof.pipeline.prefill_length: LengthTimer
from ssdprof.jobs.prefill import StepClock
from ssdprof.schema import EXACT_FP32
from ssdprof.schema.prefill import PrefillCase, PrefillLength, StepTime, Surroundings

US = {"unfused": 100.0, "fused": 40.0, "library": 60.0}
LAYERS, LENGTH = 3, 12


class Noted(Contender):
    """Records in the bench that it ran."""

    bench: FakeBench

    def compute(self, call: Any) -> Any:
        self.bench.ran.append(self.name)
        return super().compute(call)


def contender(bench: FakeBench, name: str, surroundings: Surroundings = "model", run: Any = None) -> Noted:
    """Computes with the reference, which is faster here than kernels in the interpreter."""
    base = kernels.get("ssd", "reference")
    implementation = Implementation(operator="ssd", name=name, run=run or base.run, plan=base.plan)
    named = Implementation(name=name, kind="bundled", implementation=implementation)
    noted = Noted(name=name, named={"ssd": named}, precision=EXACT_FP32, surroundings=surroundings)
    object.__setattr__(noted, "bench", bench)
    return noted


def unseen(run: Callable[[], object]) -> Trace:
    """A profiler that sees nothing; then there are few rounds."""
    run()
    return []


class Ticking:
    """A clock on which every prefill and every profile takes a second."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def profile(self, run: Callable[[], object]) -> Trace:
        self.seconds += 1
        return cpu_trace(run)


def timer(
    contenders: Callable[[FakeBench], list[Contender]],
    *,
    profile: Callable[[Callable[[], object]], Trace] = unseen,
    segment: int = LENGTH,
    **changes: Any,
) -> tuple[LengthTimer, FakeBench]:
    bench = FakeBench(US)
    model = tiny_models.shared("mamba2")
    sites = find_mixers(model)
    prompted = Prompted(
        model=model,
        ids=tiny_models.prompt(LENGTH),
        segment_length=segment,
        sites=sites,
        layer=tiny_models.layer_refs("mamba2")[1],
        bundled=ConvAndNorm(sites),
    )
    settings: dict[str, Any] = {"baseline": "unfused", "seconds": 0.01, "smallest_difference": 0.01} | changes
    return LengthTimer(prompted=prompted, contenders=contenders(bench), bench=bench, profile=profile, **settings), bench


def timed(one: LengthTimer) -> PrefillLength:
    one.run()
    return one.result()


def cases(length: PrefillLength) -> dict[str, PrefillCase]:
    return {case.implementation: case for case in length.cases}


@pytest.mark.parametrize("surroundings", ["model", "bundled"])
def test_times_ratios_and_amdahls_law_agree_where_the_operator_is_all_that_differs(surroundings: Surroundings) -> None:
    one, _ = timer(lambda bench: [contender(bench, name, surroundings) for name in US])
    length = timed(one)
    assert (length.seqlen, length.batch, length.operator_calls, length.layer.index) == (LENGTH, 1, LAYERS, 1)
    found = cases(length)
    assert list(found) == list(US)
    for name, case in found.items():
        assert case.surroundings == surroundings
        assert case.status == "passed", case.reason
        assert case.call is not None
        assert case.call.median_us == pytest.approx(REST_US + LAYERS * US[name])
        assert case.alone_us == pytest.approx(US[name])
        if name == "unfused":
            assert case.speedup is None
            continue
        assert case.speedup is not None
        expected = (REST_US + LAYERS * US["unfused"]) / (REST_US + LAYERS * US[name])
        assert case.speedup.ratio == pytest.approx(expected)
        assert case.speedup.predicted == pytest.approx(expected)
        assert case.speedup.verdict == "faster"
        assert (case.logits_rms, case.same_token) == (0.0, True)


def test_in_segments_the_operator_counts_once_for_each() -> None:
    one, _ = timer(lambda bench: [contender(bench, name) for name in ("unfused", "fused")], segment=4)
    length = timed(one)
    assert (length.segment_length, length.operator_calls) == (4, 3 * LAYERS)
    speedup = cases(length)["fused"].speedup
    assert speedup is not None
    assert speedup.predicted == pytest.approx((REST_US + 9 * 100) / (REST_US + 9 * 40))


def test_a_column_adds_up_to_its_call() -> None:
    one, _ = timer(lambda bench: [contender(bench, "unfused")], profile=cpu_trace)
    (case,) = timed(one).cases
    assert case.call is not None
    assert case.idle_us is not None
    assert {part.name for part in case.parts} >= {"mixer", "gated norm", "rest"}
    assert sum(part.gpu_us for part in case.parts) + case.idle_us == pytest.approx(case.call.median_us)


def test_all_take_turns_and_nothing_moves_without_a_warm_up() -> None:
    one, bench = timer(lambda bench: [contender(bench, name) for name in US])
    one.run()
    first = bench.events.index("call fused")
    calls = [event for event in bench.events if event.startswith("call ")]
    assert "relocate" not in bench.events[min(first, *(bench.events.index(f"call {name}") for name in US)) :]
    for number in range(0, len(calls), 3):
        assert sorted(calls[number : number + 3]) == ["call fused", "call library", "call unfused"]


def test_with_time_enough_every_recording_lies_elsewhere() -> None:
    clock = StepClock(now=Ticking().now)
    one, bench = timer(lambda bench: [contender(bench, "unfused")], profile=cpu_trace, seconds=5.0, clock=clock)
    (case,) = timed(one).cases
    events = [event for event in bench.events if event in ("relocate", "call unfused")]
    sampled = events[4:]  # three of the layer only, and the first round
    assert case.call is not None
    assert case.call.recordings == sampled.count("relocate") >= 5
    assert sampled[0] == "relocate"


def test_without_a_profile_there_are_times_and_no_parts() -> None:
    one, _ = timer(lambda bench: [contender(bench, "unfused")])
    (case,) = timed(one).cases
    assert (case.parts, case.idle_us) == ((), None)
    assert case.call is not None


def raising(error: Exception) -> Callable[..., Any]:
    def run(*_: Any) -> Any:
        raise error

    return run


def nan(inputs: Any, precision: Any) -> Any:
    out, final_states = kernels.get("ssd", "reference").run(inputs, precision)
    return out * math.nan, final_states


def zeros(inputs: Any, precision: Any) -> Any:
    out, final_states = kernels.get("ssd", "reference").run(inputs, precision)
    return torch.zeros_like(out), final_states


def test_what_goes_wrong_is_a_status_and_has_no_time() -> None:
    wrong = {
        "refusing": raising(UnsupportedError("refusing: no bf16")),
        "large": raising(torch.OutOfMemoryError("8 GiB more\nand a page of advice")),
        "broken": raising(RuntimeError("misaligned address")),
        "nan": nan,
    }
    one, bench = timer(
        lambda bench: [contender(bench, "unfused"), *(contender(bench, name, run=run) for name, run in wrong.items())]
    )
    found = cases(timed(one))
    assert {name: found[name].status for name in wrong} == {
        "refusing": "refused",
        "large": "out of memory",
        "broken": "failed",
        "nan": "nonfinite",
    }
    assert found["large"].reason == "8 GiB more"
    assert found["broken"].reason == "RuntimeError: misaligned address"
    assert all(found[name].call is None for name in wrong)
    assert {event for event in bench.events if event.startswith("call")} == {"call unfused"}


def test_another_answer_shows() -> None:
    one, _ = timer(lambda bench: [contender(bench, "unfused"), contender(bench, "fused", run=zeros)])
    case = cases(timed(one))["fused"]
    assert case.logits_rms is not None
    assert case.logits_rms > 0.1


def test_without_its_baseline_a_case_has_a_time_and_no_speedup() -> None:
    one, _ = timer(
        lambda bench: [contender(bench, "unfused", run=raising(RuntimeError("no"))), contender(bench, "fused")]
    )
    case = cases(timed(one))["fused"]
    assert case.call is not None
    assert case.speedup is None


def test_nothing_passed_is_no_error() -> None:
    one, _ = timer(lambda bench: [contender(bench, "unfused", run=raising(RuntimeError("no")))])
    assert [case.status for case in timed(one).cases] == ["failed"]


def test_a_model_that_bypasses_its_operator_is_refused() -> None:
    one, _ = timer(lambda bench: [contender(bench, "unfused")], segment=1)
    with pytest.raises(BadInputError, match=r"bypasses its operator|single token"):
        one.run()


def test_an_interrupt_passes_and_the_model_is_restored() -> None:
    class Interrupted(Noted):
        def compute(self, call: Any) -> Any:  # noqa: ARG002
            raise KeyboardInterrupt

    def contenders(bench: FakeBench) -> list[Contender]:
        one = contender(bench, "unfused", "bundled")
        return [Interrupted(**{name: value for name, value in vars(one).items() if name != "bench"})]

    one, _ = timer(contenders)
    site = one.prompted.sites[0]
    function = site.namespace[site.function]
    with pytest.raises(KeyboardInterrupt):
        one.run()
    assert site.namespace[site.function] is function
    assert "forward" not in vars(site.module.norm)


def test_every_step_is_told_with_its_seconds() -> None:
    steps: list[StepTime] = []
    ticking = Ticking()
    clock = StepClock(on_step=steps.append, now=ticking.now).within("12 tokens")
    one, _ = timer(
        lambda bench: [contender(bench, "unfused"), contender(bench, "fused")], clock=clock, profile=ticking.profile
    )
    one.run()
    assert [(step.what, step.seconds) for step in steps] == [
        ("12 tokens, unfused: first call of the operator", 0),
        ("12 tokens, fused: first call of the operator", 0),
        ("12 tokens, one layer's operator alone", 0),
        ("12 tokens, unfused: a profiled prefill", 1),
        ("12 tokens, fused: a profiled prefill", 1),
        ("12 tokens, prefills in turns", 0),
    ]


def test_what_a_budget_does_not_reach_is_named_and_the_rest_is_kept() -> None:
    ticking = Ticking()
    one, bench = timer(
        lambda bench: [contender(bench, name) for name in US],
        clock=StepClock(1.5, now=ticking.now),
        profile=ticking.profile,
    )
    found = cases(timed(one))
    assert list(found) == ["unfused", "fused"]
    assert one.unseen == ("library",)
    assert all(case.parts and case.call is None for case in found.values())
    assert not [event for event in bench.events if event.startswith("call")]


def test_turns_that_do_not_fit_are_not_begun() -> None:
    """The profile gives the duration of a round, which exceeds the remaining time here."""

    def slow(run: Callable[[], object]) -> Trace:
        return [event | {"dur": 1e6} if event.get("cat") == "kernel" else event for event in cpu_trace(run)]

    one, bench = timer(lambda bench: [contender(bench, "unfused")], clock=StepClock(10), profile=slow)
    (case,) = timed(one).cases
    assert case.status == "passed"
    assert case.call is None
    assert "s of the budget were left" in case.reason
    assert not [event for event in bench.events if event.startswith("call")]


def test_where_the_host_is_slower_than_the_gpu_turns_are_as_few_as_the_host_allows() -> None:
    """A round takes 1 ms in the profile, but each call takes a second on the clock: five recordings do not fit."""
    ticking = Ticking()

    def moved(seconds: float) -> bool:
        one, bench = timer(
            lambda bench: [contender(bench, "unfused")],
            clock=StepClock(now=ticking.now),
            profile=cpu_trace,
            seconds=seconds,
        )
        call_us = bench.call_us

        def slow(run: Callable[[], Any]) -> float:
            ticking.seconds += 1
            return call_us(run)

        bench.call_us = slow  # type: ignore[method-assign]
        (case,) = timed(one).cases
        assert case.call is not None
        return "relocate" in bench.events[bench.events.index("call unfused") :]

    assert not moved(14.0)
    assert moved(15.0)


def test_one_call_of_the_operator_compiles_and_one_prefill_is_profiled() -> None:
    """A prefill of 128K tokens takes seconds.  Before the rounds there is one of each, and one up to the layer."""
    one, bench = timer(lambda bench: [contender(bench, name) for name in ("unfused", "fused")])
    before: list[str] = []
    first = one._sample

    def sample() -> None:
        before[:] = bench.ran
        first()

    one._sample = sample  # type: ignore[method-assign]
    one.run()
    # both at the first layer, whose output is the baseline's; the second is `layer`
    assert before == ["unfused", "fused", "unfused", *["unfused"] * LAYERS, *["fused"] * LAYERS]


def test_in_segments_the_profile_follows_a_whole_prefill() -> None:
    """Later segments have initial states, and may compile or tune kernels that the first call did not need."""
    ran: list[int] = []

    def profile(run: Callable[[], object]) -> Trace:
        ran.append(len(bench.ran))
        run()
        return []

    one, bench = timer(lambda bench: [contender(bench, "unfused")], profile=profile, segment=4)
    one.run()
    assert ran[0] >= 3 * LAYERS


@pytest.mark.parametrize(
    ("round_s", "moves"), [(0.1, True), (1.3, True), (1.4, False), (10.0, False), (math.inf, False)]
)
def test_long_prefills_are_timed_where_they_lie_and_a_few_times(round_s: float, moves: bool) -> None:
    plan = sampling_plan(round_s, 20.0, 0.01)
    assert (plan.warmup_rounds > 0) == moves
    if moves:
        assert plan.min_recordings * (plan.warmup_rounds + plan.min_rounds) * round_s <= 20
    else:
        assert (plan.min_recordings, plan.max_rounds) == (3, 1)
