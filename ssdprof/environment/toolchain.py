"""What Triton, torch and profiles need on a machine with a GPU, checked before the first kernel is
compiled.

Triton compiles a small C module for each kernel's launch: it calls a C compiler with Python's
headers and links the driver's library.  A slim container has none of them.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch

from ssdprof.core.base import Record, Text
from ssdprof.core.words import plural
from ssdprof.environment.machine import ask_nvml, gpu_memory
from ssdprof.errors import MissingCapabilityError
from ssdprof.kernels.device import INTERPRETED

DRIVER_LIBRARY = "libcuda.so.1"
_LDCONFIG = "/sbin/ldconfig"
_MAPS = "/proc/self/maps"
_NCU_FOLDERS = ("/usr/local/cuda*/bin", "/opt/nvidia/nsight-compute/*")
# A slim image has no list of packages until it is fetched.
_INSTALLERS = {
    "apt-get": "apt-get update && apt-get install -y",
    "dnf": "dnf install -y",
    "zypper": "zypper install -y",
    "pacman": "pacman -S",
}
_C_LIBRARY = {
    "apt-get": "libc6-dev",
    "dnf": "glibc-devel",
    "zypper": "glibc-devel",
    "pacman": "glibc",
}


class Check(Record):
    """A line of `ssdprof doctor`.

    status: ok: it works; warn: it works with a restriction; missing: features that need it do not
    work here.
    """

    name: Text
    status: Literal["ok", "warn", "missing"]
    detail: Text
    hint: Text = ""  # empty if ok


def _need(name: str, met_by: str, lacking: str, command: str) -> Check:
    """A requirement, which `command` meets.  Package managers need root; `export` and `unset` do
    not.
    """
    if met_by:
        return Check(name=name, status="ok", detail=met_by)
    needs_root = os.geteuid() != 0 and not command.startswith(("export ", "unset "))
    run = "Run as root" if needs_root else "Run"
    return Check(name=name, status="missing", detail=lacking, hint=f"{run}: {command}")


def needs() -> Iterator[Check]:
    """All requirements for compiling a kernel, met or not."""
    compiler = _compiler()
    yield compiler
    if compiler.status == "ok":
        yield _c_library(compiler.detail)
    yield _headers()
    yield _driver_library()
    yield _cache()


def require_gpu(what: str, hint: str) -> torch.device:
    """The current GPU.  Raises MissingCapabilityError without one, in interpreter mode, or if
    Triton cannot compile.

    what: the start of the sentence, such as "A bench needs".
    """
    if not torch.cuda.is_available() or INTERPRETED:
        why = "Triton's interpreter is on" if torch.cuda.is_available() else "torch sees none"
        raise MissingCapabilityError(f"{what} an NVIDIA GPU, and {why}.", unusable_gpu() or hint)
    require_toolchain()
    return torch.device("cuda", torch.cuda.current_device())


def require_toolchain() -> None:
    """Raises MissingCapabilityError for the first unmet requirement, or for a GPU that CUDA cannot
    start.
    """
    for need in needs():
        if need.status == "missing":
            raise MissingCapabilityError(
                f"Triton cannot compile kernels here: {need.detail}.", need.hint
            )
    if torch.cuda.is_available():
        gpu_memory()


def unusable_gpu() -> str:
    """Why torch uses no GPU although the driver has one, with a hint; empty if it uses one or there
    is none.
    """
    if torch.cuda.is_available():
        return ""
    version, uuids = ask_nvml(_driver) or (0, [])
    if not uuids:
        return ""
    there = plural(len(uuids), "NVIDIA GPU")
    if torch.version.cuda is None:
        return f"The driver has {there}, and this torch is built without CUDA.  {cuda_torch()}"
    if int(torch.version.cuda.split(".")[0]) > version // 1000:
        cuda = f"CUDA {version // 1000}.{version % 1000 // 10}"
        return (
            f"The driver has {there} and runs {cuda}, and this torch is built for CUDA "
            f"{torch.version.cuda}.  Update NVIDIA's driver.  {cuda_torch('Or run')}"
        )
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    first = shown.split(",")[0].strip()
    there_is = first.startswith("MIG-") or any(first == str(number) for number in range(len(uuids)))
    if not there_is and not (
        first.startswith("GPU-") and any(uuid.startswith(first) for uuid in uuids)
    ):
        return (
            f"CUDA_VISIBLE_DEVICES={shown!r} hides {there} from torch.  Run: unset "
            "CUDA_VISIBLE_DEVICES"
        )
    return (
        f"The driver has {there}, and torch cannot start one.  Run: python -c 'import torch; "
        "torch.cuda.init()'"
    )


def cuda_torch(begins: str = "Run") -> str:
    """The command that installs the build of torch that fits the driver."""
    command = (
        f"uv pip install --python {sys.executable} --torch-backend auto "
        "--reinstall-package torch torch"
    )
    return f"{begins}: pip install uv && {command}"


def installs(what: Literal["ncu", "driver"]) -> str:
    """The command that installs NVIDIA's profiler or driver, by this machine's package manager."""
    if what == "driver" and shutil.which("ubuntu-drivers"):
        return "ubuntu-drivers install"
    package = {"ncu": "nsight-compute", "driver": "nvidia-driver"}[what]
    return f"{_installer()} {package} (from NVIDIA's repository, or Debian's non-free)"


def others_on_gpu(uuid: str) -> int | None:
    """Number of other processes that compute on the GPU; None if the driver does not report it."""

    def count(nvml: ModuleType) -> int:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        return len(nvml.nvmlDeviceGetComputeRunningProcesses(handle))

    running = ask_nvml(count)
    # In a container, process ids are those of the host: one of them is this process.
    mine = 1 if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    return None if running is None else max(0, running - mine)


def find_ncu() -> str | None:
    """The ncu on PATH, else the latest where NVIDIA's installers put it."""
    if on_path := shutil.which("ncu"):
        return on_path
    for pattern in _NCU_FOLDERS:
        for folder in sorted(Path("/").glob(pattern.lstrip("/")), reverse=True):
            if os.access(folder / "ncu", os.X_OK):
                return str(folder / "ncu")
    return None


