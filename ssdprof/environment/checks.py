"""`ssdprof doctor`: checks what this machine has and lacks, with a hint for each problem."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from ssdprof.environment.clocks import current_uuid, read
from ssdprof.environment.machine import gpu, installed_version
from ssdprof.environment.toolchain import needs, others_on_gpu, unusable_gpu
from ssdprof.errors import MissingCapabilityError, masked
from ssdprof.quantities import size_words
from ssdprof.schema import Record

# Triton versions under which matrix products of a chunk scan read registers that are overwritten too early on Hopper:
# all 8 configurations of mamba_ssm that use WGMMA under 3.6, and by our own kernel 3.7 and 3.8; not 3.9
_RACY_TRITON = ("3.6.", "3.7.", "3.8.")
_ROOMY_BYTES = 20 << 30  # a small checkpoint and its captures
_NVIDIA_PARAMETERS = Path("/proc/driver/nvidia/params")
_NCU_FOLDERS = ("/usr/local/cuda*/bin", "/opt/nvidia/nsight-compute/*")


class Check(Record):
    """ok: works.  warn: works with a restriction.  missing: features that need it do not work here."""

    name: str
    status: Literal["ok", "warn", "missing"]
    detail: str
    hint: str = ""  # empty if ok


def doctor() -> tuple[Check, ...]:
    """Every check, the most important first."""
    return (
        Check(name="python", status="ok", detail=platform.python_version()),
        *_packages(),
        *_gpu(),
        _kernels(),
        _ncu(),
        _counters(_NVIDIA_PARAMETERS),
        _hub(),
        _cache(),
    )


def _packages() -> Iterator[Check]:
    """The packages that ssdprof's metadata requires."""
    try:
        wanted = requires("ssdprof") or ()
    except PackageNotFoundError:
        yield Check(
            name="ssdprof",
            status="warn",
            detail="runs from its sources: without package metadata, the versions of other packages are not checked",
            hint="pip install -e . in its folder",
        )
        return
    for text in wanted:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found, name = installed_version(requirement.name), requirement.name
        if found is None:
            yield Check(name=name, status="missing", detail="not installed", hint=f"pip install '{requirement}'")
        elif not requirement.specifier.contains(found, prereleases=True):
            hint = f"pip install '{requirement}'"
            yield Check(name=name, status="warn", detail=f"{found} is not {requirement.specifier}", hint=hint)
        else:
            yield Check(name=name, status="ok", detail=found)


def _gpu() -> Iterator[Check]:
    import torch

    from ssdprof.environment.memory import gpu_memory

    found = gpu()
    if found is None:
        why = "torch sees no NVIDIA GPU" if torch.version.cuda else "this torch is built without CUDA"
        hint = "Short prompts work without a GPU.  Timings need one, with its driver and a CUDA build of torch."
        yield Check(name="gpu", status="missing", detail=why, hint=unusable_gpu() or hint)
        return
    details = f"{found.name}, compute capability {found.compute_capability}, driver {found.driver}, CUDA {found.cuda}"
    if float(found.compute_capability) < 8:
        hint = "The kernels are written for compute capability 8.0 and later."
        yield Check(name="gpu", status="warn", detail=details, hint=hint)
    else:
        yield Check(name="gpu", status="ok", detail=details)
    try:
        free, total = gpu_memory()
        yield Check(name="gpu memory", status="ok", detail=f"{size_words(free)} free of {size_words(total)}")
    except MissingCapabilityError as error:
        yield Check(name="gpu memory", status="missing", detail=error.message.rstrip("."), hint=error.hint)
    yield from _company(found.name)
    for need in needs():
        status: Literal["ok", "missing"] = "ok" if need.found else "missing"
        hint = "" if need.found else need.hint
        yield Check(name=need.name, status=status, detail=need.found or need.lacking, hint=hint)
    if read() is None:
        hint = "Reports will not say whether the GPU was throttled."
        yield Check(name="clocks", status="warn", detail="NVML does not report the clocks of this GPU", hint=hint)
    else:
        yield Check(name="clocks", status="ok", detail="readable through NVML")


