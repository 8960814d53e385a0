"""How samples, failures and changed outputs are handled; on a GPU, whether the timer is right."""

import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from copy import copy
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch

from ssdprof.errors import MissingCapabilityError
from ssdprof.kernels.ssd.inputs import SSDOutput
from ssdprof.measure import first_run as faults
from ssdprof.measure import timing
from ssdprof.measure.first_run import Run
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.timing import CallError, CudaTimer, elapsed_us, record, time_in_turns

PLAN = SamplingPlan(min_recordings=2, max_recordings=2, min_rounds=5, max_rounds=5)
SAMPLED = PLAN.max_recordings * (PLAN.warmup_rounds + PLAN.max_rounds)  # rounds


class FakeTimer(CudaTimer):
    """A call takes the run's `cost`, and a replay half of it."""

    device = torch.device("cpu")

    def __init__(self):
        self.events: list[str] = []

    def reallocate(self, _generator: np.random.Generator):
        self.events.append("reallocate")

    def record(self, run: Run) -> tuple[Any, Any]:
        output = run()
        self.events.append("record")
        return copy(run), output

    def call_us(self, run: Run) -> float:
        self.events.append("call")
        run()
        return run.cost  # type: ignore[attr-defined]

    def device_us(self, graph) -> float:
        self.events.append("device")
        return float(graph.cost) / 2

    def unseen(self, *_: object) -> str:
        return ""


class FakeRun:
    def __init__(self, cost: float):
        self.cost = cost

    def __call__(self) -> SSDOutput:
        return SSDOutput(torch.full((1,), self.cost), torch.zeros(1))


def fine(_key: str, run: Run) -> str:
    run()
    return ""


def test_calls_and_replays_of_all_take_turns_in_recordings_placed_anew():
    timer = FakeTimer()
    found = time_in_turns(
        {"a": FakeRun(200), "b": FakeRun(100)}, timer, PLAN, check=fine, process="one"
    )
    rounds = 2 * (PLAN.warmup_rounds + PLAN.max_rounds)
    first = timer.events[: 3 + 2 * rounds]
    again = timer.events[3 + 2 * rounds : -2]
    for recording in (first, again):
        assert recording[:3] == ["reallocate", "record", "record"]
        assert (recording.count("call"), recording.count("device")) == (rounds, rounds)
    call, device = found["a"]["samples"]
    assert (call.process, call.clock, call.us) == ("one", "call", ((200.0,) * 5,) * 2)
    assert (device.process, device.clock, device.us) == ("one", "device", ((100.0,) * 5,) * 2)


def test_samples_have_five_digits():
    assert record("one", "call", [np.array([123.45678]), np.array([0.0123456])]).us == (
        (123.46,),
        (0.012346,),
    )


def test_no_recording_is_alive_when_the_next_place_is_looked_for():
    """Otherwise memory would have to hold both the old and the new one."""
    recorded = []

    class Remembers(FakeTimer):
        def record(self, run: Run) -> tuple[Any, Any]:
            recording = super().record(run)
            recorded.append(weakref.ref(recording[0]))
            return recording

        def reallocate(self, _generator: np.random.Generator):
            assert not any(graph() for graph in recorded)

    time_in_turns({"a": FakeRun(200), "b": FakeRun(100)}, Remembers(), PLAN, check=fine)
    assert len(recorded) == 4


LAST_CALL = PLAN.max_recordings + SAMPLED + 1  # recorded, timed, and finally checked
LATER = "a later call raised ValueError: no more calls (test_timing.py:"


@pytest.mark.parametrize(
    ("calls", "error", "why"),
    [
        (3, ValueError("no more calls"), LATER),  # while it is timed
        (LAST_CALL - 1, ValueError("no more calls"), LATER),
        (
            0,
            CallError("not permitted"),
            "b is not timed: it cannot be captured as a CUDA graph: not",
        ),
        (0, torch.OutOfMemoryError("2 GiB"), "b is not timed: no memory is left"),
        # recorded once, and called in each of its rounds
        (2 + PLAN.max_rounds, torch.OutOfMemoryError("2 GiB"), "b is not timed: no memory is left"),
    ],
)
def test_a_call_that_raises_is_named_and_the_others_are_timed(calls, error, why):
    class Fails(FakeRun):
        calls = 0

        def __call__(self) -> SSDOutput:
            self.calls += 1
            if self.calls > calls:
                raise error
            return super().__call__()

    found = time_in_turns({"a": FakeRun(200), "b": Fails(100)}, FakeTimer(), PLAN, check=fine)
    assert found["b"].get("status") == ("failed" if why is LATER else None)
    assert found["b"]["reason"].startswith(why)
    assert np.shape(found["a"]["samples"][1].us) == (PLAN.max_recordings, PLAN.max_rounds)


@pytest.mark.parametrize("event", ["record", "call_us", "device_us", "unseen"])
def test_a_run_that_costs_the_gpu_while_it_is_timed_is_named(monkeypatch, event):
    """A fault may depend on other contents of memory, and show when the time is checked."""
    timed = getattr(FakeTimer, event)

    def faulty(timer: FakeTimer, run, *others):
        if run.cost == 100:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return timed(timer, run, *others)

    monkeypatch.setattr(faults, "_answers", lambda _: False)
    monkeypatch.setattr(FakeTimer, event, faulty)
    with pytest.raises(MissingCapabilityError, match=r"^b left the GPU unusable"):
        time_in_turns({"a": FakeRun(200), "b": FakeRun(100)}, FakeTimer(), PLAN, check=fine)


