"""Times calls: `CudaTimer` takes single samples, `time_in_turns` samples of several implementations
in turns.

call:   from an idle GPU to the end of the work, through Python, with the overhead of launches.
device: the same work replayed from a CUDA graph: the time on the GPU alone.

Both start with a cold L2 cache.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, get_args

import numpy as np
import torch

from ssdprof.core.base import Clock
from ssdprof.core.case import Samples
from ssdprof.errors import MissingCapabilityError
from ssdprof.kernels.launch import no_garbage_collection
from ssdprof.measure.first_run import (
    Fields,
    Run,
    blaming,
    first_line,
    refuse_if_interrupted,
    type_and_message,
)
from ssdprof.measure.sampling import Name, Recordings, Sampler, SamplingPlan, sample_in_turns
from ssdprof.measure.trace import busy_us, traced, work
from ssdprof.operators.operator import OutputPair

T = TypeVar("T")
Graph = torch.cuda.CUDAGraph
Events = tuple[torch.cuda.Event, torch.cuda.Event]
# The functions of torch that take the time are looked up here, before any user's kernel is
# imported, so that a kernel that patches torch changes no time.
_Event = torch.cuda.Event
_current_stream = torch.cuda.current_stream
_synchronize = torch.cuda.synchronize
_record = _Event.record
_wait = _Event.synchronize
_elapsed_ms = _Event.elapsed_time
_replay = torch.cuda.CUDAGraph.replay
_amax = torch.amax
_PAGE = 2 << 20  # bytes; CUDA allocates in multiples of it
_MOST_PADDING = 32  # pages of the block that shifts the addresses of a recording


class CallError(Exception):
    """A call after the first one raised an error, or cannot be captured as a CUDA graph.

    The message is CUDA's or the kernel's.
    """


class CudaTimer:
    """Times calls on the current stream of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        # Four times the L2 cache, and at least 256 MiB: reading it replaces every line, and keeps
        # the GPU busy while the host enqueues the timed work.  4 bytes an element.
        self._evictor = torch.zeros(max(256 << 20, 4 * l2_bytes) // 4, device=device)
        self._sink = torch.zeros((), device=device)
        self._events = new_events()
        self._pool = torch.cuda.graph_pool_handle()
        self._padding: torch.Tensor | None = None

    def reallocate(self, generator: np.random.Generator) -> None:
        """Create a new memory pool, and hold a block of random size, so that most new memory has
        other addresses.
        """
        self._padding = None
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()  # otherwise the blocks of the last recordings would be reused
        size = int(generator.integers(1, _MOST_PADDING + 1)) * _PAGE
        # If there is not even this little memory, the recording itself raises the error.
        with suppress(torch.OutOfMemoryError):
            self._padding = torch.empty(size, dtype=torch.uint8, device=self.device)

    def record(self, run: Run) -> tuple[Graph, OutputPair]:
        """The CUDA graph of a call, and the output that every replay writes.

        The graph is captured after one call on another stream, as CUDA needs.  Graphs share their
        workspace until `reallocate` is called, or a capture fails.

        Raises CallError if a call raises an error or cannot be captured, torch.OutOfMemoryError,
        and what `refuse_if_interrupted` raises.
        """
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        try:
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                run()
            torch.cuda.current_stream(self.device).wait_stream(stream)
            with torch.cuda.graph(graph, pool=self._pool):
                output = run()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # CUDA's, or the kernel's own, of any kind
            refuse_if_interrupted(error)
            torch.cuda.synchronize(self.device)
            # the old pool still waits for the end of the capture
            self._pool = torch.cuda.graph_pool_handle()
            raise CallError(first_line(error)) from error
        return graph, output

    def call_us(self, run: Run) -> float:
        """The time of a call, in microseconds.

        The GPU is idle when the call begins, so that the launch time is not hidden.
        """
        self._evict_l2()
        _synchronize(self.device)
        return elapsed_us(run, self._events)

    def device_us(self, graph: Graph) -> float:
        """The time of a graph's work on the GPU, in microseconds.

        The eviction of the L2 cache still runs while the graph is enqueued, and hides the launch.
        """
        self._evict_l2()
        return elapsed_us(partial(_replay, graph), self._events)

    def unseen(self, run: Run, graph: Graph, samples: Recordings) -> str:
        """A phrase if the profiler shows more GPU work than the device clock; empty if not.

        graph: the latest one of the run.  samples: its device times, in microseconds.

        The least time of three profiled calls may be longer than the median sample by 5 %, and by
        2 us for each kernel, copy and fill.  While it is longer, three more calls are profiled, at
        most nine in all.  Before each of them the graph is replayed: if the GPU has become slower
        since the samples were taken, the median replay counts in place of the median sample, but as
        at most 1.2 times as long.  So a kernel that skips more work in earlier recordings is found.
        """
        sampled_us = float(np.median(np.concatenate(samples)))
        replayed_us: list[float] = []
        profiled_us: list[float] = []
        for _ in range(3):
            for _ in range(3):
                replayed_us.append(self.device_us(graph))
                self._evict_l2()
                _synchronize(self.device)
                trace = traced(run, self.device)
                profiled_us.append(busy_us(trace))
            expected_us = min(max(sampled_us, float(np.median(replayed_us))), 1.2 * sampled_us)
            if min(profiled_us) <= 1.05 * expected_us + 2 * len(work(trace)):
                return ""
        return (
            f"its kernels run for {min(profiled_us):.4g} us by the profiler, but "
            f"{sampled_us:.4g} us by the device clock"
        )

    def _evict_l2(self) -> None:
        """Replace all lines of the L2 cache by reading.  Written lines would have to be stored
        during the timed work.
        """
        _amax(self._evictor, dim=0, out=self._sink)


def new_events() -> Events:
    """Two CUDA events that can be timed."""
    return _Event(enable_timing=True), _Event(enable_timing=True)  # type: ignore[no-untyped-call]


def elapsed_us(enqueue: Callable[[], object], events: Events | None = None) -> float:
    """The time on the current stream, in microseconds, from before `enqueue` is called to the end
    of the work that it enqueues there.  Waits for that end.
    """
    start, stop = events or new_events()
    _record(start, _current_stream())
    enqueue()
    _record(stop, _current_stream())
    _wait(stop)
    return 1e3 * float(_elapsed_ms(start, stop))


# --- several implementations in turns


def record(process: str, clock: Clock, sampled: Recordings) -> Samples:
    """The samples of a case, rounded to five significant digits: by at most 0.005 %.

    process: the name of this process.  sampled: microseconds.
    """
    rounds = tuple(tuple(float(f"{us:.5g}") for us in recording) for recording in sampled)
    return Samples(process=process, clock=clock, us=rounds)


# (key, run) -> the reason why the output of the run is wrong now; empty if it is right
OutputCheck = Callable[[str, Run], str]


def time_in_turns(
    runs: Mapping[str, Run],
    timer: CudaTimer,
    plan: SamplingPlan,
    *,
    check: OutputCheck | None,
    change: Callable[[bool], object] | None = None,
    process: str = "",
    clocks: Sequence[Clock] = get_args(Clock),
) -> dict[str, Fields]:
    """Time the runs in turns.  Returns, for each key, fields of its case: its `samples` by each
    clock, or the reason why it has no times.

    check: checks the outputs of replays and of calls, after all samples are taken; not called if
        only call times are taken.  None: nothing is checked, the device times neither (`unseen`).
    change: called with True before each sample, to change the numbers in the inputs, and with False
        before the checks, to restore them.
    process: the name of this process in the samples.
    clocks: those by which samples are taken.
    Raises MissingCapabilityError, with the key, if a fault in a run made the GPU unusable, and
    torch.OutOfMemoryError if a call of a run, or its check, does not fit in memory.
    """
    turns = _Turns(runs, timer, plan, clocks, change)
    gc.collect()
    with no_garbage_collection():  # a collection during a call is not part of the call
        samples = turns.sample()
    if change is not None:
        change(False)
    timed: dict[str, Fields] = {}
    for key in [key for key in runs if key not in turns.untimed]:
        with suppress(CallError):  # `fault_now` notes it in `untimed`
            fault = ""
            if check is not None and turns.graphs:
                fault = turns.fault_now(key, check, samples["device", key])
            if fault:
                turns.untimed[key] = {"later_fault": f"after it was timed: {fault}"}
            else:
                by_clock = (record(process, clock, samples[clock, key]) for clock in clocks)
                timed[key] = {"samples": tuple(by_clock)}
    return timed | turns.untimed


@dataclass(frozen=True)
class _Turns:
    """Samples runs in turns.

    graphs: the latest CUDA graph of each run that can be timed, and the output that its replays
        write; empty if only call times are taken.
    untimed: for each run that cannot be timed, the fields of its case that say why.
    """

    runs: Mapping[str, Run]
    timer: CudaTimer
    plan: SamplingPlan
    clocks: Sequence[Clock]
    change: Callable[[bool], object] | None
    graphs: dict[str, tuple[Graph, OutputPair]] = field(default_factory=dict)
    untimed: dict[str, Fields] = field(default_factory=dict)

    def sample(self) -> dict[Name, Recordings]:
        """The samples of all runs that can be timed.

        If a run raises an error, sampling starts again without it, so that all results come from
        the same turns.
        """
        while True:
            with suppress(CallError):
                return sample_in_turns(self._set_up, self.plan)

    def fault_now(self, key: str, check: OutputCheck, sampled: Recordings) -> str:
        """The reason why the output of a run is wrong now, or why its samples cannot be right.
        Empty if neither is the case.

        check: is called for replays and for calls.  sampled: the device times.
        """

        def replay() -> OutputPair:
            graph, output = self.graphs[key]
            self.timer.device_us(graph)  # graphs share memory, which the latest replay has written
            return output

        def checked() -> str:
            run = self.runs[key]
            if fault := check(key, replay) or check(key, run):
                return fault
            graph, _ = self.graphs[key]
            return self.timer.unseen(run, graph, sampled)

        return self._called(key, checked)

    def _set_up(self, generator: np.random.Generator) -> dict[Name, Sampler]:
        """The samplers of a new recording, whose graphs are captured in random order."""
        self.graphs.clear()
        if self.plan.warmup_rounds:  # without a warm-up, samples would include allocations
            self.timer.reallocate(generator)
        timed = [key for key in self.runs if key not in self.untimed]
        keys = [timed[index] for index in generator.permutation(len(timed))]
        if "device" in self.clocks:
            for key in keys:
                self._record(key)
        samplers: dict[Name, Sampler] = {}
        if "call" in self.clocks:
            for key in keys:
                if key not in self.untimed:
                    samplers["call", key] = self._sampler(key, self.timer.call_us, self.runs[key])
        for key, (graph, _) in self.graphs.items():
            samplers["device", key] = self._sampler(key, self.timer.device_us, graph)
        return samplers

    def _record(self, key: str) -> None:
        """Capture a run as a CUDA graph, or note the reason why it is not timed."""
        record_run = partial(self.timer.record, self.runs[key])
        try:
            self.graphs[key] = blaming(self.timer.device, key, record_run)
            return
        except CallError as error:
            reason = f"it cannot be captured as a CUDA graph: {error}"
        except torch.OutOfMemoryError as error:
            reason = f"no memory is left for its CUDA graph: {error}"
        self.untimed[key] = {"reason": f"{key} is not timed: {reason}"}

    def _sampler(self, key: str, time_us: Callable[[Any], float], work: Any) -> Sampler:
        """A function that takes one sample.  work: the argument of `time_us`: a run or a graph."""

        def sample() -> float:
            if self.change is not None:
                self.change(True)
            return time_us(work)

        return partial(self._called, key, sample)

    def _called(self, key: str, work: Callable[[], T]) -> T:
        """The result of `work`, a function that calls the run of this key.

        An error of the run is noted in `untimed`, and CallError is raised.  Raises
        MissingCapabilityError with the key if the GPU has become unusable, and
        torch.OutOfMemoryError as it is.
        """
        try:
            return blaming(self.timer.device, key, work)
        except (MissingCapabilityError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a kernel's own, of any kind
            refuse_if_interrupted(error)
            reason = f"a later call raised {type_and_message(error)}"
            self.untimed[key] = {"status": "failed", "reason": reason}
            raise CallError(reason) from error