def _company(gpu_name: str) -> Iterator[Check]:
    """Whether the GPU is a slice of a larger one, or is shared with other processes."""
    if "MIG" in gpu_name:
        hint = "Times hold for slices of this size.  For all of the GPU, run as root: nvidia-smi -mig 0"
        yield Check(name="gpu slice", status="warn", detail=f"{gpu_name} is a part of a GPU (MIG)", hint=hint)
    uuid = current_uuid()
    others = others_on_gpu(uuid) if uuid else None
    if others:
        hint = "Their work disturbs times.  To see them, run: nvidia-smi --query-compute-apps=pid,name --format=csv"
        yield Check(
            name="gpu sharing", status="warn", detail=f"{others} other process{'es' * (others > 1)} on it", hint=hint
        )
    elif others == 0:
        yield Check(name="gpu sharing", status="ok", detail="no other process computes on it")


def _compiler() -> str:
    """Versions of Triton and its ptxas, and whether mamba_ssm's kernel has the race that ours avoid."""
    import triton
    from triton import knobs

    detail = f"Triton {triton.__version__} with ptxas {knobs.nvidia.ptxas.version}"
    if triton.__version__.startswith(_RACY_TRITON):
        detail += " (mamba_ssm's _chunk_scan_fwd_kernel overwrites operands of matrix products in flight)"
    return detail


def _kernels() -> Check:
    import torch

    from ssdprof.kernels._triton import INTERPRETED

    usable = torch.cuda.is_available()
    if not INTERPRETED and usable:
        return Check(name="kernels", status="ok", detail=f"compiled by {_compiler()} for the GPU")
    if not INTERPRETED:
        detail = "compiled by Triton for a GPU that torch cannot use"
        hint = unusable_gpu() or "Set TRITON_INTERPRET=1 to run them on the CPU."
        return Check(name="kernels", status="missing", detail=detail, hint=hint)
    hint = (
        "Unset TRITON_INTERPRET to use the GPU."
        if usable
        else "Results are correct but slow to compute; nothing is timed."
    )
    return Check(name="kernels", status="warn", detail="run in Triton's interpreter", hint=hint)


def _ncu() -> Check:
    path = find_ncu()
    if path is None:
        return Check(
            name="ncu", status="missing", detail="not found", hint="Install Nsight Compute to see warp stalls."
        )
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Check(name="ncu", status="missing", detail=f"does not run: {error}", hint="Reinstall Nsight Compute.")
    version = re.search(r"Version (\S+)", answer)
    return Check(name="ncu", status="ok", detail=version.group(1) if version else answer.strip())


def find_ncu() -> str | None:
    """The ncu on PATH, else the latest where NVIDIA's installers put it."""
    on_path = shutil.which("ncu")
    if on_path is not None:
        return on_path
    for pattern in _NCU_FOLDERS:
        for folder in sorted(Path("/").glob(pattern.lstrip("/")), reverse=True):
            if os.access(folder / "ncu", os.X_OK):
                return str(folder / "ncu")
    return None


def _counters(parameters: Path) -> Check:
    """Whether the driver lets this user read hardware counters."""
    name = "hardware counters"
    if not parameters.exists():
        return Check(name=name, status="missing", detail="no NVIDIA driver", hint="Warp stalls need one.")
    admin_only = "RmProfilingAdminOnly: 1" in parameters.read_text()
    if not admin_only:
        return Check(name=name, status="ok", detail="open to every user")
    if os.geteuid() == 0:
        return Check(name=name, status="ok", detail="for administrators only, which this process is")
    return Check(
        name=name,
        status="missing",
        detail="for administrators only",
        hint="Run as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0.",
    )


def _hub() -> Check:
    from huggingface_hub import constants, is_offline_mode

    if is_offline_mode():
        hint = "Unset HF_HUB_OFFLINE to download."
        return Check(name="hub", status="warn", detail="HF_HUB_OFFLINE is set: cached models only", hint=hint)
    return Check(name="hub", status="ok", detail=f"{masked(constants.ENDPOINT)}, not contacted by this check")


def _cache() -> Check:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    existing = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    if not os.path.isdir(existing) or not os.access(existing, os.W_OK | os.X_OK):
        hint = "Set HF_HOME to a folder that you can write to."
        return Check(name="cache", status="missing", detail="the hub's cache is not writable", hint=hint)
    free = shutil.disk_usage(existing).free
    if free < _ROOMY_BYTES:
        hint = "Large checkpoints will not fit: set HF_HOME to a larger disk."
        return Check(name="cache", status="warn", detail=f"{size_words(free)} free", hint=hint)
    return Check(name="cache", status="ok", detail=f"{size_words(free)} free")
