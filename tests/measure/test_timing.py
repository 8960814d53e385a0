"""How samples, failures and changed outputs are handled; on a GPU, whether the stopwatch is right."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch
from ssdprof.measure.bench import WARM_CALLS, CaptureError, CudaBench, Recording
from ssdprof.measure.call import Run

from ssdprof.errors import MissingCapabilityError
from ssdprof.kernels.ssd.inputs import SSDOutput
from ssdprof.measure import faults
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.timing import Sampled, Spoilt, time_in_turns

PLAN = SamplingPlan(min_recordings=2, max_recordings=2, min_rounds=5, max_rounds=5)
SAMPLED = PLAN.max_recordings * (PLAN.warmup_rounds + PLAN.max_rounds)  # rounds


class FakeBench:
    """A call takes the run's `cost`, and a replay half of it."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.events: list[str] = []

    def relocate(self, _generator: np.random.Generator) -> None:
        self.events.append("relocate")

    def record(self, run: Run) -> Recording:
        output = run()
        self.events.append("record")
        return Recording(graph=run, output=output)

    def call_us(self, run: Run) -> float:
        self.events.append("call")
        run()
        return run.cost  # type: ignore[attr-defined]

    def device_us(self, recording: Recording) -> float:
        self.events.append("device")
        return recording.graph.cost / 2

    def warm_us(self, run: Run) -> float:
        self.events.append("warm")
        return run.cost / 4  # type: ignore[attr-defined]


class FakeRun:
    def __init__(self, cost: float, error: Exception | None = None) -> None:
        self.cost, self.error = cost, error

    def __call__(self) -> SSDOutput:
        if self.error is not None:
            raise self.error
        return SSDOutput(torch.full((1,), self.cost), torch.zeros(1))


def fine(_key: str, _output: SSDOutput) -> str:
    return ""


def test_calls_and_replays_of_all_take_turns_in_recordings_placed_anew() -> None:
    bench = FakeBench()
    session = time_in_turns({"a": FakeRun(200), "b": FakeRun(100)}, bench, PLAN, check=fine)
    rounds = 2 * (PLAN.warmup_rounds + PLAN.max_rounds)
    first, again = bench.events[: 3 + 2 * rounds], bench.events[3 + 2 * rounds : -2]
    for recording in (first, again):
        assert recording[:3] == ["relocate", "record", "record"]
        assert (recording.count("call"), recording.count("device")) == (rounds, rounds)
    timing = session.sampled["a"].timing()
    assert (timing.call_median_us, timing.device_median_us) == pytest.approx((200, 100))
    assert (timing.recordings, timing.samples) == (2, 10)


def test_each_clock_has_the_spread_of_its_own_samples() -> None:
    device = [np.array([10.0, 12.0]), np.array([8.0, 30.0, 9.0])]
    timing = Sampled(call=[np.array([50.0, 90.0]), np.array([40.0, 60.0])], device=device).timing()
    assert timing.device_spread is not None
    assert timing.call_spread is not None
    of_device, of_call = timing.device_spread, timing.call_spread
    assert (of_device.min_us, of_device.max_us, of_device.samples) == (8, 30, timing.samples)
    assert (of_call.min_us, of_call.max_us, of_call.samples) == (40, 90, 4)
    assert of_call.p95_us == pytest.approx(85.5)


def test_the_warm_clock_is_beside_the_others_and_only_where_it_is_asked_for() -> None:
    bench = FakeBench()
    runs = {"a": FakeRun(200), "b": FakeRun(100)}
    session = time_in_turns(runs, bench, replace(PLAN, warm=True), check=fine)
    assert [bench.events.count(kind) for kind in ("call", "device", "warm")] == [
        2 * SAMPLED,
        2 * SAMPLED + 2,
        2 * SAMPLED,
    ]
    timing = session.sampled["a"].timing()
    assert (timing.call_median_us, timing.device_median_us) == pytest.approx((200, 100))
    assert timing.warm is not None
    assert (timing.warm.median_us, timing.warm.calls) == (pytest.approx(50), WARM_CALLS)
    over = session.sampled["b"].speedup(session.sampled["a"], "a", 0.01).warm
    assert over is not None
    assert (over.ratio, over.verdict) == (pytest.approx(2), "faster")
    cold = time_in_turns(runs, FakeBench(), PLAN, check=fine).sampled
    assert cold["a"].timing().warm is None
    assert session.sampled["b"].speedup(cold["a"], "a", 0.01).warm is None


