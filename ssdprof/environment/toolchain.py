"""Checks the requirements of Triton, torch and profiles on a machine with a GPU, before the first
kernel is compiled.

Triton compiles a small C module for the launch of each kernel.  It calls a C compiler, which reads
Python's headers and links the driver's library.  A slim container may have none of the three.
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
# package manager -> command that installs packages.  A slim image has no list of packages: dnf and
# zypper fetch it by themselves, apt-get and pacman must be told.
_INSTALLERS = {
    "apt-get": "apt-get update && apt-get install -y",
    "dnf": "dnf install -y",
    "zypper": "zypper install -y",
    "pacman": "pacman -Syu",
}
_PYTHON = f"python{sysconfig.get_python_version()}"  # such as "python3.12"
_PYTHON_HEADERS = {  # package manager -> package with Python.h
    "apt-get": f"{_PYTHON}-dev",
    "dnf": f"{_PYTHON}-devel",
    "zypper": f"{_PYTHON.replace('.', '')}-devel",
    "pacman": "python",
}
_C_LIBRARY = {  # package manager -> package with the headers of the C library
    "apt-get": "libc6-dev",
    "dnf": "glibc-devel",
    "zypper": "glibc-devel",
    "pacman": "glibc",
}


class Check(Record):
    """The check of a requirement: a line of `ssdprof doctor`.

    status: "ok" if it is met; "warn" if it is met with a restriction; "missing" if features that
        need it do not work here.
    hint: what to do; empty if the status is "ok".
    """

    name: Text
    status: Literal["ok", "warn", "missing"]
    detail: Text
    hint: Text = ""


def _need(name: str, met_by: str, lacking: str, command: str) -> Check:
    """The check of a requirement.

    met_by: the program, file or folder that meets it; empty if it is not met.
    lacking: a clause that says what is missing, for a requirement that is not met.
    command: the command after which it would be met.  The hint says if it needs root, as all
        commands except `export` and `unset` do.
    """
    if met_by:
        return Check(name=name, status="ok", detail=met_by)
    needs_root = os.geteuid() != 0 and not command.startswith(("export ", "unset "))
    run = "Run as root" if needs_root else "Run"
    return Check(name=name, status="missing", detail=lacking, hint=f"{run}: {command}")


def needs() -> Iterator[Check]:
    """The checks of all requirements for compiling a kernel.  Without a compiler there is no check
    of the C library's headers, because the compiler finds them.
    """
    compiler = _compiler()
    yield compiler
    if compiler.status == "ok":
        yield _c_library(compiler.detail)
    yield _headers()
    yield _driver_library()
    yield _cache()


def require_gpu(what: str, hint: str) -> torch.device:
    """The current GPU.  Raises MissingCapabilityError without one, in interpreter mode, if Triton
    cannot compile, or if CUDA cannot start the GPU.

    what: beginning of the message, such as "A bench needs".
    hint: what to do if torch has a GPU, and Triton's interpreter is on, or if `unusable_gpu` does
        not know why torch has none.
    """
    if not torch.cuda.is_available() or INTERPRETED:
        reason = "Triton's interpreter is on" if torch.cuda.is_available() else "torch sees none"
        raise MissingCapabilityError(f"{what} an NVIDIA GPU, and {reason}.", unusable_gpu() or hint)
    require_toolchain()
    return torch.device("cuda", torch.cuda.current_device())


def require_toolchain() -> None:
    """Raises MissingCapabilityError for the first requirement of `needs` that is not met, or if
    torch sees a GPU that CUDA cannot start.
    """
    for need in needs():
        if need.status == "missing":
            raise MissingCapabilityError(
                f"Triton cannot compile kernels here: {need.detail}.", need.hint
            )
    if torch.cuda.is_available():
        gpu_memory()


def unusable_gpu() -> str:
    """The reason why torch uses no GPU although the driver has one, and what to do.  Empty if torch
    uses a GPU, if the driver has none, or if there is no driver that answers.
    """
    if torch.cuda.is_available():
        return ""
    version, uuids = ask_nvml(_driver) or (0, [])
    if not uuids:
        return ""
    gpus = plural(len(uuids), "NVIDIA GPU")
    if torch.version.cuda is None:
        return f"The driver has {gpus}, and this torch is built without CUDA.  {cuda_torch()}"
    if int(torch.version.cuda.split(".")[0]) > version // 1000:
        driver_cuda = f"CUDA {version // 1000}.{version % 1000 // 10}"
        return (
            f"The driver has {gpus} and runs {driver_cuda}, and this torch is built for CUDA "
            f"{torch.version.cuda}.  Update NVIDIA's driver.  {cuda_torch('Or run')}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    if not _names_a_gpu(visible.split(",")[0].strip(), uuids):
        return (
            f"CUDA_VISIBLE_DEVICES={visible!r} hides {gpus} from torch.  Run: unset "
            "CUDA_VISIBLE_DEVICES"
        )
    return (
        f"The driver has {gpus}, and torch cannot start one.  Run: python -c 'import torch; "
        "torch.cuda.init()'"
    )


def _names_a_gpu(name: str, uuids: Sequence[str]) -> bool:
    """Whether a name in CUDA_VISIBLE_DEVICES is that of a GPU: its number, or the beginning of its
    UUID.  Any name that begins with "MIG-" counts as that of a GPU.

    uuids: of all GPUs, in the order of their numbers.
    """
    if name.startswith("MIG-") or name in map(str, range(len(uuids))):
        return True
    return name.startswith("GPU-") and any(uuid.startswith(name) for uuid in uuids)


def cuda_torch(begins: str = "Run") -> str:
    """The command that installs the build of torch for this machine's driver, after `begins` and a
    colon.
    """
    command = (
        f"uv pip install --python {sys.executable} --torch-backend auto "
        "--reinstall-package torch torch"
    )
    return f"{begins}: pip install uv && {command}"


def installs(what: Literal["ncu", "driver"]) -> str:
    """The command that installs NVIDIA's profiler or driver with this machine's package manager,
    and in parentheses the repository that has the package, unless Ubuntu's own tool installs it.
    """
    if what == "driver" and shutil.which("ubuntu-drivers"):
        return "ubuntu-drivers install"
    package = {"ncu": "nsight-compute", "driver": "nvidia-driver"}[what]
    return f"{_installer()} {package} (from NVIDIA's repository, or Debian's non-free)"


def others_on_gpu(uuid: str) -> int | None:
    """The number of other processes that compute on the GPU; None if the driver does not report it.

    uuid: of torch's current GPU, as `current_uuid` returns it.
    """

    def count(nvml: ModuleType) -> int:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        return len(nvml.nvmlDeviceGetComputeRunningProcesses(handle))

    running = ask_nvml(count)
    if running is None:
        return None
    # this process is one of them; in a container its id cannot be told from the host's ids
    uses_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return max(0, running - 1) if uses_gpu else running


def find_ncu() -> str | None:
    """The path of the program ncu: on PATH, otherwise in the folders of NVIDIA's installers; None
    if there is none.

    The folders of CUDA's toolkit come before those of Nsight Compute by itself.  Among those of
    either kind, the last name in alphabetical order is taken: in general the latest version.
    """
    on_path = shutil.which("ncu")
    if on_path is not None:
        return on_path
    for pattern in _NCU_FOLDERS:
        for folder in sorted(Path("/").glob(pattern.lstrip("/")), reverse=True):
            if os.access(folder / "ncu", os.X_OK):
                return str(folder / "ncu")
    return None


def ncu_version(program: str) -> str:
    """The version of ncu, such as "2025.3.1.0".  Raises MissingCapabilityError if the program does
    not run or does not report its version.
    """
    try:
        answer = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise MissingCapabilityError(
            f"ncu does not run: {str(error).rstrip('.')}.", "Reinstall Nsight Compute."
        ) from error
    version = re.search(r"Version (\d+\.\d+(\.\d+)*)", answer)
    if version is None:
        raise MissingCapabilityError(
            "ncu does not report its version.", "Reinstall Nsight Compute."
        )
    return version[1]


def _compiler() -> Check:
    """The check for the C compiler that Triton would call: that of CC, even if CC is empty; without
    CC gcc, or else clang.
    """
    from_environment = os.environ.get("CC")
    if from_environment is not None:
        compiler = shutil.which(from_environment) or ""
        lacking = f"CC={from_environment} is not a program"
        return _need("C compiler", compiler, lacking, "unset CC")
    compiler = shutil.which("gcc") or shutil.which("clang") or ""
    lacking = "there is no C compiler (gcc or clang)"
    return _need("C compiler", compiler, lacking, f"{_installer()} gcc")


def _c_library(compiler: str) -> Check:
    """The check for the headers of the C library, which a slim image with a compiler may lack."""
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
    """The check for Python.h in the folder where Triton looks for it."""
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"
    package = _PYTHON_HEADERS[_manager()]
    installed = str(header) if os.path.exists(header) else ""
    lacking = f"Python's headers are not installed ({header} is missing)"
    return _need("Python headers", installed, lacking, f"{_installer()} {package}")


def _driver_library() -> Check:
    """The check for the driver's library where Triton looks for it: in TRITON_LIBCUDA_PATH; without
    that variable in the linker's cache; if the cache has none, in LD_LIBRARY_PATH.
    """
    from_environment = os.environ.get("TRITON_LIBCUDA_PATH")
    linked = _linked_folders()
    on_path = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    lacking = "the linker does not find"
    if from_environment:
        folders = [from_environment]
        lacking = f"TRITON_LIBCUDA_PATH={from_environment} does not hold"
    elif linked is None:  # without ldconfig, Triton fails before it reads LD_LIBRARY_PATH
        folders = []
    else:
        folders = linked or on_path
    lacking += f" {DRIVER_LIBRARY}, the library of NVIDIA's driver"
    elsewhere = _loaded_from() or _with_driver_library(on_path)
    if elsewhere:
        command = f"export TRITON_LIBCUDA_PATH={elsewhere}"
    else:
        command = "unset TRITON_LIBCUDA_PATH" if from_environment else "ldconfig"
    return _need("driver library", _with_driver_library(folders), lacking, command)


def _with_driver_library(folders: Sequence[str]) -> str:
    """The first folder that contains the driver's library; empty if none does."""
    for folder in folders:
        if folder and os.path.exists(f"{folder}/{DRIVER_LIBRARY}"):
            return folder
    return ""


