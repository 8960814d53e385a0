"""The resources and the speed of a launch, from ncu's metrics, whose names differ by chip and version."""

from __future__ import annotations

import re

from ssdprof.schema.stalls import Resources, Throughput  # TODO
from ssdprof.stalls.raw import RawKernel
from ssdprof.stalls.reasons import canonical

# field -> metrics with its value, best first
_RESOURCES: dict[str, tuple[str, ...]] = {
    "block": ("launch__block_size",),
    "registers": ("launch__registers_per_thread",),
    "spill_requests": ("sass__inst_executed_register_spilling", "derived__local_spilling_requests"),
    "shared_bytes": ("launch__shared_mem_per_block",),
    "waves": ("launch__waves_per_multiprocessor",),
    "occupancy_pct": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "occupancy_limit_pct": ("sm__maximum_warps_per_active_cycle_pct",),
}
_THROUGHPUT: dict[str, tuple[str, ...]] = {
    "compute_pct": ("sm__throughput.avg.pct_of_peak_sustained_elapsed",),
    "memory_pct": (
        "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
        "gpu__compute_memory_access_throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "dram_pct": (
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "l2_pct": ("lts__throughput.avg.pct_of_peak_sustained_elapsed",),
    "issue_pct": ("smsp__issue_active.avg.pct_of_peak_sustained_active",),
    "tensor_pct": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_elapsed",
    ),
    "dram_read_bytes": ("dram__bytes_read.sum",),
    "dram_write_bytes": ("dram__bytes_write.sum",),
    "l1_hit_pct": ("l1tex__t_sector_hit_rate.pct",),
    "l2_hit_pct": ("lts__t_sector_hit_rate.pct",),
}
_LIMITS = {
    "registers": "launch__occupancy_limit_registers",
    "shared memory": "launch__occupancy_limit_shared_mem",
    "warps": "launch__occupancy_limit_warps",
    "blocks": "launch__occupancy_limit_blocks",
    "barriers": "launch__occupancy_limit_barriers",
}
_DURATION = ("gpu__time_duration.sum", "gpu__time_duration.avg")
_AVERAGE = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
_SECTOR_BYTES = 32
_TENSOR_OPS = "sm__ops_path_tensor_src_"


def resources(kernel: RawKernel) -> Resources:
    found = {name: kernel.number(*metrics) for name, metrics in _RESOURCES.items()}
    grid = [kernel.number(f"launch__grid_dim_{axis}") for axis in "xyz"]
    limits = {name: limit for name, metric in _LIMITS.items() if (limit := kernel.number(metric)) is not None}
    shared = found["shared_bytes"]
    if shared is None:
        shared = _sum(kernel, *(f"launch__shared_mem_per_block_{kind}" for kind in ("static", "dynamic", "driver")))
    return Resources(
        grid=(int(grid[0]), int(grid[1] or 1), int(grid[2] or 1)) if grid[0] is not None else None,
        block=_int(found["block"]),
        registers=_int(found["registers"]),
        spill_requests=_int(found["spill_requests"]),
        shared_bytes=_int(shared),
        waves=found["waves"],
        occupancy_pct=found["occupancy_pct"],
        occupancy_limit_pct=found["occupancy_limit_pct"],
        limited_by=tuple(name for name, limit in limits.items() if limit == min(limits.values())),
    )


