"""The clocks of the study's source.  Ours is ssdprof.measure.bench: a cold L2, separate calls and replays, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ssdprof.measure.events import cuda_event
from ssdprof.measure.gpu_trace import traced, work

WARM_UP, RUNS = 100, 500
_LEAST_RUNS = 5
_TRACED_RUNS = 10


def warm_us(run: Callable[[], Any], seconds: float) -> tuple[float, int]:
    """(mean microseconds, number of calls): 100 calls, then 500 back to back between two events, caches warm.

    There are fewer of both if they would take longer than `seconds`.
    """
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    share = min(1.0, seconds / ((WARM_UP + RUNS) * (time.perf_counter() - began)))
    for _ in range(max(1, round(share * WARM_UP))):
        run()
    runs = max(_LEAST_RUNS, round(share * RUNS))
    start, stop = cuda_event(), cuda_event()
    start.record()
    for _ in range(runs):
        run()
    stop.record()
    stop.synchronize()
    return 1e3 * start.elapsed_time(stop) / runs, runs


def kernel_us(run: Callable[[], Any], device: torch.device) -> float:
    """Total microseconds of a call's kernels by torch's profiler; the mean of several calls, caches warm.

    0 if the profiler sees no kernel.
    """

    def repeated() -> None:
        for _ in range(_TRACED_RUNS):
            run()

    run()
    return sum(one.us for one in work(traced(repeated, device))) / _TRACED_RUNS
