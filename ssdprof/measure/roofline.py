"""How fast an SSD call could be: its least bytes and FLOPs, and what this GPU can do of either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from statistics import median

import torch

from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.measure.dtypes import dtype_name
from ssdprof.measure.events import cuda_event
from ssdprof.schema import Ceilings, Roofline, SSDDims

SMALLEST_CHUNK = 16  # the edge of a tensor core's tile

_COPY_BYTES = 2 << 30
_MATMUL_SIZE = 8192
_WARMUP, _REPEATS = 5, 20


def dims_of(inputs: SSDInputs) -> SSDDims:
    batch, seqlen, nheads, headdim = inputs.x.shape
    return SSDDims(
        batch=batch,
        seqlen=seqlen,
        nheads=nheads,
        headdim=headdim,
        dstate=inputs.B.shape[3],
        ngroups=inputs.B.shape[2],
        chunk_size=inputs.chunk_size,
        dtype=dtype_name(inputs.x.dtype),
    )


def ssd_bytes(inputs: SSDInputs) -> int:
    """Every input read once; out, as x, and the fp32 final states written once."""
    read = sum(_nbytes(value) for field in fields(inputs) if torch.is_tensor(value := getattr(inputs, field.name)))
    (nheads, headdim), dstate = inputs.x.shape[2:], inputs.B.shape[3]
    return read + _nbytes(inputs.x) + 4 * inputs.sequences * nheads * headdim * dstate


def ssd_flops(dims: SSDDims, chunk_size: int = SMALLEST_CHUNK) -> int:
    """Multiplications and additions of the chunked form's matrix products.

    Per position, with (q + 1) / 2 sources per position on average in a chunk of q positions (the causal half):

        C B^T                  2 g n (q + 1) / 2
        scores x               2 h p (q + 1) / 2
        state update, C state  2 h p n each

    It grows with q.  The default, the smallest chunk that fills a tensor core's tile, is the least that any chunked
    kernel does, so that no choice of chunk beats the floor.  Decays, skip and gate are not counted.
    """
    sources = chunk_size + 1
    per_position = (
        dims.ngroups * dims.dstate * sources
        + dims.nheads * dims.headdim * sources
        + 4 * dims.nheads * dims.headdim * dims.dstate
    )
    return dims.batch * dims.seqlen * per_position


def roofline(inputs: SSDInputs, ceilings: Ceilings, device_median_us: float) -> Roofline:
    """Where a device time stands against the floor of these ceilings."""
    bytes_moved, flops = ssd_bytes(inputs), ssd_flops(dims_of(inputs))
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

    Zeros would flatter: they use less power and so let the clock rise.
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


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
