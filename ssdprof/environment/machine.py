"""Records the machine: GPU, processor, versions, and the hash of the kernels' sources."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

from ssdprof.environment.clocks import driver_version
from ssdprof.schema import Environment, Gpu

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


def collect() -> Environment:
    """The current GPU, if there is one, the machine and the versions.  Holds no host name, user name, path or token."""
    return Environment(
        gpu=gpu(),
        cpu=_cpu_model(),
        platform=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        packages={name: found for name in _PACKAGES if (found := installed_version(name)) is not None},
    )


def gpu() -> Gpu | None:
    """torch's current CUDA device."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(
        name=properties.name,
        compute_capability=f"{properties.major}.{properties.minor}",
        sm_count=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        l2_bytes=properties.L2_cache_size,
        driver=driver_version() or "unknown",
        cuda=torch.version.cuda or "unknown",
    )


def installed_version(package: str) -> str | None:
    """None if the distribution is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def kernels_hash(operator: str) -> str:
    """SHA-256 of an operator's machine code for sm_90, as Triton 3.6.0 compiles the launches of the compiler's tests.

    It is computed when the kernels change (tests/kernels/machine_code.py) and read here.  Raises ValueError for an
    operator without bundled kernels.
    """
    hashes: dict[str, str] = json.loads(files("ssdprof.kernels").joinpath("machine_code.json").read_text("utf-8"))
    if operator not in hashes:
        raise ValueError(f"no kernels of an operator {operator!r}")
    return hashes[operator]


def _cpu_model() -> str:
    """The processor's name from Linux, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
