"""Measures the time to verify and sample a layer, also with the previous sampling method."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from verdict_comparisons import OPERATOR, Row, inputs_of, run_of

from ssdprof import kernels
from ssdprof.kernels.precision import Precision
from ssdprof.measure.bench import CudaBench
from ssdprof.measure.call import Run
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.timing import time_in_turns
from ssdprof.pipeline.replay import ReplayOptions, replay_layer
from ssdprof.schema import EXACT_FP32, LayerRef, PrecisionRecord

PRECISIONS = (EXACT_FP32, PrecisionRecord(intermediates="relaxed", state_dtype="fp32"))


def layer(bench: CudaBench, shape: str, seqlen: int) -> Row:
    """Seconds of wall clock for a layer's three cases with fp32 states: verifying, old sampling, new sampling."""
    inputs = inputs_of(shape, seqlen)
    options = ReplayOptions(precisions=PRECISIONS, timed=False)
    where = LayerRef(index=0, name="layer", operator=OPERATOR)
    runs: dict[str, Run] = {
        "unfused": run_of((shape, seqlen, "unfused")),
        **{
            precision.intermediates: partial(
                kernels.get(OPERATOR, "fused").run, inputs, Precision(intermediates=precision.intermediates)
            )
            for precision in PRECISIONS
        },
    }
    replay_layer(where, inputs, options)  # compiles
    judged = took(lambda: replay_layer(where, inputs, options))
    before = took(lambda: sample_as_before(runs, bench))
    now = took(lambda: time_in_turns(runs, bench, SamplingPlan(), check=lambda _key, _output: ""))
    row = {"shape": shape, "tokens": seqlen, "judged_s": judged, "before_s": before, "now_s": now}
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


def took(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.monotonic()
    work()
    torch.cuda.synchronize()
    return time.monotonic() - began


def sample_as_before(runs: dict[str, Run], bench: CudaBench) -> None:
    """5 rounds of warm-up, then 20 to 640 rounds.  Ends when the 95 % bootstrap interval of every median is within half
    a per cent, checked when the number of rounds has doubled, or after 3 seconds."""
    recordings = {key: bench.record(run) for key, run in runs.items()}
    samplers = [
        sampler
        for key, run in runs.items()
        for sampler in (partial(bench.call_us, run), partial(bench.device_us, recordings[key]))
    ]
    gc.collect()
    for _ in range(5):
        for sampler in samplers:
            sampler()
    rounds: list[list[float]] = []
    end = time.monotonic() + 3
    look_at = 20
    while len(rounds) < 640 and (len(rounds) < 20 or time.monotonic() < end):
        rounds.append([sampler() for sampler in samplers])
        if len(rounds) == look_at:
            look_at *= 2
            if all(bootstrap_half_width(np.array(series)) <= 0.005 for series in zip(*rounds, strict=True)):
                break


def bootstrap_half_width(samples: np.ndarray) -> float:
    chosen = np.random.default_rng(0).integers(0, len(samples), (2000, len(samples)))
    low, high = np.percentile(np.median(samples[chosen], axis=1), [2.5, 97.5])
    return float((high - low) / (high + low))
