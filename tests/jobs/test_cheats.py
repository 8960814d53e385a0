"""Kernels that look faster than they are: what is found without a GPU, and what on one.

A lower precision than declared is what `finer inputs` finds (tests/measure/test_probes.py).  A
kernel that calls the library that it replaces is shown by its launches.  Reads past shared memory
are not found.
"""

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from command_line import Answer, latest
from fakes import RAN, FakeTimer, compared, entries, inputs, right

from ssdprof import operators
from ssdprof.core.case import Case
from ssdprof.core.statistics import Estimate
from ssdprof.jobs.compare import Entry
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.inputs import SSDOutput
from ssdprof.measure import first_run, timing
from ssdprof.measure.accuracy import fingerprint
from ssdprof.operators.implementations import own_implementation

LATE = "it leaves work to another stream or thread: its output changes after the call"
OTHER_NUMBERS = "with other numbers at the same addresses of the inputs, out, head"
NOT_FINITE = "not finite in "


def cheats(entry: Entry, run: Callable[[], SSDOutput]):
    cheating = replace(entry.call.implementation, run=lambda *_: run())
    entry.call = replace(entry.call, implementation=cheating)


def cached(entry: Entry, *, copied: bool) -> Callable[[], SSDOutput]:
    """Computes once, and later returns what it has stored."""
    stored = []

    def run() -> SSDOutput:
        RAN.append(("cheat", 1.0))
        stored.append(stored[0] if stored else right(entry.call.inputs))
        return SSDOutput(*(tensor.clone() for tensor in stored[0])) if copied else stored[0]

    return run


def stale(entry: Entry) -> Callable[[], SSDOutput]:
    """Hopes that new memory still holds the answer of an earlier call."""
    calls = []

    def run() -> SSDOutput:
        RAN.append(("cheat", 1.0))
        calls.append(None)
        output = right(entry.call.inputs)
        return output if len(calls) == 1 else SSDOutput(*map(torch.empty_like, output))

    return run


class NothingReplayed(FakeTimer):
    """A kernel that does nothing while its graph is captured."""

    def device_us(self, graph) -> float:
        return float(graph[1])


@pytest.mark.parametrize(
    ("cheat", "timer", "why"),
    [
        (partial(cached, copied=False), FakeTimer(), NOT_FINITE),
        (partial(cached, copied=True), FakeTimer(), OTHER_NUMBERS),
        (lambda entry: entry.call.run, NothingReplayed(), NOT_FINITE),
        (stale, FakeTimer(), "out"),
    ],
    ids=["stored memory", "a copy of stored memory", "nothing under capture", "stale memory"],
)
def test_a_kernel_that_does_not_compute_while_it_is_timed_has_no_time(cheat, timer: FakeTimer, why):
    (entry,) = entries("cheat", 1.0)
    before = fingerprint(*entry.call.inputs.tensors.values())
    cheats(entry, cheat(entry))
    (case,) = compared([entry], timer=timer).values()
    assert (case.result, case.samples) == ("inaccurate", ())
    assert case.why.startswith("after it was timed: ")
    assert why in case.why
    assert fingerprint(*entry.call.inputs.tensors.values()) == before


def test_what_a_thread_computes_after_the_call_is_no_output(monkeypatch):
    """The threads write after the output has been read once, and before it is read again."""
    threads = []
    calls = []
    was_read = threading.Event()

    def read(*tensors: torch.Tensor) -> tuple[int, ...]:
        bits = fingerprint(*tensors)
        was_read.set()
        for thread in threads:
            thread.join()
        return bits

    def later(output: SSDOutput) -> SSDOutput:
        empty = SSDOutput(*map(torch.zeros_like, output))

        def compute():
            was_read.wait(60)
            for target, tensor in zip(empty, output, strict=True):
                target.copy_(tensor)

        was_read.clear()
        threads.append(threading.Thread(target=compute))
        threads[-1].start()
        return empty

    def when_timed(output: SSDOutput) -> SSDOutput:
        calls.append(None)
        return output if len(calls) == 1 else later(output)

    monkeypatch.setattr(first_run, "fingerprint", read)
    cases = compared(
        entries("at once", spoil=later), entries("when timed", spoil=when_timed), timer=FakeTimer()
    )
    assert (cases["at once"].result, cases["at once"].why) == ("failed", LATE)
    assert (cases["when timed"].result, cases["when timed"].samples) == ("inaccurate", ())
    assert cases["when timed"].why == f"after it was timed: {LATE}"


