"""Records the machine: GPU, processor, versions, and the hash of the kernels' sources."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

from ssdprof.core.subject import Environment, Gpu
from ssdprof.environment.clocks import driver_version

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
    """SHA-256 of the sources that determine an operator's machine code and the meaning of its configurations.

    These are all Python files under `kernels/<operator>/`, in sub-folders too, and the files directly in `kernels/`,
    which all operators share.  Raises ValueError if `kernels/` has no folder of that name.
    """
    folder = Path(str(files("ssdprof.kernels")))
    own = sorted((folder / operator).rglob("*.py")) if operator else []
    if not own:
        raise ValueError(f"no kernels of an operator {operator!r}")
    digest = hashlib.sha256()
    for file in [*sorted(folder.glob("*.py")), *own]:
        text = file.read_bytes()
        digest.update(f"{file.relative_to(folder).as_posix()}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()


def _cpu_model() -> str:
    """The processor's name from Linux, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
