"""`ssdprof doctor`: checks what this machine has and lacks, with a hint for each problem."""

import os
import platform
import shutil
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Literal

import torch
import triton
from packaging.requirements import Requirement
from triton import knobs

from ssdprof import operators
from ssdprof.core.words import plural, size_words
from ssdprof.environment.machine import (
    current_uuid,
    gpu,
    gpu_memory,
    installed_version,
    read_clocks,
)
from ssdprof.environment.toolchain import (
    Check,
    cuda_torch,
    find_ncu,
    installs,
    ncu_version,
    needs,
    others_on_gpu,
    unusable_gpu,
    usable,
)
from ssdprof.errors import MissingCapabilityError, masked
from ssdprof.kernels.device import INTERPRETED

# Versions of Triton that, on Hopper, overwrite registers of a chunk scan which its matrix products
# still read.  3.6 was seen to do so in all 8 configurations of mamba_ssm that use WGMMA; 3.7 and
# 3.8 in a chunk scan of ssdprof, whose configurations now avoid that (`kernels/ssd/config.py`), so
# that mamba_ssm's is taken to be affected, too.  3.9 does not.
_RACY_TRITON = ("3.6.", "3.7.", "3.8.")
# torch version -> Triton versions with which the tests ran: the three pairs of the Makefile's
# test-oldest, test and test-newest
_TESTED = {"2.11": ("3.6",), "2.13": ("3.6", "3.9")}
_ROOMY_BYTES = 20 << 30  # free space that is enough for a small checkpoint and its captures
_NVIDIA_PARAMETERS = Path("/proc/driver/nvidia/params")
_PCI = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"  # NVIDIA's vendor id on the PCI bus


def _check(
    name: str, status: Literal["ok", "warn", "missing"], detail: str, hint: str = ""
) -> Check:
    """A check.

    detail: what was found.  hint: what the user can do, or what follows; empty if there is nothing
    to say.
    """
    return Check(name=name, status=status, detail=detail, hint=hint)


def doctor() -> tuple[Check, ...]:
    """Every check, in the order in which they are shown."""
    python = _check("python", "ok", platform.python_version())
    pair = _pair(torch.__version__, triton.__version__)
    tools = (_kernels(), _ncu(), _counters(_NVIDIA_PARAMETERS), _hub(), _cache())
    return (python, *_packages(), pair, *_gpu(), *tools, _libraries(), *_served())


def _packages() -> Iterator[Check]:
    """A check of each package that ssdprof's metadata requires."""
    try:
        wanted = requires("ssdprof") or ()
    except PackageNotFoundError:
        detail = (
            "runs from its sources: without package metadata, the versions of other "
            "packages are not checked"
        )
        yield _check("ssdprof", "warn", detail, "pip install -e . in its folder")
        return
    for text in wanted:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue  # required by an extra, or on other platforms
        name = requirement.name
        version = installed_version(name)
        hint = f"pip install '{requirement}'"
        if version is None:
            yield _check(name, "missing", "not installed", hint)
        elif not requirement.specifier.contains(version, prereleases=True):
            yield _check(name, "warn", f"{version} is not {requirement.specifier}", hint)
        else:
            yield _check(name, "ok", version)


def _pair(torch_version: str, triton_version: str) -> Check:
    """A check of two versions that are used together: ok if the tests ran with such a pair."""
    minor_torch = ".".join(torch_version.split(".")[:2])
    minor_triton = ".".join(triton_version.split(".")[:2])
    name = "torch and triton"
    pair = f"{minor_torch} with {minor_triton}"
    if minor_triton in _TESTED.get(minor_torch, ()):
        return _check(name, "ok", f"{pair}, a tested pair")
    tested = "; ".join(f"{version} with {' or '.join(_TESTED[version])}" for version in _TESTED)
    return _check(name, "warn", f"{pair} is no tested pair", f"Tested: {tested}.")


