"""Comparisons on this machine's GPU with a known true verdict: a kernel with itself, and with
itself made slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from ssdprof import kernels, operators
from ssdprof.core import statistics
from ssdprof.core.statistics import Estimate
from ssdprof.jobs.reading import parse_shapes
from ssdprof.kernels.precision import Precision
from ssdprof.measure.first_run import Run
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.timing import CudaTimer, time_in_turns
from ssdprof.operators.generate import Cell, Tokens
from ssdprof.operators.operator import OutputPair

CHUNK_SIZE = 256  # for unfused SSD
DIFFERENCE = 0.02
SHORT_WAIT = 1000  # cycles
SHORT_WAIT_US = 1.0
Row = dict[str, Any]
Place = tuple[str, str, int, str]  # operator, shape, tokens, implementation


@cache
def inputs_of(operator: str, shape: str, seqlen: int) -> Any:
    generator = operators.get(operator).generated
    cell = Cell(
        shape=parse_shapes(generator, shape)[0],
        dtype="bf16",
        layout="contiguous",
        tokens=Tokens(sequences=1, seqlen=seqlen),
    )
    inputs = generator.draw(cell, torch.device("cuda"))
    return replace(inputs, chunk_size=CHUNK_SIZE) if generator.chunk_sizes else inputs


@cache
def run_of(place: Place) -> Run:
    """A call whose kernels are compiled."""
    *inputs, implementation = place
    call: Run = partial(kernels.get(place[0], implementation).run, inputs_of(*inputs), Precision())
    call()
    return call


def same(timer: CudaTimer, place: Place, seed: int) -> Row:
    return compare(timer, place, (run_of(place), run_of(place)), seed)


def different(timer: CudaTimer, place: Place, seed: int) -> Row:
    call, (cycles, host_us) = run_of(place), longer_waits(timer, place)
    short = waiting(call, cycles=SHORT_WAIT, host_us=SHORT_WAIT_US)
    return compare(timer, place, (short, waiting(call, cycles=cycles, host_us=host_us)), seed)


def compare(timer: CudaTimer, place: Place, runs: tuple[Run, Run], seed: int) -> Row:
    """The speedup of the first over the second, and the cost of measuring it."""
    plan = SamplingPlan(seed=seed)
    began = time.monotonic()
    found = time_in_turns(
        dict(zip("ab", runs, strict=True)), timer, plan, check=lambda _key, _output: ""
    )
    seconds = time.monotonic() - began
    (call, device), other = ([one.us for one in found[key]["samples"]] for key in "ab")
    ratios = {
        "device": statistics.ratio(other[1], device),
        "call": statistics.ratio(other[0], call),
    }
    return {
        **named(place),
        **{clock: told(ratio, plan.smallest_difference) for clock, ratio in ratios.items()},
        "seconds": round(seconds, 3),
        "recordings": len(device),
        "replays": sum(map(len, device)),
        "calls": sum(map(len, call)),
    }


def named(place: Place) -> Row:
    return dict(zip(("operator", "shape", "tokens", "implementation"), place, strict=True))


def told(ratio: Estimate, smallest_difference: float) -> Row:
    """A ratio, its interval and its verdict."""
    value, low, high = (round(one, 5) for one in ratio)
    return {"ratio": value, "interval": [low, high], "verdict": ratio.verdict(smallest_difference)}


def waiting(call: Run, *, cycles: int, host_us: float) -> Run:
    """The call with a wait: on the GPU after it, if it is recorded and replayed; on the host before
    it, if it is called.  The GPU is idle when a call is timed.  A wait before the first launch
    therefore delays everything after it, whether the host or the GPU limits the call.
    """

    def run() -> OutputPair:
        if torch.cuda.is_current_stream_capturing():
            output = call()
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            return output
        end = time.perf_counter_ns() + int(1000 * host_us)
        while time.perf_counter_ns() < end:
            pass
        return call()

    return run


@cache
def longer_waits(timer: CudaTimer, place: Place) -> tuple[int, float]:
    """The waits, in cycles and in microseconds, that increase device time and call time by
    DIFFERENCE.
    """
    short = waiting(run_of(place), cycles=SHORT_WAIT, host_us=SHORT_WAIT_US)
    recording = timer.record(short)
    device_us, call_us = (
        median_of(lambda: timer.device_us(recording)),
        median_of(lambda: timer.call_us(short)),
    )
    cycles = int(1500 * device_us)  # about as long again, for a clock of 1.5 GHz
    twice = timer.record(waiting(run_of(place), cycles=SHORT_WAIT + cycles, host_us=SHORT_WAIT_US))
    cycles_per_us = cycles / (median_of(lambda: timer.device_us(twice)) - device_us)
    return SHORT_WAIT + round(
        DIFFERENCE * device_us * cycles_per_us
    ), SHORT_WAIT_US + DIFFERENCE * call_us


def median_of(sample: Callable[[], float], count: int = 15) -> float:
    return float(np.median([sample() for _ in range(count)]))