def test_no_recording_is_alive_when_the_next_place_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise memory would have to hold both the old and the new one."""
    recorded: list[weakref.ref[Recording]] = []
    record, relocate = FakeBench.record, FakeBench.relocate

    def remembered(bench: FakeBench, run: Run) -> Recording:
        recording = record(bench, run)
        recorded.append(weakref.ref(recording))
        return recording

    def checked(bench: FakeBench, generator: np.random.Generator) -> None:
        assert [one() for one in recorded] == [None] * len(recorded)
        relocate(bench, generator)

    monkeypatch.setattr(FakeBench, "record", remembered)
    monkeypatch.setattr(FakeBench, "relocate", checked)
    time_in_turns({"a": FakeRun(200), "b": FakeRun(100)}, FakeBench(), PLAN, check=fine)
    assert len(recorded) == 4


def test_what_cannot_be_recorded_a_second_time_has_no_time() -> None:
    class Fails(FakeRun):
        calls = 0

        def __call__(self) -> SSDOutput:
            self.calls += 1
            if self.calls > 2 + PLAN.max_rounds:  # recorded once, and called in each of its rounds
                raise torch.OutOfMemoryError("2 GiB more")
            return super().__call__()

    session = time_in_turns({"a": FakeRun(200), "b": Fails(100)}, FakeBench(), PLAN, check=fine)
    assert list(session.sampled) == ["a"]
    assert session.untimed["b"].startswith("b is not timed: no memory is left")


LAST_CALL = PLAN.max_recordings + SAMPLED + 1  # recorded, timed, and finally checked


@pytest.mark.parametrize("calls", [3, LAST_CALL - 1], ids=["while it is timed", "the last one"])
def test_a_later_call_that_raises_is_named_and_the_others_are_timed(calls: int) -> None:
    class Fails(FakeRun):
        calls = 0

        def __call__(self) -> SSDOutput:
            self.calls += 1
            if self.calls > calls:
                raise ValueError("no more calls")
            return super().__call__()

    session = time_in_turns({"a": FakeRun(200), "b": Fails(100)}, FakeBench(), PLAN, check=fine)
    assert session.spoilt == {"b": Spoilt("failed", "a later call raised ValueError: no more calls")}
    assert list(session.sampled) == ["a"]
    assert session.sampled["a"].timing().samples == PLAN.max_recordings * PLAN.max_rounds


@pytest.mark.parametrize("error", [CaptureError("operation not permitted"), torch.OutOfMemoryError("2 GiB more")])
def test_what_cannot_be_captured_is_named_and_the_others_are_timed(error: Exception) -> None:
    session = time_in_turns({"a": FakeRun(200), "b": FakeRun(100, error)}, FakeBench(), PLAN, check=fine)
    assert list(session.sampled) == ["a"]
    assert session.untimed["b"].startswith("b is not timed")
    assert str(error) in session.untimed["b"]


def test_nothing_left_to_time_is_no_error() -> None:
    session = time_in_turns({"a": FakeRun(1, CaptureError("no"))}, FakeBench(), PLAN, check=fine)
    assert (session.sampled, list(session.untimed)) == ({}, ["a"])


@pytest.mark.parametrize("event", ["record", "call_us", "device_us"])
def test_a_run_that_costs_the_gpu_while_it_is_timed_is_named(monkeypatch: pytest.MonkeyPatch, event: str) -> None:
    """It ran without a fault before: a fault may depend on other contents of memory."""
    timed = getattr(FakeBench, event)

    def faulty(bench: FakeBench, what: Any) -> object:
        if getattr(what, "graph", what).cost == 100:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return timed(bench, what)

    monkeypatch.setattr(faults, "_answers", lambda _: False)
    monkeypatch.setattr(FakeBench, event, faulty)
    with pytest.raises(MissingCapabilityError, match=r"^b left the GPU unusable"):
        time_in_turns({"a": FakeRun(200), "b": FakeRun(100)}, FakeBench(), PLAN, check=fine)


def test_a_call_whose_fault_shows_when_its_output_is_looked_at_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call returns before the GPU has finished."""

    def look(key: str, _output: SSDOutput) -> str:
        if key == "b":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return ""

    monkeypatch.setattr(faults, "_answers", lambda _: False)
    with pytest.raises(MissingCapabilityError, match=r"^b left the GPU unusable"):
        time_in_turns({"a": FakeRun(200), "b": FakeRun(100)}, FakeBench(), PLAN, check=look)


def test_outputs_are_looked_at_after_the_loop_from_a_replay_and_a_call() -> None:
    bench, seen = FakeBench(), []

    def check(key: str, output: SSDOutput) -> str:
        seen.append((key, float(output.out), len(bench.events)))
        return "" if key == "a" else "head 3 is wrong"

    session = time_in_turns({"a": FakeRun(200), "b": FakeRun(100)}, bench, PLAN, check=check)
    loop = 2 * 3 + 2 * 2 * SAMPLED
    assert [(key, value) for key, value, _ in seen] == [("a", 200), ("a", 200), ("b", 100)]
    assert min(events for *_, events in seen) > loop
    assert list(session.sampled) == ["a"]
    assert session.spoilt == {"b": Spoilt("inaccurate", "after it was timed: head 3 is wrong")}