def _gpu() -> Iterator[Check]:
    """Checks of the GPU, its free memory, whether it is a slice or shared, the tools that compile
    for it, and its clocks.  Without a GPU that torch can use, one check says why.
    """
    device = gpu()
    if device is None:
        yield _absent_gpu()
        return
    details = (
        f"{device.name}, compute capability {device.compute_capability}, driver "
        f"{device.driver}, CUDA {device.cuda}"
    )
    if float(device.compute_capability) < 8:
        hint = "The kernels are written for compute capability 8.0 and later."
        yield _check("gpu", "warn", details, hint)
    else:
        yield _check("gpu", "ok", details)
    try:
        free, total = gpu_memory()
        yield _check("gpu memory", "ok", f"{size_words(free)} free of {size_words(total)}")
    except MissingCapabilityError as error:
        yield _check("gpu memory", "missing", error.message.rstrip("."), error.hint)
    yield from _sharing(device.name)
    yield from needs()
    if read_clocks() is None:
        hint = "Reports will not say whether the GPU was throttled."
        yield _check("clocks", "warn", "NVML does not report the clocks of this GPU", hint)
    else:
        yield _check("clocks", "ok", "readable through NVML")


def _has_nvidia_device() -> bool:
    """Whether an NVIDIA device is on the PCI bus, with or without a driver."""
    vendors = _PCI.glob("*/vendor")
    return any(vendor.read_text().strip() == _NVIDIA for vendor in vendors)


def _absent_gpu() -> Check:
    """The check of a GPU that torch cannot use.  The hint names a driver only if the machine has an
    NVIDIA device.
    """
    if hint := unusable_gpu():
        return _check("gpu", "missing", "torch cannot use the NVIDIA GPU", hint)
    if not _has_nvidia_device():
        hint = "Short prompts work without one; times need one."
        return _check("gpu", "missing", "this machine has no NVIDIA GPU", hint)
    hint = f"Install its driver: {installs('driver')}."
    if not torch.version.cuda:
        hint = f"{hint}  {cuda_torch('Then run')}"
    return _check("gpu", "missing", "the NVIDIA GPU of this machine has no driver", hint)


def _sharing(gpu_name: str) -> Iterator[Check]:
    """Checks whether the GPU is a slice of a larger one (nothing if it is not), and whether other
    processes share it (nothing if the driver does not say).
    """
    if "MIG" in gpu_name:
        hint = (
            "Times hold for slices of this size.  For all of the GPU, run as root: nvidia-smi "
            "-mig 0"
        )
        yield _check("gpu slice", "warn", f"{gpu_name} is a part of a GPU (MIG)", hint)
    uuid = current_uuid()
    others = others_on_gpu(uuid) if uuid else None
    if others:
        hint = (
            "Their work disturbs times.  To see them, run: nvidia-smi "
            "--query-compute-apps=pid,name --format=csv"
        )
        yield _check("gpu sharing", "warn", f"{plural(others, 'other process')} on it", hint)
    elif others == 0:
        yield _check("gpu sharing", "ok", "no other process computes on it")


def _kernels() -> Check:
    """A check of how the bundled kernels run: compiled, in Triton's interpreter, or not at all."""
    has_gpu = torch.cuda.is_available()
    if INTERPRETED:
        hint = "Results are correct but slow to compute; nothing is timed."
        if has_gpu:
            hint = "Unset TRITON_INTERPRET to use the GPU."
        return _check("kernels", "warn", "run in Triton's interpreter", hint)
    if has_gpu:
        compiler = f"Triton {triton.__version__} with ptxas {knobs.nvidia.ptxas.version}"
        if triton.__version__.startswith(_RACY_TRITON):
            compiler += (
                " (on Hopper, mamba_ssm's _chunk_scan_fwd_kernel overwrites operands of matrix "
                "products in flight)"
            )
        return _check("kernels", "ok", f"compiled by {compiler} for the GPU")
    hint = unusable_gpu() or "Set TRITON_INTERPRET=1 to run them on the CPU."
    return _check("kernels", "missing", "compiled by Triton for a GPU that torch cannot use", hint)


