"""The machine: GPU, processor, versions, the hash of the kernels' sources, clocks, free memory, and
transfer speeds.
"""

import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pynvml
import torch
from triton import knobs

from ssdprof.core.target import Clocks, Environment, Gpu
from ssdprof.environment.child import rank_count
from ssdprof.errors import MissingCapabilityError

T = TypeVar("T")
_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "safetensors",
    "huggingface-hub",
    "nvidia-ml-py",
    "mamba-ssm",
    "flash-linear-attention",
    "flashinfer-python",
)
# Bits of NVML's reasons why a GPU is slower than it could be.  Three reasons are left out: a GPU
# does not idle while it is timed (0x01), and the clocks themselves show a limit that the owner
# (0x02) or a display (0x100) has set.
_THROTTLE_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "temperature, by the driver",
    0x40: "temperature, by the hardware",
    0x80: "power brake",
}
_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
# For control groups of version 1, then of version 2: the file with the limit, the file with the
# usage, and the entries of memory.stat for page cache, which counts as usage although Linux frees
# it when memory is needed.  A checkpoint that was just downloaded or read is in the page cache.
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
_V2 = "memory.max", "memory.current", ("inactive_file", "active_file")
TRANSFER_BYTES = 256 << 20  # of a measurement of transfer speed; a fast disk takes 0.1 s


def collect() -> Environment:
    """The current GPU, if there is one, the machine, and the versions of the packages of
    `_PACKAGES` that are installed.  The record has no host name, user name, path or token.
    """
    versions = {name: installed_version(name) for name in _PACKAGES}
    packages = {name: number for name, number in versions.items() if number is not None}
    if torch.cuda.is_available():
        # the ptxas that Triton runs: its own, or that of TRITON_PTXAS_PATH
        packages["ptxas"] = str(knobs.nvidia.ptxas.version)
    return Environment(
        gpu=gpu(),
        cpu=_cpu_model(),
        platform=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        packages=packages,
    )


def gpu() -> Gpu | None:
    """The record of torch's current CUDA device; None without one."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(
        name=properties.name,
        compute_capability=f"{properties.major}.{properties.minor}",
        sm_count=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        l2_bytes=properties.L2_cache_size,
        driver=ask_nvml(_driver_version) or "unknown",
        cuda=torch.version.cuda or "unknown",
    )


def _driver_version(nvml: ModuleType) -> str:
    return str(nvml.nvmlSystemGetDriverVersion())


def installed_version(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def kernels_hash(operator: str) -> str:
    """SHA-256 of an operator's machine code for sm_90, as Triton 3.6.0 compiles the launches of the
    compiler's tests.  Empty for an operator without bundled kernels.

    It is read from a file that tests/kernels/machine_code.py writes when the kernels change.
    """
    hashes: dict[str, str] = json.loads(
        files("ssdprof.kernels").joinpath("machine_code.json").read_text("utf-8")
    )
    return hashes.get(operator, "")


def _cpu_model() -> str:
    """The processor's name in /proc/cpuinfo; its architecture if that has no name."""
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


# --- clocks


def read_clocks() -> Clocks | None:
    """The present clocks, temperature and throttling of torch's current GPU.  None without a GPU,
    without NVML, or if the driver does not report them.

    `Clocks` has the first and the last reading of a measurement; here both are the same reading.
    """
    uuid = current_uuid()
    if uuid is None:
        return None

    def reading(nvml: ModuleType) -> Clocks:
        """The question for `ask_nvml`."""
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        sm = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
        memory = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)
        temperature = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        return Clocks(
            sm_mhz=(sm, sm),
            memory_mhz=(memory, memory),
            temperature_c=(temperature, temperature),
            throttle_reasons=tuple(
                words for bit, words in _THROTTLE_REASONS.items() if reasons & bit
            ),
        )

    return ask_nvml(reading)