def _loaded_from() -> str:
    """The folder from which this process has loaded the driver's library; empty if it has not."""
    try:
        mapped = Path(_MAPS).read_text().splitlines()
    except OSError:
        return ""
    for line in mapped:
        if "/libcuda.so" in line:
            return os.path.dirname(line.split()[-1])
    return ""


def _linked_folders() -> list[str] | None:
    """Folders with the driver's library in the linker's cache, empty if it has none; None if
    ldconfig, which Triton calls without a check, is missing or fails.
    """
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
    """The check for the folder of Triton's compiled kernels and of the C modules that launch them:
    it, or the folder in which it would be created, must be writable, and modules must load from it.
    """
    # without a home directory this stays "~", as in Triton
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
    """The folder, or if it does not exist, the nearest folder above it that does; None if that is
    no folder, or if this user may not write in it.
    """
    existing = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    is_writable = os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)
    return existing if is_writable else None


def _manager() -> str:
    """The package manager of this machine; apt-get if no known one is found."""
    return next(filter(shutil.which, _INSTALLERS), "apt-get")


def _installer() -> str:
    """The start of the command that installs packages on this machine; the packages follow."""
    return _INSTALLERS[_manager()]


def _driver(nvml: ModuleType) -> tuple[int, list[str]]:
    """The latest version of CUDA that the driver supports, 12040 for 12.4, and the UUIDs of its
    GPUs.
    """
    cuda_version = nvml.nvmlSystemGetCudaDriverVersion_v2()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    return cuda_version, [str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
