"""Call time and device time of several implementations, measured in turns.

call:   from an idle GPU to the end of the work, through Python: what a caller waits for, launch overhead included.
device: the same work replayed from a CUDA graph: what the GPU alone needs.

Both start with a cold L2.  A third, `warm`, is only taken where it is asked for: the mean of several calls back to
back, as many papers time.  `CudaBench` holds everything that touches a GPU, the rest takes any `Bench`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from ssdprof.kernels._garbage import no_garbage_collection
from ssdprof.measure.call import Run
from ssdprof.measure.events import cuda_event
from ssdprof.measure.faults import blaming
from ssdprof.measure.sampling import Name, Sampler, SamplingPlan, sample_in_turns
from ssdprof.measure.statistics import Samples, median_interval, median_us, ratio, ratio_interval, spread
from ssdprof.operators.operator import Output
from ssdprof.schema import Speedup, Timing, WarmSpeedup, WarmTiming

WARM_CALLS = 10  # back to back, of one sample
_PAGE = 2 << 20  # bytes, the unit in which CUDA hands out memory
_MOST_PADDING = 32  # pages


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

    def relocate(self, generator: np.random.Generator) -> None:
        """Place what is recorded or called from now on elsewhere in memory.  No earlier recording may be alive."""

    def record(self, run: Run) -> Recording:
        """Capture a call.  Raises CaptureError."""

    def call_us(self, run: Run) -> float:
        """One call, cold."""

    def device_us(self, recording: Recording) -> float:
        """One replay, cold."""

    def warm_us(self, run: Run) -> float:
        """One of WARM_CALLS calls back to back, on average, after one more."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Microseconds of one implementation."""

    call: Samples
    device: Samples
    warm: Samples | None = None

    def timing(self) -> Timing:
        return Timing(
            call_median_us=median_us(self.call),
            device_median_us=median_us(self.device),
            call_interval_us=median_interval(self.call),
            device_interval_us=median_interval(self.device),
            recordings=len(self.device),
            samples=sum(map(len, self.device)),
            call_spread=spread(self.call),
            device_spread=spread(self.device),
            warm=None if self.warm is None else _warm_timing(self.warm),
        )

    def speedup(self, baseline: Sampled, name: str, smallest_difference: float) -> Speedup:
        """Over `baseline`, which was sampled in the same rounds and is called `name`."""
        call_interval = ratio_interval(baseline.call, self.call)
        device_interval = ratio_interval(baseline.device, self.device)
        return Speedup(
            baseline=name,
            call_ratio=ratio(baseline.call, self.call),
            call_interval=call_interval,
            call_verdict=call_interval.verdict(smallest_difference),
            device_ratio=ratio(baseline.device, self.device),
            device_interval=device_interval,
            verdict=device_interval.verdict(smallest_difference),
            smallest_difference=smallest_difference,
            warm=self._warm_speedup(baseline, smallest_difference),
        )

    def _warm_speedup(self, baseline: Sampled, smallest_difference: float) -> WarmSpeedup | None:
        if self.warm is None or baseline.warm is None:
            return None
        interval = ratio_interval(baseline.warm, self.warm)
        return WarmSpeedup(
            ratio=ratio(baseline.warm, self.warm),
            interval=interval,
            verdict=interval.verdict(smallest_difference),
        )


def _warm_timing(samples: Samples) -> WarmTiming:
    return WarmTiming(calls=WARM_CALLS, median_us=median_us(samples), interval_us=median_interval(samples))


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

    def set_up(generator: np.random.Generator) -> dict[Name, Sampler]:
        recordings.clear()
        bench.relocate(generator)
        keys = [key for key in runs if key not in untimed]
        for key in (keys[place] for place in generator.permutation(len(keys))):
            try:
                recordings[key] = blaming(bench.device, key, partial(bench.record, runs[key]))
            except CaptureError as error:
                untimed[key] = f"{key} is not timed: it cannot be captured as a CUDA graph: {error}"
            except torch.OutOfMemoryError as error:
                untimed[key] = f"{key} is not timed: no memory is left for its CUDA graph: {error}"
        samplers: dict[Name, Sampler] = {}
        for key, recording in recordings.items():
            samplers["call", key] = partial(blaming, bench.device, key, partial(bench.call_us, runs[key]))
            samplers["device", key] = partial(blaming, bench.device, key, partial(bench.device_us, recording))
            if plan.warm:
                samplers["warm", key] = partial(blaming, bench.device, key, partial(bench.warm_us, runs[key]))
        return samplers

    gc.collect()
    with no_garbage_collection():  # one in the middle of a call is not the call's
        samples = sample_in_turns(set_up, plan)

    sampled: dict[str, Sampled] = {}
    changed: dict[str, str] = {}
    for key in runs:
        if key in untimed:
            continue
        look = partial(_reason_now, partial(check, key), runs[key], bench, recordings[key])
        reason = blaming(bench.device, key, look)  # whatever a call leaves the GPU to do is done when it was looked at
        if reason:
            changed[key] = reason
        else:
            sampled[key] = Sampled(
                call=samples["call", key], device=samples["device", key], warm=samples.get(("warm", key))
            )
    return Session(sampled=sampled, untimed=untimed, changed=changed)


def _reason_now(check: Callable[[Output], str], run: Run, bench: Bench, recording: Recording) -> str:
    """What `check` says of a replay and of a call."""
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
        self._padding: torch.Tensor | None = None

    def relocate(self, generator: np.random.Generator) -> None:
        """Recordings get a pool of their own, and a block of random size is kept, so that new memory lies elsewhere."""
        self._padding = None
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()  # otherwise the blocks of the last recordings would be handed out again
        size = int(generator.integers(1, _MOST_PADDING + 1)) * _PAGE
        with suppress(torch.OutOfMemoryError):  # where that little is missing, recording says so
            self._padding = torch.empty(size, dtype=torch.uint8, device=self.device)

    def record(self, run: Run) -> Recording:
        """Capture after one call on another stream, as CUDA graphs need.

        Recordings share their workspace until `relocate` is called.
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

    def warm_us(self, run: Run) -> float:
        """Nothing is evicted and nothing waits: the host launches ahead of the GPU, if it can."""
        run()
        torch.cuda.synchronize(self.device)
        self._start.record()
        for _ in range(WARM_CALLS):
            run()
        self._stop.record()
        return self._elapsed_us() / WARM_CALLS

    def _evict_l2(self) -> None:
        """By reading: written lines would have to be stored during the timed region."""
        torch.amax(self._evictor, dim=0, out=self._sink)

    def _elapsed_us(self) -> float:
        self._stop.synchronize()
        return 1e3 * self._start.elapsed_time(self._stop)
