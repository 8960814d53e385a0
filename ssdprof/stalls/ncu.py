"""Profiles one call with the program ncu in a separate process, and explains the errors of ncu."""

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ssdprof.core.base import PrecisionName, Record, Text
from ssdprof.core.stalls import Launched
from ssdprof.environment import child
from ssdprof.environment.toolchain import find_ncu, ncu_version
from ssdprof.errors import ExitCode, MissingCapabilityError, SsdprofError, how_ended

TIMEOUT_S = 300.0  # for each process, unless the user gives another one
OLDEST = (2023, 1)  # the first version with complete counters for Hopper
RANGE = "ssdprof"  # NVTX range around the one call that is profiled
SECTIONS = (  # of metrics that ncu collects
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
    "Run as root (in a container: with --cap-add=SYS_ADMIN), or let every user read them: put "
    "'options nvidia NVreg_RestrictProfilingToAdminUsers=0' into /etc/modprobe.d/nvidia.conf and "
    "load the driver again."
)
# The names of environment variables that a child process gets.  No other variable is passed,
# because it may have a token.
_PASSED = re.compile(
    r"(PATH|HOME|USER|LOGNAME|SHELL|TMPDIR|LANG|TZ|TERM|CC|CXX|CPATH|VIRTUAL_ENV|LIBRARY_PATH|"
    r"LD_LIBRARY_PATH|C_INCLUDE_PATH|XDG_CACHE_HOME|(LC|CUDA|NVIDIA|NV|OMP|CONDA|PYTHON|TORCH|"
    r"TORCHINDUCTOR|TRITON)_\w*|PYTHON[A-Z]+)"
)


# a pattern in ncu's output -> the message and the hint for the user; the first one that is found
# counts
ERRORS = {
    "ERR_NVGPUCTRPERM": (
        "The driver does not let this user read the GPU's hardware counters.",
        _REMEDIES,
    ),
    "LibraryNotLoaded|Failed to initialize the profiler": (
        "ncu cannot reach the NVIDIA driver's profiler: the kernel driver is sandboxed here, as in "
        "gVisor.",
        "Use a machine or container that talks to the kernel driver directly.",
    ),
    "not compatible with Nsight Compute|driver is not supported": (
        "This ncu and the NVIDIA driver do not fit together.",
        "Install the ncu that comes with the driver's CUDA version, or a newer driver.",
    ),
    "driver resource was unavailable|[Pp]rofiler.*already in use|another.*profil": (
        "Another profiler holds the GPU's counters.",
        "Stop it: DCGM ('nv-hostengine'), another ncu, or a torch profiler.",
    ),
    "Failed to connect to": (
        "ncu could not attach to the process that it started.",
        "Unset what injects other tools into processes: CUDA_INJECTION64_PATH, LD_PRELOAD.",
    ),
    "No kernels were profiled": (
        "ncu profiled no kernel: none of the requested kernels was launched inside the range.",
        "Name an implementation that launches Triton kernels in every call.",
    ),
}


class Job(Record):
    """A call for ncu to profile.

    folder: with captures, among them one of the whole prompt of `seqlen` tokens of layer `layer`
        (its index).
    cache: a folder for compiled kernels that only such jobs use, because kernels that other
        processes compiled may lack source lines.
    tuned: a file with configurations for the kernels; None for the committed ones.
    """

    folder: Path
    cache: Path
    layer: int
    seqlen: int
    implementation: Text
    precision: PrecisionName
    tuned: Path | None = None


def target(job: Job, launched: Path) -> tuple[str, ...]:
    """The command of the process that makes the job's call several times, the last time inside the
    range `RANGE`.

    launched: the file into which it writes the launches of the call, or its error.
    """
    return (*child.python("ssdprof.stalls.profiled"), job.model_dump_json(), str(launched))


def launch(job: Job, *, timeout_s: float = TIMEOUT_S) -> Launched:
    """Run the job without ncu.  Returns its launches, with the resources that Triton reports.

    This also compiles every kernel, so that none is compiled under ncu.

    Raises SsdprofError with the exit code of the failure, such as BAD_INPUT if the implementation
    refuses the layer, and MissingCapabilityError if the process takes longer than `timeout_s`,
    fails without having written its error, or ends without having written the launches.
    """
    with tempfile.TemporaryDirectory(prefix="ssdprof-") as folder:
        launched = Path(folder) / "launched.json"
        try:
            run(target(job, launched), timeout_s=timeout_s, environ=_environment(job))
        except MissingCapabilityError as error:
            refusal = _written_error(launched)
            if refusal is None:
                raise
            raise refusal from error
        if not launched.is_file():
            raise MissingCapabilityError(
                f"{job.implementation} ended its process with exit code 0 before it was profiled.",
                "Leave it out of --impl.",
            )
        return Launched.model_validate_json(launched.read_text(encoding="utf-8"))


def _written_error(launched: Path) -> SsdprofError | None:
    """The error that the process wrote instead of its launches; None if it wrote none."""
    try:
        written = json.loads(launched.read_text(encoding="utf-8"))
        return SsdprofError(written["message"], written["hint"], ExitCode(written["exit_code"]))
    except (OSError, ValueError, LookupError):
        return None