def current_uuid() -> str | None:
    """The UUID of torch's current GPU; None without a GPU.

    NVML finds the GPU by it, and not by torch's number, because CUDA_VISIBLE_DEVICES may hide or
    reorder GPUs.
    """
    if not torch.cuda.is_available():
        return None
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def ask_nvml(question: Callable[[ModuleType], T]) -> T | None:
    """The result of `question(pynvml)`; None if NVML cannot be loaded, or if the driver does not
    run or does not support the question.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return question(pynvml)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


# --- free memory


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still allocate on `device`, a GPU or the CPU.

    On a GPU, these are the bytes that no process uses and those that torch has cached, or fewer if
    `torch.cuda.set_per_process_memory_fraction` has set a limit.  Raises what `gpu_memory` raises.
    """
    if device.type != "cuda":
        return host_memory()
    free, total = gpu_memory(device)
    allocated = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - allocated
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free + cached, allowed - allocated)


def gpu_memory(device: torch.device | None = None) -> tuple[int, int]:
    """Free and total bytes of a GPU, by default of the current one.  Raises MissingCapabilityError
    if CUDA cannot start the GPU.
    """
    try:
        return torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        raise MissingCapabilityError(
            f"CUDA cannot start the GPU: {str(error).splitlines()[0].rstrip('.')}.",
            "Another process may have exclusive use of it, or fill its memory.  To see the "
            "processes, run: nvidia-smi",
        ) from error


def host_memory() -> int:
    """Bytes of main memory available to this process: with several ranks, its share of them, which
    is equal for all ranks.
    """
    return _available() // rank_count()


def _available() -> int:
    """Bytes of available main memory by Linux's estimate, or less if a control group limits it."""
    linux_estimate = _numbers(_MEMINFO)["MemAvailable:"] * 1024  # the file has KiB
    return min((linux_estimate, *_left_in_groups()))


def _left_in_groups() -> Iterator[int]:
    """Bytes of main memory that the limit of each control group of this process leaves, from the
    innermost group outwards, for both versions of control groups.  Groups without a limit yield
    nothing in version 2, and a number larger than any memory in version 1.
    """
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:  # Linux without control groups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):  # empty in version 2
            continue
        top = _GROUPS / controllers
        limit_file, usage_file, cache_entries = _V1 if controllers else _V2
        # a container may see its own group as `top`, although `path` is the host's name of the
        # group: then only `top` exists
        innermost = top / path.lstrip("/")
        depth = len(innermost.parts) - len(top.parts)
        for group in (innermost, *innermost.parents[:depth]):
            try:
                allowed = int((group / limit_file).read_text())
                taken = int((group / usage_file).read_text())
                sizes = _numbers(group / "memory.stat")
                yield allowed - taken + sum(sizes.get(name, 0) for name in cache_entries)
            except (OSError, ValueError):  # no such folder, or the limit is "max"
                continue


def _numbers(file: Path) -> dict[str, int]:
    """Name -> number, from a file whose lines begin with a name and a number.  A colon after the
    name is part of the name; a unit after the number is ignored.
    """
    rows = [line.split() for line in file.read_text().splitlines()]
    return {row[0]: int(row[1]) for row in rows}


# --- transfer speeds


def read_bytes_per_s(file: Path) -> float | None:
    """Speed at which at most the first `TRANSFER_BYTES` of a file are read, in bytes a second; None
    for an empty file.

    Linux is first asked to drop these bytes from the page cache, so that the disk is measured.
    """
    with file.open("rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, TRANSFER_BYTES, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        size = 0
        while size < TRANSFER_BYTES:
            block = opened.read(min(16 << 20, TRANSFER_BYTES - size))
            if not block:
                break
            size += len(block)
        return size / (time.perf_counter() - began) if size else None


def copy_bytes_per_s(device: torch.device, most: int) -> float:
    """Speed of a copy from pageable main memory to a GPU, in bytes a second.  The second of two
    copies is timed.

    most: bytes for which the GPU has room, at least 1.  No more than `TRANSFER_BYTES` are copied.
    """
    source = torch.zeros(min(TRANSFER_BYTES, most), dtype=torch.uint8)
    seconds = 0.0
    for _ in range(2):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        source.to(device)
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
    return len(source) / seconds
