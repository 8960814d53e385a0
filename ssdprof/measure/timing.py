"""Call time and device time of several implementations, measured in turns by any `Bench`: see `measure.bench`.

The warm clock is used only on request.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import numpy as np
import torch

from ssdprof.errors import MissingCapabilityError
from ssdprof.kernels.launch import no_garbage_collection
from ssdprof.measure.bench import WARM_CALLS, Bench, CaptureError, Recording
from ssdprof.measure.call import Run
from ssdprof.measure.faults import blaming, refuse_if_interrupted, type_and_message
from ssdprof.measure.sampling import Name, Sampler, SamplingPlan, sample_in_turns
from ssdprof.measure.statistics import Samples, median_interval, median_us, ratio, ratio_interval, spread
from ssdprof.operators.operator import Output
from ssdprof.schema import Speedup, Timing, WarmSpeedup, WarmTiming

T = TypeVar("T")


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
        """The speedup over `baseline`, which was sampled in the same rounds.  name: that of the baseline."""
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
            ratio=ratio(baseline.warm, self.warm), interval=interval, verdict=interval.verdict(smallest_difference)
        )


def _warm_timing(samples: Samples) -> WarmTiming:
    return WarmTiming(calls=WARM_CALLS, median_us=median_us(samples), interval_us=median_interval(samples))


@dataclass(frozen=True)
class Spoilt:
    """The reason why an implementation that passed has no time: a later output was wrong, or a later call raised."""

    status: Literal["inaccurate", "failed"]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Session:
    """The results of timing several implementations together, by key."""

    sampled: dict[str, Sampled]
    untimed: dict[str, str]  # why there is no time; the output stays valid
    spoilt: dict[str, Spoilt]


class _CallError(Exception):
    """A call after the first one raised."""

    def __init__(self, key: str, error: Exception) -> None:
        super().__init__(key)
        self.key, self.spoilt = key, Spoilt("failed", f"a later call raised {type_and_message(error)}")


def time_in_turns(
    runs: Mapping[str, Run], bench: Bench, plan: SamplingPlan, *, check: Callable[[str, Output], str]
) -> Session:
    """Time every run against the others.

    check(key, output): "" if the output is still right.  Called after the timed loop for a replay and a call.
    Raises MissingCapabilityError, with the key, if a fault in a run made the GPU unusable.
    """
    recordings: dict[str, Recording] = {}
    untimed: dict[str, str] = {}
    spoilt: dict[str, Spoilt] = {}

    def set_up(generator: np.random.Generator) -> dict[Name, Sampler]:
        recordings.clear()
        bench.relocate(generator)
        keys = [key for key in runs if key not in untimed and key not in spoilt]
        for key in (keys[place] for place in generator.permutation(len(keys))):
            try:
                recordings[key] = blaming(bench.device, key, partial(bench.record, runs[key]))
            except CaptureError as error:
                untimed[key] = f"{key} is not timed: it cannot be captured as a CUDA graph: {error}"
            except torch.OutOfMemoryError as error:
                untimed[key] = f"{key} is not timed: no memory is left for its CUDA graph: {error}"
        samplers: dict[Name, Sampler] = {}
        for key, recording in recordings.items():
            samplers["call", key] = partial(_called, bench, key, partial(bench.call_us, runs[key]))
            samplers["device", key] = partial(_called, bench, key, partial(bench.device_us, recording))
            if plan.warm:
                samplers["warm", key] = partial(_called, bench, key, partial(bench.warm_us, runs[key]))
        return samplers

    def sampled_without_errors() -> dict[Name, Samples]:
        """Samples.  If a run raises, sampling restarts without it, so that all results come from the same turns."""
        while True:
            try:
                return sample_in_turns(set_up, plan)
            except _CallError as error:
                spoilt[error.key] = error.spoilt

    gc.collect()
    with no_garbage_collection():  # a collection during a call is not part of the call
        samples = sampled_without_errors()

    sampled: dict[str, Sampled] = {}
    for key in runs:
        if key in untimed or key in spoilt:
            continue
        look = partial(_reason_now, partial(check, key), runs[key], bench, recordings[key])
        try:
            reason = _called(bench, key, look)  # all GPU work of the call has ended after the check
        except _CallError as error:
            spoilt[key] = error.spoilt
            continue
        if reason:
            spoilt[key] = Spoilt("inaccurate", f"after it was timed: {reason}")
        else:
            sampled[key] = Sampled(
                call=samples["call", key], device=samples["device", key], warm=samples.get(("warm", key))
            )
    return Session(sampled=sampled, untimed=untimed, spoilt=spoilt)


def _called(bench: Bench, key: str, work: Callable[[], T]) -> T:
    """The result of `work`.  Raises _CallError, or MissingCapabilityError with the key if the GPU is unusable."""
    try:
        return blaming(bench.device, key, work)
    except (MissingCapabilityError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a kernel's own, of any kind
        refuse_if_interrupted(error)
        raise _CallError(key, error) from error


def _reason_now(check: Callable[[Output], str], run: Run, bench: Bench, recording: Recording) -> str:
    """The result of `check` for a replay and for a call."""
    bench.device_us(recording)  # recordings share memory: only the latest replay's output is intact
    return check(recording.output) or check(run())
