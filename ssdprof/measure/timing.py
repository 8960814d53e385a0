"""Call time and device time of several implementations, measured in turns.

call:   from an idle GPU to the end of the work, through Python: what a caller waits for, launch overhead included.
device: the same work replayed from a CUDA graph: what the GPU alone needs.

Both start with a cold L2.  `CudaBench` holds everything that touches a GPU, the rest takes any `Bench`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from ssdprof.kernels._garbage import no_garbage_collection
from ssdprof.measure.call import Run
from ssdprof.measure.events import cuda_event
from ssdprof.measure.faults import blaming
from ssdprof.measure.sampling import Sampler, SamplingPlan, sample_in_turns
from ssdprof.measure.statistics import Samples, median_interval, ratio_interval, verdict
from ssdprof.operators.operator import Output
from ssdprof.schema import Speedup, Timing


class CaptureError(Exception):
    """A call cannot be captured as a CUDA graph; the message is CUDA's."""


@dataclass(frozen=True)
class Recording:
    """A captured call; `output` is where every replay writes."""

    graph: Any
    output: Output


class Bench(Protocol):
    @property
    def device(self) -> torch.device: ...

    def record(self, run: Run) -> Recording:
        """Capture a call.  Raises CaptureError."""

    def call_us(self, run: Run) -> float:
        """One call, cold."""

    def device_us(self, recording: Recording) -> float:
        """One replay, cold."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Microseconds of one implementation, in the order of the rounds."""

    call: Samples
    device: Samples

    def timing(self) -> Timing:
        return Timing(
            call_median_us=float(np.median(self.call)),
            device_median_us=float(np.median(self.device)),
            call_interval_us=median_interval(self.call),
            device_interval_us=median_interval(self.device),
            samples=len(self.device),
        )

    def speedup(self, baseline: Sampled, name: str) -> Speedup:
        """Over `baseline`, which was sampled in the same rounds and is called `name`."""
        device_interval = ratio_interval(baseline.device, self.device)
        return Speedup(
            baseline=name,
            call_ratio=float(np.median(baseline.call) / np.median(self.call)),
            call_interval=ratio_interval(baseline.call, self.call),
            device_ratio=float(np.median(baseline.device) / np.median(self.device)),
            device_interval=device_interval,
            verdict=verdict(device_interval),
        )


@dataclass(frozen=True, kw_only=True)
class Session:
    """What came out of timing some implementations together, by their keys."""

    sampled: dict[str, Sampled]
    untimed: dict[str, str]  # why there is no time; the output is as good as it was
    changed: dict[str, str]  # what is wrong with the output after the timed loop


def time_in_turns(
    runs: Mapping[str, Run], bench: Bench, plan: SamplingPlan, *, check: Callable[[str, Output], str]
) -> Session:
    """Time every run against the others.

    check(key, output): "" if the output is still right.  It is asked after the timed loop, about a replay and a call.
    Raises MissingCapabilityError, with the key, if a fault in a run has taken the GPU from this process.
    """
    recordings: dict[str, Recording] = {}
    untimed: dict[str, str] = {}
    for key, run in runs.items():
        try:
            recordings[key] = blaming(bench.device, key, partial(bench.record, run))
        except CaptureError as error:
            untimed[key] = f"{key} is not timed: it cannot be captured as a CUDA graph: {error}"
        except torch.OutOfMemoryError as error:
            untimed[key] = f"{key} is not timed: no memory is left for its CUDA graph: {error}"

    samplers: dict[str, Sampler] = {}
    for key, recording in recordings.items():
        samplers[f"call {key}"] = partial(blaming, bench.device, key, partial(bench.call_us, runs[key]))
        samplers[f"device {key}"] = partial(blaming, bench.device, key, partial(bench.device_us, recording))
    gc.collect()
    with no_garbage_collection():  # one in the middle of a call is not the call's
        samples = sample_in_turns(samplers, plan) if samplers else {}

    sampled: dict[str, Sampled] = {}
    changed: dict[str, str] = {}
    for key, recording in recordings.items():
        look = partial(_reason_now, partial(check, key), runs[key], bench, recording)
        reason = blaming(bench.device, key, look)  # whatever a call leaves the GPU to do is done when it was looked at
        if reason:
            changed[key] = reason
        else:
            sampled[key] = Sampled(call=samples[f"call {key}"], device=samples[f"device {key}"])
    return Session(sampled=sampled, untimed=untimed, changed=changed)


def _reason_now(check: Callable[[Output], str], run: Run, bench: Bench, recording: Recording) -> str:
    """Of a replay and of a call, what `check` says."""
    bench.device_us(recording)  # recordings share memory: only the latest replay's output is whole
    return check(recording.output) or check(run())


class CudaBench:
    """The stopwatch of one GPU, for its current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        # four times the L2: every line is replaced, and the GPU stays busy while the host enqueues what is timed
        self._evictor = torch.zeros(max(256 << 20, 4 * l2_bytes) // 4, device=device)
        self._sink = torch.zeros((), device=device)
        self._start, self._stop = cuda_event(), cuda_event()
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Run) -> Recording:
        """Capture after one call on another stream, as CUDA graphs need; all recordings share their workspace."""
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
        except RuntimeError as error:
            torch.cuda.synchronize(self.device)
            self._pool = torch.cuda.graph_pool_handle()  # the old one still waits for the end of the capture
            raise CaptureError(str(error).splitlines()[0]) from error
        return Recording(graph, output)

    def call_us(self, run: Run) -> float:
        """The GPU is idle when the call begins: nothing hides the time to launch."""
        self._evict_l2()
        torch.cuda.synchronize(self.device)
        self._start.record()
        run()
        self._stop.record()
        return self._elapsed_us()

    def device_us(self, recording: Recording) -> float:
        """The eviction still runs while the graph is enqueued: the time to launch is hidden behind it."""
        self._evict_l2()
        self._start.record()
        recording.graph.replay()
        self._stop.record()
        return self._elapsed_us()

    def _evict_l2(self) -> None:
        """By reading: written lines would have to be stored during the timed region."""
        torch.amax(self._evictor, dim=0, out=self._sink)

    def _elapsed_us(self) -> float:
        self._stop.synchronize()
        return 1e3 * self._start.elapsed_time(self._stop)
