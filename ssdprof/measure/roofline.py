"""This GPU's measured ceilings for the roofline, and how many blocks of a kernel an SM holds.

Source of the limits: CUDA C++ Programming Guide, technical specifications per compute capability;
allocation units as in the CUDA occupancy calculator.
"""

from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from ssdprof.core.case import Launch
from ssdprof.core.target import Ceilings
from ssdprof.measure.timing import elapsed_us

_COPY_BYTES = 2 << 30  # of the copy that measures the bandwidth, if there is memory for it
_MATMUL_SIZE = 8192  # rows and columns of the matrices that are multiplied
_WARMUP = 5  # calls
_REPEATS = 20  # calls, of which the median time counts
_REGISTERS = 65_536  # 32-bit registers of an SM, from compute capability 8.0 to 12.x
_REGISTER_UNIT = 256  # registers are allocated to a warp in multiples of it
_SHARED_UNIT = 128  # bytes; shared memory is allocated to a block in multiples of it
_RESERVED_SHARED = 1024  # bytes of shared memory that CUDA takes in each block
# compute capability -> resident blocks of an SM, at most
_MOST_BLOCKS = {
    (8, 0): 32,
    (8, 6): 16,
    (8, 7): 16,
    (8, 9): 24,
    (9, 0): 32,
    (10, 0): 32,
    (10, 3): 32,
    (12, 0): 24,
}
_WARP = 32  # threads


def measure_ceilings(device: torch.device) -> Ceilings:
    """The bandwidth of a device-to-device copy, bytes read plus bytes written, and the rate of a
    bf16 matrix product.

    The matrices hold random numbers.  Zeros would be faster: they use less power, so that the clock
    rises.
    """
    size = min(_COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 8)
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copy_s = _median_seconds(partial(target.copy_, source), device)
    del source, target
    a, b = torch.randn(2, _MATMUL_SIZE, _MATMUL_SIZE, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(a)
    matmul_s = _median_seconds(partial(torch.mm, a, b, out=out), device)
    return Ceilings(
        copy_gb_per_s=2 * size / copy_s / 1e9, matmul_tflops=2 * _MATMUL_SIZE**3 / matmul_s / 1e12
    )


def _median_seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median time of a call, after a warm-up, in seconds."""
    with torch.cuda.device(device):
        for _ in range(_WARMUP):
            run()
        return median(elapsed_us(run) for _ in range(_REPEATS)) / 1e6


# --- occupancy


def with_occupancy(launch: Launch, device: torch.device) -> Launch:
    """The launch, with the number of its blocks that are resident on an SM at once, and the percent
    of the SM's warps that they are.

    Registers, shared memory, warps and the maximum of blocks limit the number.  The launch is
    returned as it is if its resources or the limits of the GPU are not known.  device: the GPU.
    """
    warps = launch.config.get("num_warps")
    if not isinstance(warps, int) or launch.registers is None or launch.shared_bytes is None:
        return launch
    sm = torch.cuda.get_device_properties(device)
    most = _MOST_BLOCKS.get((sm.major, sm.minor))
    most_warps = sm.max_threads_per_multi_processor // _WARP
    if most is None:
        return launch
    # of a block; -(-a // b) rounds up
    registers = -(-launch.registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT * warps
    shared = -(-launch.shared_bytes // _SHARED_UNIT) * _SHARED_UNIT + _RESERVED_SHARED
    by_registers = _REGISTERS // registers if registers else most
    blocks = min(
        most, most_warps // warps, sm.shared_memory_per_multiprocessor // shared, by_registers
    )
    return launch.changed(blocks_per_sm=blocks, warps_pct=100 * blocks * warps / most_warps)