# libraries that have kernels of these operators, but no name for --impl, with the reasons
WITHOUT_NAMES = (
    "without a name: attn_gym (not seen to be right: its fused kernels need a GPU and "
    "cutlass-dsl), kernels of the Hub (not tried: each is a download that runs its own code)"
)


def _libraries() -> Check:
    """A check that lists the installed packages of the libraries that --impl knows, and how to
    install the others.  None of them is needed.
    """
    names_of: dict[str, list[str]] = {}  # package -> names of implementations
    for operator in operators.records():
        for name, library in operator.libraries.items():
            if library.package:
                names_of.setdefault(library.package, []).append(name)
    details = []
    absent = []
    for package, names in names_of.items():
        implementations = ", ".join(dict.fromkeys(names))
        distribution = package.rpartition("/")[2]  # `package` may be the address of a repository
        if version := installed_version(distribution):
            details.append(f"{implementations} ({package} {version})")
        else:
            absent.append(f"{implementations} (pip install {package})")
    if absent:
        details.append(f"not installed: {'; '.join(absent)}")
    return _check("other libraries", "ok", "; ".join([*details, WITHOUT_NAMES]))


def _served() -> Iterator[Check]:
    """A check for each operator, which says what servers run for it on a GPU of compute capability
    9.0; none on other GPUs, where that is not known, and without a GPU.
    """
    device = gpu()
    if device is not None and device.compute_capability == "9.0":
        for operator in operators.records():
            yield _check(f"servers, {operator.title}", "ok", operator.served)


def _ncu() -> Check:
    """A check whether NVIDIA Nsight Compute (ncu) is installed and can be used."""
    path = find_ncu()
    if path is None:
        hint = f"It shows warp stalls.  Run: {installs('ncu')}"
        if gpu() is None and not _has_nvidia_device():
            hint = "It records warp stalls, on a machine with an NVIDIA GPU."
        return _check("ncu", "missing", "not found", hint)
    try:
        return _check("ncu", "ok", ncu_version(path))
    except MissingCapabilityError as error:
        return _check("ncu", "missing", error.message.removeprefix("ncu ").rstrip("."), error.hint)


def _counters(parameters: Path) -> Check:
    """A check whether the driver lets this user read hardware counters.

    parameters: the driver's file, which is missing without a driver.
    """
    name = "hardware counters"
    if not parameters.exists():
        hint = "Warp stalls need an NVIDIA GPU and its driver."
        return _check(name, "missing", "no NVIDIA driver", hint)
    if "RmProfilingAdminOnly: 1" not in parameters.read_text():
        return _check(name, "ok", "open to every user")
    if os.geteuid() == 0:
        return _check(name, "ok", "for administrators only, which this process is")
    hint = (
        "Run ssdprof as root, or, as root: echo 'options nvidia "
        "NVreg_RestrictProfilingToAdminUsers=0' > "
        "/etc/modprobe.d/ncu.conf, and start the machine again."
    )
    return _check(name, "missing", "for administrators only", hint)


def _hub() -> Check:
    """A check of the hub's address, and whether downloads are allowed, without contacting it.

    Raises BadInputError for an environment variable that the hub's client cannot read.
    """
    import_module("ssdprof.checkpoint.hub")
    from huggingface_hub import constants, is_offline_mode

    if is_offline_mode():
        return _check(
            "hub",
            "warn",
            "HF_HUB_OFFLINE is set: cached models only",
            "Unset HF_HUB_OFFLINE to download.",
        )
    return _check("hub", "ok", f"{masked(constants.ENDPOINT)}, not contacted by this check")


def _cache() -> Check:
    """A check of the hub's folder for checkpoints, and of the free space there."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    existing = usable(folder)
    if existing is None:
        hint = "Set HF_HOME to a folder that you can write to."
        return _check("cache", "missing", "the hub's cache is not writable", hint)
    free = shutil.disk_usage(existing).free
    if free < _ROOMY_BYTES:
        hint = "Large checkpoints will not fit: set HF_HOME to a larger disk."
        return _check("cache", "warn", f"{size_words(free)} free", hint)
    return _check("cache", "ok", f"{size_words(free)} free")
