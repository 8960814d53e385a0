"""The ncu program: finds it, makes the command that profiles one process, and explains its errors."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ssdprof.environment.checks import find_ncu
from ssdprof.errors import MissingCapabilityError, how_ended

OLDEST = (2023, 1)  # the first with complete counters for Hopper
RANGE = "ssdprof"  # NVTX range around the one call that is profiled
SECTIONS = (
    "LaunchStats",
    "Occupancy",
    "SpeedOfLight",
    "SpeedOfLight_RooflineChart",  # fp32 arithmetic
    "SpeedOfLight_HierarchicalTensorRooflineChart",
    "MemoryWorkloadAnalysis",
    "MemoryWorkloadAnalysis_Tables",  # bytes of DRAM and L2
    "SchedulerStats",
    "WarpStateStats",
    "SourceCounters",
)
_REMEDIES = (
    "Run as root (in a container: with --cap-add=SYS_ADMIN), or let every user read them: put 'options nvidia "
    "NVreg_RestrictProfilingToAdminUsers=0' into /etc/modprobe.d/nvidia.conf and load the driver again."
)
# Environment variables that a child process gets.  An allow list, so that unknown variables with tokens are not passed.
_PASSED = re.compile(
    r"(PATH|HOME|USER|LOGNAME|SHELL|TMPDIR|LANG|TZ|TERM|CC|CXX|CPATH|VIRTUAL_ENV|LIBRARY_PATH|LD_LIBRARY_PATH|"
    r"C_INCLUDE_PATH|XDG_CACHE_HOME|(LC|CUDA|NVIDIA|NV|OMP|CONDA|PYTHON|TORCH|TORCHINDUCTOR|TRITON)_\w*|PYTHON[A-Z]+)"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|(?<![A-Z])KEY(?![A-Z])")


@dataclass(frozen=True)
class Program:
    """An ncu that is new enough."""

    path: Path
    version: str


@dataclass(frozen=True)
class Complaint:
    """A pattern in ncu's output, with the message and the hint for the user."""

    words: str
    message: str
    hint: str


COMPLAINTS = (
    Complaint("ERR_NVGPUCTRPERM", "The driver does not let this user read the GPU's hardware counters.", _REMEDIES),
    Complaint(
        "LibraryNotLoaded|Failed to initialize the profiler",
        "ncu cannot reach the NVIDIA driver's profiler: the kernel driver is sandboxed here, as in gVisor.",
        "Use a machine or container that talks to the kernel driver directly.",
    ),
    Complaint(
        "not compatible with Nsight Compute|driver is not supported",
        "This ncu and the NVIDIA driver do not fit together.",
        "Install the ncu that comes with the driver's CUDA version, or a newer driver.",
    ),
    Complaint(
        "driver resource was unavailable|[Pp]rofiler.*already in use|another.*profil",
        "Another profiler holds the GPU's counters.",
        "Stop it: DCGM ('nv-hostengine'), another ncu, or a torch profiler.",
    ),
    Complaint(
        "Failed to connect to",
        "ncu could not attach to the process that it started.",
        "Unset what injects other tools into processes: CUDA_INJECTION64_PATH, LD_PRELOAD.",
    ),
    Complaint(
        "No kernels were profiled",
        "ncu profiled no kernel: none of the requested kernels was launched inside the range.",
        "Does this implementation launch Triton kernels?",
    ),
)


def find() -> Program:
    """The newest ncu on this machine.  Raises MissingCapabilityError if there is none, or if it is too old."""
    found = find_ncu()
    if found is None:
        raise MissingCapabilityError(
            "ncu is not installed: NVIDIA Nsight Compute is needed to read warp stalls.",
            "Install Nsight Compute, or read a report that was made elsewhere: ssdprof stalls --from FILE.",
        )
    try:
        answer = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise MissingCapabilityError(
            f"ncu does not run: {str(error).rstrip('.')}.", "Reinstall Nsight Compute."
        ) from error
    return Program(Path(found), check_version(answer))


def check_version(answer: str) -> str:
    """The version in the output of `ncu --version`.  Raises MissingCapabilityError if it is too old or missing."""
    version = re.search(r"Version (\d+)\.(\d+)(\.\d+)*", answer)
    if version is None:
        raise MissingCapabilityError("ncu does not report its version.", "Reinstall Nsight Compute.")
    if (int(version[1]), int(version[2])) < OLDEST:
        raise MissingCapabilityError(
            f"ncu {version[0].split()[1]} is too old: it must be {'.'.join(map(str, OLDEST))} or newer.",
            "Install a newer Nsight Compute; it need not be that of the CUDA toolkit.",
        )
    return version[0].split()[1]


def command(
    ncu: Program,
    report: Path,
    kernels: Sequence[str],
    launches: int,
    target: Sequence[str],
    sections: Sequence[str] = SECTIONS,
) -> tuple[str, ...]:
    """Profile `launches` launches of `kernels` in the range RANGE of the process `target`, into `report`.

    Kernel replay: ncu saves and restores memory between its passes, tickets and flags included, so kernels whose
    programs wait for each other do not hang.
    """
    names = "|".join(re.escape(name) for name in dict.fromkeys(kernels))
    return (
        str(ncu.path),
        *("--config-file", "off"),
        "-f",
        *("-o", str(report)),
        *("--target-processes", "application-only"),
        "--nvtx",
        *("--nvtx-include", f"{RANGE}/"),  # the slash marks a push-pop range
        *("-k", f"regex:^({names})$"),
        *("-c", str(launches)),
        *(word for section in sections for word in ("--section", section)),
        *("--import-source", "yes"),
        *("--clock-control", "none"),
        *("--cache-control", "all"),
        *("--replay-mode", "kernel"),
        *("--check-exit-code", "yes"),
        *target,
    )


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child process: without variables that might be secrets, and with line information on."""
    passed = {name: value for name, value in environ.items() if _PASSED.fullmatch(name) and not _SECRET.search(name)}
    return passed | {"CUDA_INJECTION64_PATH": "none", "HF_HUB_OFFLINE": "1", "TRITON_DISABLE_LINE_INFO": "0"}


def run(command: Sequence[str], *, timeout_s: float, environ: Mapping[str, str]) -> str:
    """Run a command in its own process group; its output, stdout and stderr together.

    Raises MissingCapabilityError if it fails, with the meaning of its output, or if it takes too long.  In any case,
    no process of the group is left.
    """
    with subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise MissingCapabilityError(
                f"Profiling took longer than {timeout_s:.0f} s and was stopped.",
                "Use a shorter --seq, or give it more time with --timeout.",
            ) from None
        finally:
            _end(process)
    if process.returncode != 0 or "==ERROR==" in output:
        raise explain(output, process.returncode)
    return output


def explain(output: str, returncode: int) -> MissingCapabilityError:
    """The error for a failed command, from its output."""
    for complaint in COMPLAINTS:
        if re.search(complaint.words, output):
            return MissingCapabilityError(complaint.message, complaint.hint)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "ERROR" in line or "Error" in line]
    last = (errors or lines or [""])[-1].removeprefix("==ERROR==").strip()
    how = how_ended(returncode)
    return MissingCapabilityError(
        f"A process of the profile failed ({how}){f': {last[:300]}' if last else '.'}", "ssdprof doctor may say why."
    )


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the process group: ncu starts the target, and either of them may hang."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
