"""The minimum time of a call, from its least bytes and FLOPs and the measured ceilings of this GPU."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from ssdprof import operators
from ssdprof.measure.events import cuda_event
from ssdprof.schema import Ceilings, Roofline

_COPY_BYTES = 2 << 30
_MATMUL_SIZE = 8192
_WARMUP, _REPEATS = 5, 20


def roofline(inputs: Any, ceilings: Ceilings, device_median_us: float) -> Roofline:
    """A device time compared with the floor of these ceilings."""
    cost = operators.of(inputs).costed
    bytes_moved, flops = cost.bytes_moved(inputs), cost.flops(cost.dims(inputs))
    memory_us = bytes_moved / ceilings.copy_gb_per_s / 1e3
    compute_us = flops / ceilings.matmul_tflops / 1e6
    floor_us = max(memory_us, compute_us)
    return Roofline(
        bytes_moved=bytes_moved,
        flops=flops,
        floor_us=floor_us,
        bound="memory" if memory_us >= compute_us else "compute",
        floor_pct=100 * floor_us / device_median_us,
    )


def measure_ceilings(device: torch.device) -> Ceilings:
    """Median of a device-to-device copy, bytes read + written, and of a bf16 matrix product of random numbers.

    Zeros would be faster: they use less power, so the clock rises.
    """
    return Ceilings(copy_gb_per_s=_copy_gb_per_s(device), matmul_tflops=_matmul_tflops(device))


def _copy_gb_per_s(device: torch.device) -> float:
    free, _ = torch.cuda.mem_get_info(device)
    source = torch.empty(min(_COPY_BYTES, free // 8), dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * len(source) / _median_seconds(lambda: target.copy_(source), device) / 1e9


def _matmul_tflops(device: torch.device) -> float:
    a, b = (torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * _MATMUL_SIZE**3 / _median_seconds(lambda: torch.mm(a, b, out=out), device) / 1e12


def _median_seconds(run: Callable[[], object], device: torch.device) -> float:
    with torch.cuda.device(device):
        for _ in range(_WARMUP):
            run()
        times = []
        for _ in range(_REPEATS):
            start, stop = cuda_event(), cuda_event()
            start.record()
            run()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3)
    return median(times)