def test_a_tensor_that_computes_when_it_is_read_is_refused():
    class Lazy(torch.Tensor): ...

    implementation = own_implementation(
        operators.get("ssd"),
        "mine:lazy",
        lambda given: (right(given).out.as_subclass(Lazy), right(given)[1]),
    )
    with pytest.raises(TypeError, match="must return tensors, and out is Lazy"):
        implementation.run(inputs(), Precision())


# --- on a GPU

KERNELS = """
import threading
import time

import torch
from ssdprof.kernels import get
from ssdprof.kernels.precision import Precision

STORED = {}
elapsed_time = torch.cuda.Event.elapsed_time


def right(inputs):
    return tuple(get("ssd", "unfused").run(inputs, Precision()))


def empty(inputs):
    return torch.empty_like(inputs.x), torch.empty(inputs.states_shape, device=inputs.x.device)


def stored(inputs, key):
    if key not in STORED:
        STORED[key] = right(inputs)
    return STORED[key]


def by_address(inputs):
    return stored(inputs, inputs.x.data_ptr())


def by_address_copied(inputs):
    return tuple(tensor.clone() for tensor in stored(inputs, inputs.x.data_ptr()))


def by_content(inputs):
    if torch.cuda.is_current_stream_capturing():
        return right(inputs)
    key = inputs.x.double().sum().item(), str(inputs.cu_seqlens)
    return tuple(tensor.clone() for tensor in stored(inputs, key))


def nothing_under_capture(inputs):
    return empty(inputs) if torch.cuda.is_current_stream_capturing() else right(inputs)


def stale(inputs):
    STORED["calls"] = STORED.get("calls", 0) + 1
    return right(inputs) if STORED["calls"] == 1 else empty(inputs)


def another_stream(inputs):
    output, stream = empty(inputs), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for own, tensor in zip(output, right(inputs)):
            own.copy_(tensor)
    return output


def in_a_thread(inputs):
    output = tuple(tensor.zero_() for tensor in empty(inputs))

    def compute():
        time.sleep(0.05)
        with torch.no_grad():
            for own, tensor in zip(output, right(inputs)):
                own.copy_(tensor)

    threading.Thread(target=compute).start()
    return output


def patching_the_clock(inputs):
    torch.cuda.Event.elapsed_time = lambda start, stop: elapsed_time(start, stop) / 2
    return right(inputs)
"""


def run(function: str) -> tuple[int, dict[str, Case]]:
    name = f"cheating_kernels:{function}"
    answer = Answer(f"run demo --seq 8k --layers 0 --dtypes exact --impl unfused,{name}")
    found = {case.implementation: case for case in latest("run").cases}
    assert found["unfused"].device_us, found["unfused"].why
    return answer.code, {"cheat": found[name], "unfused": found["unfused"]}


def us(estimate: Estimate | None) -> float:
    return estimate.value


@pytest.fixture
def here(users_folder: Path, monkeypatch):
    (users_folder / "cheating_kernels.py").write_text(KERNELS)
    # is as before at the end
    monkeypatch.setattr(torch.cuda.Event, "elapsed_time", torch.cuda.Event.elapsed_time)


@pytest.mark.gpu
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("by_address", ""),
        ("by_address_copied", ""),
        ("nothing_under_capture", NOT_FINITE),
        ("stale", ""),
        ("another_stream", LATE),
        ("in_a_thread", LATE),
    ],
)
def test_a_cheat_on_a_gpu_has_a_reason_and_no_time(function, why):
    code, found = run(function)
    assert (code, found["cheat"].device_us, found["cheat"].call_us) == (1, None, None), found[
        "cheat"
    ]
    assert found["cheat"].result in ("inaccurate", "failed")
    assert why in found["cheat"].why


@pytest.mark.gpu
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("function", ["right", "by_content", "patching_the_clock"])
def test_a_cheat_that_gains_nothing_has_the_time_of_what_it_computes(function):
    code, found = run(function)
    cheat = found["cheat"]
    honest = found["unfused"]
    assert code == 0, cheat.why
    # in the same rounds: others may use the GPU, too
    assert us(cheat.over(honest)) == pytest.approx(1, rel=0.05)
    assert us(cheat.over(honest, "call")) < 1.05
    # the library that it calls
    assert "_chunk_scan_kernel" in {launch.kernel for launch in cheat.launches}


@pytest.mark.gpu
@pytest.mark.usefixtures("here")
def test_a_device_clock_that_differs_from_the_profiler_is_a_failure(monkeypatch):
    elapsed = timing._elapsed_ms
    monkeypatch.setattr(timing, "_elapsed_ms", lambda start, stop: elapsed(start, stop) / 2)
    with pytest.raises(
        AssertionError,
        match=r"kernels run for .* us by the profiler, but .* us by the device clock",
    ):
        run("right")