def ncu_version(program: str) -> str:
    """Such as "2025.3.1.0".  MissingCapabilityError if the program does not run, or does not
    say.
    """
    try:
        answer = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        why = f"does not run: {str(error).rstrip('.')}"
        raise MissingCapabilityError(f"ncu {why}.", "Reinstall Nsight Compute.") from error
    if version := re.search(r"Version (\d+\.\d+(\.\d+)*)", answer):
        return version[1]
    raise MissingCapabilityError("ncu does not report its version.", "Reinstall Nsight Compute.")


def _compiler() -> Check:
    """The C compiler, searched as Triton does."""
    wanted = os.environ.get("CC")
    if wanted is not None:
        return _need(
            "C compiler", shutil.which(wanted) or "", f"CC={wanted} is not a program", "unset CC"
        )
    compiler = shutil.which("gcc") or shutil.which("clang") or ""
    lacking = "there is no C compiler (gcc or clang)"
    return _need("C compiler", compiler, lacking, f"{_installer()} gcc")


def _c_library(compiler: str) -> Check:
    """The headers of the C library, which may be missing in a slim image with a compiler."""
    package = _C_LIBRARY[_manager()]
    header = "dlfcn.h"
    try:
        subprocess.run(
            [compiler, "-E", "-xc", "-"],
            input=b"#include <dlfcn.h>\n",
            capture_output=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        header = ""
    lacking = f"{compiler} finds no dlfcn.h of the C library"
    return _need("C library", header, lacking, f"{_installer()} {package}")


def _headers() -> Check:
    """The check for Python.h where Triton looks for it."""
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    package = {"apt-get": f"python{version}-dev", "dnf": f"python{version}-devel"}.get(
        _manager(), "python3-dev"
    )
    installed = str(header) if os.path.exists(header) else ""
    lacking = f"Python's headers are not installed ({header} is missing)"
    return _need("Python headers", installed, lacking, f"{_installer()} {package}")


def _driver_library() -> Check:
    """The driver's library, as Triton finds it: TRITON_LIBCUDA_PATH, else the linker's cache, then
    LD_LIBRARY_PATH.
    """
    named = os.environ.get("TRITON_LIBCUDA_PATH")
    linked = _linked_folders()
    on_path = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    if named:
        folders = [named]
        lacking = f"TRITON_LIBCUDA_PATH={named} does not hold"
    else:
        folders = [] if linked is None else linked or on_path
        lacking = "the linker does not find"
    lacking += f" {DRIVER_LIBRARY}, the library of NVIDIA's driver"
    if elsewhere := _loaded_from() or _with_driver_library(on_path):
        command = f"export TRITON_LIBCUDA_PATH={elsewhere}"
    else:
        command = "unset TRITON_LIBCUDA_PATH" if named else "ldconfig"
    return _need("driver library", _with_driver_library(folders), lacking, command)


def _with_driver_library(folders: Sequence[str]) -> str:
    """The first folder that contains the driver's library; empty if none does."""
    return next(
        (folder for folder in folders if folder and os.path.exists(f"{folder}/{DRIVER_LIBRARY}")),
        "",
    )


def _loaded_from() -> str:
    """The folder of the driver's library in this process; empty if it is not loaded."""
    try:
        mapped = Path(_MAPS).read_text().splitlines()
    except OSError:
        return ""
    return next((os.path.dirname(line.split()[-1]) for line in mapped if "/libcuda.so" in line), "")


def _linked_folders() -> list[str] | None:
    """Folders from the linker's cache; None without ldconfig, which Triton does not expect."""
    try:
        answer = subprocess.run(
            [_LDCONFIG, "-p"], capture_output=True, text=True, check=True, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return [
        os.path.dirname(line.split()[-1]) for line in answer.splitlines() if DRIVER_LIBRARY in line
    ]


def _cache() -> Check:
    """Triton's folder for compiled kernels, from which it also loads modules."""
    # stays "~" for a user without a home, as in Triton
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache")).absolute()
    existing = usable(folder)
    if existing is None:
        lacking = f"its cache {folder} cannot be written"
    elif os.statvfs(existing).f_flag & os.ST_NOEXEC:
        lacking = (
            f"its cache {folder} is on a file system that is mounted noexec, from which no "
            "module can be loaded"
        )
    else:
        lacking = ""
    return _need(
        "Triton's cache",
        "" if lacking else str(folder),
        lacking,
        "export TRITON_CACHE_DIR=/tmp/triton",
    )


def usable(folder: Path) -> Path | None:
    """The folder, or the deepest one above it that exists; None if this user may not write
    there.
    """
    existing = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    return existing if os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK) else None


def _manager() -> str:
    return next((name for name in _INSTALLERS if shutil.which(name)), "apt-get")


def _installer() -> str:
    return _INSTALLERS[_manager()]


def _driver(nvml: ModuleType) -> tuple[int, list[str]]:
    """The latest version of CUDA that the driver supports, 12040 for 12.4, and the UUIDs of its
    GPUs.
    """
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    return nvml.nvmlSystemGetCudaDriverVersion_v2(), [
        str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles
    ]