def throughput(kernel: RawKernel) -> Throughput:
    found = {name: kernel.number(*metrics) for name, metrics in _THROUGHPUT.items()}
    duration = kernel.number(*_DURATION)
    if found["issue_pct"] is None:
        found["issue_pct"] = _scaled(kernel.number("smsp__issue_active.avg.per_cycle_active"), 100)
    l2_bytes = kernel.number("lts__t_bytes.sum")
    if l2_bytes is None:
        l2_bytes = _scaled(kernel.number("lts__t_sectors.sum"), _SECTOR_BYTES)
    flops, tensor_peak = _tensor(kernel, found["tensor_pct"])
    return Throughput(
        duration_us=_scaled(duration, 1e-3),
        compute_pct=found["compute_pct"],
        memory_pct=found["memory_pct"],
        dram_pct=found["dram_pct"],
        l2_pct=found["l2_pct"],
        issue_pct=found["issue_pct"],
        tensor_pct=found["tensor_pct"],
        dram_read_bytes=_int(found["dram_read_bytes"]),
        dram_write_bytes=_int(found["dram_write_bytes"]),
        l2_bytes=_int(l2_bytes),
        l1_hit_pct=found["l1_hit_pct"],
        l2_hit_pct=found["l2_hit_pct"],
        tensor_flops=_int(flops),
        fp32_flops=_int(_fp32(kernel)),
        dram_peak_gb_per_s=_scaled(
            _product(kernel, "dram__bytes.sum.peak_sustained", "dram__cycles_elapsed.avg.per_second"), 1e-9
        ),
        tensor_peak_tflops=tensor_peak,
    )


def _tensor(kernel: RawKernel, pipe_pct: float | None) -> tuple[float | None, float | None]:
    """(operations on the tensor cores, their peak in TFLOP/s for the operand type that was used most).

    If the cores have a sparse mode, ncu's peak is that of sparse operands, twice that of dense ones.
    Then the share of cycles in which the cores worked is twice the share of operations.
    """
    kinds = {
        name.removesuffix(".sum"): count
        for name in kernel.metrics
        if name.startswith(_TENSOR_OPS) and name.endswith(".sum") and (count := kernel.number(name)) is not None
    }
    if not kinds:
        return None, None
    flops, most = sum(kinds.values()), max(kinds, key=lambda name: kinds[name])
    peak = kernel.number(f"{most}.sum.peak_sustained_elapsed.per_second")
    if peak is None:
        peak = _product(kernel, f"{most}.sum.peak_sustained", "sm__cycles_elapsed.avg.per_second")
    share_pct = kernel.number(f"{most}.sum.pct_of_peak_sustained_elapsed")
    if not (peak and share_pct and pipe_pct):
        return flops, None
    return flops, peak / (2 if pipe_pct / share_pct > 1.5 else 1) * 1e-12


def _fp32(kernel: RawKernel) -> float | None:
    """Additions, multiplications and twice the fused ones, by ordinary threads."""
    cycles, total = kernel.number("smsp__cycles_elapsed.avg", "sm__cycles_elapsed.avg"), 0.0
    if cycles is None:
        per_ns = _scaled(kernel.number("smsp__cycles_elapsed.avg.per_second"), 1e-9)
        duration = kernel.number(*_DURATION)
        cycles = None if per_ns is None or duration is None else per_ns * duration
    for name, operations in (("fadd", 1), ("fmul", 1), ("ffma", 2)):
        rate = kernel.number(f"smsp__sass_thread_inst_executed_op_{name}_pred_on.sum.per_cycle_elapsed")
        if rate is None or cycles is None:
            return None
        total += operations * rate * cycles
    return total


def average(kernel: RawKernel) -> dict[str, float]:
    """Stall reason -> warps that wait for it while one issues, of the whole kernel: counted, not sampled."""
    found: dict[str, float] = {}
    for name in kernel.metrics:
        match, value = _AVERAGE.fullmatch(name), kernel.number(name)
        if match and value:
            reason = canonical(match[1])
            found[reason] = found.get(reason, 0.0) + value
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def not_collected(used: Resources, speed: Throughput) -> tuple[str, ...]:
    """Names of the fields that the report lacks."""
    none = {name for record in (used, speed) for name, value in record if value is None or value == ()}
    if speed.tensor_flops == 0:
        none.discard("tensor_peak_tflops")  # the operand type is unknown
    return tuple(name for record in (used, speed) for name, _ in record if name in none)


def _int(value: float | None) -> int | None:
    return None if value is None else round(value)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _product(kernel: RawKernel, one: str, other: str) -> float | None:
    a, b = kernel.number(one), kernel.number(other)
    return None if a is None or b is None else a * b


def _sum(kernel: RawKernel, *names: str) -> float | None:
    found = [value for name in names if (value := kernel.number(name)) is not None]
    return sum(found) if found else None