def test_a_patched_clock_changes_nothing(monkeypatch):
    """A user's kernel is imported later than `measure.timing`."""

    def patched(*_, **__) -> float:
        pytest.fail("the patch was called")

    monkeypatch.setattr(timing, "_current_stream", object)
    for name in ("record", "synchronize", "elapsed_time"):
        monkeypatch.setattr(torch.cuda.Event, name, patched)
    monkeypatch.setattr(torch.cuda, "Event", patched)
    with pytest.raises(TypeError):  # of torch's own function, which gets no event of its own
        elapsed_us(lambda: None, (object(), object()))


@pytest.mark.parametrize(
    ("replayed", "profiled", "accused"),
    [
        (100, [109] * 9, True),
        (100, [106] + [109] * 8, False),  # only others' work was in the way
        (108, [115] * 3, False),  # the GPU has become slower
        (200, [150] * 9, True),  # earlier recordings skipped work
    ],
)
def test_kernels_may_take_longer_than_the_samples_on_a_gpu_that_became_slower(
    monkeypatch, replayed, profiled, accused
):
    spans = [{"cat": "kernel", "name": "scan", "ts": 0, "dur": us} for us in profiled]
    monkeypatch.setattr(FakeTimer, "_evict_l2", lambda _: None)
    monkeypatch.setattr(timing, "_synchronize", lambda _: None)
    monkeypatch.setattr(timing, "traced", lambda *_: [spans.pop()])
    run = FakeRun(2 * replayed)
    assert bool(CudaTimer.unseen(FakeTimer(), run, run, [np.full(5, 100.0)])) == accused
    assert not spans


# --- on a GPU


@pytest.fixture
def timer() -> CudaTimer:
    return CudaTimer(torch.device("cuda"))


def sleeping(milliseconds: float) -> Callable[[], SSDOutput]:
    """Work of a known duration: a kernel that spins for a number of cycles, first timed
    separately.
    """

    def run() -> SSDOutput:
        torch.cuda._sleep(int(milliseconds * 1e6))
        return SSDOutput(torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda"))

    return run


@pytest.mark.gpu
def test_device_time_grows_with_the_work(timer: CudaTimer):
    (short, _), (long, _) = (timer.record(sleeping(milliseconds)) for milliseconds in (1, 4))
    ratios = [timer.device_us(long) / timer.device_us(short) for _ in range(5)]
    assert np.median(ratios) == pytest.approx(4, rel=0.1)


@pytest.mark.gpu
def test_call_time_includes_launching_and_device_time_does_not(timer: CudaTimer):
    x = torch.zeros(1, device="cuda")

    def many_small() -> SSDOutput:
        y = x
        for _ in range(100):
            y = y + 1
        return SSDOutput(y, x)

    graph, output = timer.record(many_small)
    call = np.median([timer.call_us(many_small) for _ in range(10)])
    device = np.median([timer.device_us(graph) for _ in range(10)])
    assert call > 1.5 * device
    assert output[0].item() == 100


@pytest.mark.gpu
def test_the_cache_is_cold(timer: CudaTimer):
    """A sum over 16 MB: from L2 it is far faster than the timer's result."""
    data = torch.zeros(4 << 20, device="cuda")

    def time_us(sums: int) -> float:
        def read() -> SSDOutput:
            for _ in range(sums):
                total = data.sum()
            return SSDOutput(total, data[:1])

        graph, _ = timer.record(read)
        return float(np.median([timer.device_us(graph) for _ in range(10)]))

    assert time_us(1) > 1.15 * time_us(20) / 20


def places_and_reserved_bytes() -> tuple[set[int], list[int]]:
    """Places and reserved bytes of six recordings, each after `relocate`."""
    timer = CudaTimer(torch.device("cuda"))
    generator = np.random.default_rng(0)

    def run() -> SSDOutput:
        return SSDOutput(torch.zeros(4 << 20, device="cuda"), torch.zeros(1, device="cuda"))

    places = set()
    reserved = []
    for _ in range(6):
        timer.reallocate(generator)
        recording = timer.record(run)
        places.add(recording[1][0].data_ptr())
        reserved.append(torch.cuda.memory_reserved())
        del recording
    return places, reserved


@pytest.mark.gpu
def test_recordings_of_a_new_place_lie_elsewhere_and_old_ones_leave_no_memory():
    """In a separate process, because gaps between tensors of other tests may hold every
    recording.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        places, reserved = pool.submit(places_and_reserved_bytes).result()
    assert len(places) > 1
    assert max(reserved) - min(reserved) <= 128 << 20  # paddings differ by up to 62 MiB


@pytest.mark.gpu
def test_a_call_that_waits_for_the_gpu_cannot_be_captured(timer: CudaTimer):
    def waits() -> SSDOutput:
        x = torch.zeros(1, device="cuda")
        return SSDOutput(x + float(x), x)

    with pytest.raises(CallError):
        timer.record(waits)
    timer.record(sleeping(0.01))
