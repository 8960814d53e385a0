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
from ssdprof.environment.child import started
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
# The reasons for which a GPU is slower than it could be.  Idling and a clock limit set by the owner
# are not among them: an idle GPU is not in the timed region, and the clocks themselves show the
# limit.
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
# The files with a limit, the usage, and the part of the usage that is page cache: the kernel frees
# it when memory is needed.  A checkpoint that was just downloaded or read is in the page cache.
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
_V2 = "memory.max", "memory.current", ("inactive_file", "active_file")
TRANSFER_BYTES = 256 << 20  # read from a file or copied to a GPU; 0.1 s from a fast disk


def collect() -> Environment:
    """The current GPU, if there is one, the machine and the versions.  Holds no host name, user
    name, path or token.
    """
    versions = {name: installed_version(name) for name in _PACKAGES}
    packages = {name: version for name, version in versions.items() if version is not None}
    if torch.cuda.is_available():
        # Triton's own, or that of TRITON_PTXAS_PATH
        packages["ptxas"] = str(knobs.nvidia.ptxas.version)
    return Environment(
        gpu=gpu(),
        cpu=_cpu_model(),
        platform=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        packages=packages,
    )


def gpu() -> Gpu | None:
    """torch's current CUDA device."""
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
    """None if the distribution is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def kernels_hash(operator: str) -> str:
    """SHA-256 of an operator's machine code for sm_90, as Triton 3.6.0 compiles the launches of the
    compiler's tests.

    It is computed when the kernels change (tests/kernels/machine_code.py) and read here.  Empty for
    an operator without bundled kernels.
    """
    hashes: dict[str, str] = json.loads(
        files("ssdprof.kernels").joinpath("machine_code.json").read_text("utf-8")
    )
    return hashes.get(operator, "")


def _cpu_model() -> str:
    """The processor's name from Linux, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


# --- clocks


def read_clocks() -> Clocks | None:
    """Read the clocks of torch's current GPU: one reading, as the first and as the last.  None
    without a GPU, without NVML, or if the driver does not report them.
    """
    uuid = current_uuid()
    if uuid is None:
        return None

    def reading(nvml: ModuleType) -> Clocks:
        """Clocks, temperature and throttling now, as the first and as the last reading."""
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
    """The UUID of torch's current GPU, by which NVML finds it whatever CUDA_VISIBLE_DEVICES hides
    or reorders.
    """
    if not torch.cuda.is_available():
        return None
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def ask_nvml(question: Callable[[ModuleType], T]) -> T | None:
    """NVML's answer; None if its library cannot be loaded, the driver does not run, or does not
    know.
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
    """Bytes that this process can still allocate on `device`.

    On a GPU, others may hold memory, and `torch.cuda.set_per_process_memory_fraction` may have set
    a limit.
    """
    if device.type != "cuda":
        return host_memory()
    free, total = gpu_memory(device)
    allocated = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - allocated
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free + cached, allowed - allocated)


def gpu_memory(device: torch.device | None = None) -> tuple[int, int]:
    """Free and total bytes of a GPU, the current one by default.  MissingCapabilityError if CUDA
    cannot start it.
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
    """Bytes of main memory available to this process: its share, if torchrun started several."""
    return _available() // started()


def _available() -> int:
    """Bytes of main memory by Linux's estimate, or less if a control group limits it."""
    return min((_numbers(_MEMINFO)["MemAvailable:"] * 1024, *_left_in_groups()))


def _left_in_groups() -> Iterator[int]:
    """The memory that each limit of this process's control groups leaves, for versions 2 and 1."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:  # a kernel without control groups
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers not in ("", "memory"):
            continue
        top = _GROUPS / controllers
        limit, used, cached = _V1 if controllers else _V2
        inner = top / path.lstrip("/")  # missing in a container that sees its own group as the root
        for group in (inner, *inner.parents[: len(inner.parts) - len(top.parts)]):
            try:
                allowed, taken = (int((group / name).read_text()) for name in (limit, used))
                sizes = _numbers(group / "memory.stat")
                yield allowed - taken + sum(sizes.get(name, 0) for name in cached)
            except (OSError, ValueError):  # no such group, or its limit is "max"
                continue


def _numbers(file: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number in each line."""
    return {name: int(number) for name, number, *_ in map(str.split, file.read_text().splitlines())}


# --- transfer speeds


def read_bytes_per_s(file: Path) -> float | None:
    """Speed of the disk: reads the beginning of `file`, after dropping it from the system's cache
    if possible.

    None for an empty file.
    """
    with file.open("rb", buffering=0) as opened:
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(opened.fileno(), 0, TRANSFER_BYTES, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        size = 0
        while size < TRANSFER_BYTES and (
            piece := opened.read(min(16 << 20, TRANSFER_BYTES - size))
        ):
            size += len(piece)
        return size / (time.perf_counter() - began) if size else None


def copy_bytes_per_s(device: torch.device, most: int) -> float:
    """Speed of a copy from main memory, not pinned, to a GPU.  The first copy is a warm-up.

    most: bytes for which the GPU has room.
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