def test_the_two_times_make_two_ratios_and_two_verdicts() -> None:
    """At 1K tokens a fused kernel halves the launch overhead and hardly changes the work."""
    rounds = np.random.default_rng(0).normal(1, 0.003, (4, 5, 8))
    unfused = Sampled(call=290 * rounds[0], device=50 * rounds[1])
    fused = Sampled(call=145 * rounds[2], device=50 * rounds[3])
    speedup = fused.speedup(unfused, "unfused exact, fp32 states", 0.01)
    assert speedup.baseline == "unfused exact, fp32 states"
    assert speedup.call_ratio == pytest.approx(2, rel=0.01)
    assert speedup.call_interval.low > 1.9
    assert speedup.device_ratio == pytest.approx(1, rel=0.01)
    assert (speedup.verdict, speedup.call_verdict) == ("no difference", "faster")
    assert speedup.smallest_difference == 0.01
    assert unfused.speedup(Sampled(call=fused.call, device=20 * rounds[3]), "other", 0.01).verdict == "slower"


# --- on a GPU


@pytest.fixture
def bench() -> CudaBench:
    return CudaBench(torch.device("cuda"))


def sleeping(milliseconds: float) -> Callable[[], SSDOutput]:
    """Work of a known duration: a kernel that spins for a number of cycles, first timed separately."""

    def run() -> SSDOutput:
        torch.cuda._sleep(int(milliseconds * 1e6))
        return SSDOutput(torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda"))

    return run


@pytest.mark.gpu
def test_device_time_grows_with_the_work(bench: CudaBench) -> None:
    short, long = (bench.record(sleeping(milliseconds)) for milliseconds in (1, 4))
    ratios = [bench.device_us(long) / bench.device_us(short) for _ in range(5)]
    assert np.median(ratios) == pytest.approx(4, rel=0.1)


@pytest.mark.gpu
def test_call_time_includes_launching_and_device_time_does_not(bench: CudaBench) -> None:
    x = torch.zeros(1, device="cuda")

    def many_small() -> SSDOutput:
        y = x
        for _ in range(100):
            y = y + 1
        return SSDOutput(y, x)

    recording = bench.record(many_small)
    call = np.median([bench.call_us(many_small) for _ in range(10)])
    device = np.median([bench.device_us(recording) for _ in range(10)])
    assert call > 1.5 * device
    assert recording.output[0].item() == 100


@pytest.mark.gpu
def test_the_cache_is_cold(bench: CudaBench) -> None:
    """A sum over 16 MB: from L2 it is far faster than the bench's result."""
    data = torch.zeros(4 << 20, device="cuda")
    sums = 20

    def read() -> SSDOutput:
        return SSDOutput(data.sum(), data[:1])

    def read_often() -> SSDOutput:
        for _ in range(sums - 1):
            data.sum()
        return SSDOutput(data.sum(), data[:1])

    once, often = bench.record(read), bench.record(read_often)
    cold = np.median([bench.device_us(once) for _ in range(10)])
    warm = np.median([bench.device_us(often) for _ in range(10)]) / sums
    assert cold > 1.15 * warm


@pytest.mark.gpu
def test_the_warm_clock_finds_its_inputs_in_the_cache_and_hides_launches(bench: CudaBench) -> None:
    data = torch.zeros(4 << 20, device="cuda")

    def read() -> SSDOutput:
        return SSDOutput(data.sum(), data[:1])

    warm = np.median([bench.warm_us(read) for _ in range(10)])
    assert np.median([bench.call_us(read) for _ in range(10)]) > 1.15 * warm


def places_and_reserved_bytes() -> tuple[set[int], list[int]]:
    """Places and reserved bytes of six recordings, each after `relocate`."""
    bench, generator = CudaBench(torch.device("cuda")), np.random.default_rng(0)

    def run() -> SSDOutput:
        return SSDOutput(torch.zeros(4 << 20, device="cuda"), torch.zeros(1, device="cuda"))

    places, reserved = set(), []
    for _ in range(6):
        bench.relocate(generator)
        recording = bench.record(run)
        places.add(recording.output[0].data_ptr())
        reserved.append(torch.cuda.memory_reserved())
        del recording
    return places, reserved


@pytest.mark.gpu
def test_recordings_of_a_new_place_lie_elsewhere_and_old_ones_leave_no_memory() -> None:
    """In a separate process, because gaps between tensors of other tests may hold every recording."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        places, reserved = pool.submit(places_and_reserved_bytes).result()
    assert len(places) > 1
    assert max(reserved) - min(reserved) <= 128 << 20  # paddings differ by up to 62 MiB


@pytest.mark.gpu
def test_a_call_that_waits_for_the_gpu_cannot_be_captured(bench: CudaBench) -> None:
    def waits() -> SSDOutput:
        x = torch.zeros(1, device="cuda")
        return SSDOutput(x + float(x), x)

    with pytest.raises(CaptureError):
        bench.record(waits)
    bench.record(sleeping(0.01))