def profile(
    job: Job,
    launched: Launched,
    program: str,
    report: Path,
    *,
    sections: Sequence[str] = SECTIONS,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Let ncu profile the launches of a job.

    launched: the launches.  program: the path of ncu.  report: the file that ncu writes.

    Raises MissingCapabilityError with the reason if ncu fails, writes no report, or takes longer
    than `timeout_s`.
    """
    with tempfile.TemporaryDirectory(prefix="ssdprof-") as folder:
        names = [launch.kernel for launch in launched.launches]
        inner = target(job, Path(folder) / "launched.json")
        words = command(program, report, names, launched.launch_count, inner, sections)
        output = run(words, timeout_s=timeout_s, environ=_environment(job))
    if not report.is_file():
        raise explain(output, 0)


def _environment(job: Job) -> dict[str, str]:
    """The environment of the processes of a job, whose kernels are compiled into its own cache."""
    return (
        clean_environment(os.environ) | child.search_path() | {"TRITON_CACHE_DIR": str(job.cache)}
    )


def find() -> tuple[str, str]:
    """The path and the version of the ncu that `find_ncu` chooses: that on PATH, or else one in the
    folders of NVIDIA's installers.

    Raises MissingCapabilityError if there is none, if it does not run, or if it is too old.
    """
    program = find_ncu()
    if program is None:
        raise MissingCapabilityError(
            "ncu is not installed: NVIDIA Nsight Compute is needed to read warp stalls.",
            "Install Nsight Compute, or read a report that was made elsewhere: ssdprof stalls "
            "--from FILE.",
        )
    version = ncu_version(program)
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        raise MissingCapabilityError(
            f"{program} is ncu {version}, which is too old: it must be "
            f"{'.'.join(map(str, OLDEST))} or newer.",
            "Install a newer Nsight Compute, and put its folder first on PATH.",
        )
    return program, version


def command(
    ncu: str,
    report: Path,
    kernels: Sequence[str],
    launches: int,
    target: Sequence[str],
    sections: Sequence[str] = SECTIONS,
) -> tuple[str, ...]:
    """The command that profiles a process.

    It profiles the first `launches` launches of the kernels `kernels` in the range `RANGE` of the
    process with the command `target`, and writes the file `report`.  In its mode "kernel replay",
    ncu runs a kernel several times, and saves and restores memory in between.  This includes
    tickets and flags, so kernels whose programs wait for each other do not hang.
    """
    names = "|".join(re.escape(name) for name in dict.fromkeys(kernels))
    options: list[str] = []
    for section in sections:
        options += ["--section", section]
    return (
        ncu,
        "--config-file",
        "off",
        "-f",
        "-o",
        str(report),
        "--target-processes",
        "application-only",
        "--nvtx",
        "--nvtx-include",
        f"{RANGE}/",  # the slash marks a push-pop range
        "-k",
        f"regex:^({names})$",
        "-c",
        str(launches),
        *options,
        "--import-source",
        "yes",
        "--clock-control",
        "none",
        "--cache-control",
        "all",
        "--replay-mode",
        "kernel",
        "--check-exit-code",
        "yes",
        *target,
    )


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child process: the variables of `environ` whose names are allowed, and
    do not look like that of a secret.

    In the child, Triton's line information is on, Hugging Face's hub is offline, and no other tool
    is injected into CUDA.
    """
    passed = {
        name: value
        for name, value in environ.items()
        if _PASSED.fullmatch(name) and not child.SECRET.search(name)
    }
    return passed | {
        "CUDA_INJECTION64_PATH": "none",
        "HF_HUB_OFFLINE": "1",
        "TRITON_DISABLE_LINE_INFO": "0",
    }


def run(command: Sequence[str], *, timeout_s: float, environ: Mapping[str, str]) -> str:
    """Run a command and return its output: see `child.run`.

    Raises MissingCapabilityError with an explanation of its output if it fails or reports an error
    of ncu, and without one if it takes longer than `timeout_s`.
    """
    code, output = child.run(command, timeout_s=timeout_s, environ=environ)
    if code is None:
        raise MissingCapabilityError(
            f"Profiling took longer than {timeout_s:.0f} s and was stopped.",
            "Use a shorter --seq, or give it more time with --timeout.",
        )
    if code != 0 or "==ERROR==" in output:
        raise explain(output, code)
    return output


def explain(output: str, returncode: int) -> MissingCapabilityError:
    """The error for a failed command, from its output and its exit code, which is negative for a
    signal.

    The message for a failure that is not among `ERRORS` ends with the last line that looks like an
    error, or without such a line with the last line.
    """
    for pattern, (message, hint) in ERRORS.items():
        if re.search(pattern, output):
            return MissingCapabilityError(message, hint)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "ERROR" in line or "Error" in line]
    last = (errors or lines or [""])[-1]
    reason = last.removeprefix("==ERROR==").strip()[:300]
    end = f": {reason}" if reason else "."
    return MissingCapabilityError(
        f"A process of the profile failed ({how_ended(returncode)}){end}",
        "ssdprof doctor may say why.",
    )
