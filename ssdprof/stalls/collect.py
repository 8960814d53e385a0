"""Profiles one layer's captured tensors with ncu: one report per implementation."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from ssdprof.core.base import PrecisionRecord
from ssdprof.environment import child
from ssdprof.errors import ExitCode, MissingCapabilityError, SsdprofError
from ssdprof.schema.stalls import Launched, Refusal  # TODO
from ssdprof.stalls import ncu

TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """folder: of captures, which hold `layer` (its index) with `seqlen` tokens.  cache: a folder for compiled kernels,
    for `launch` and `profile` of such jobs only: kernels compiled elsewhere may lack their lines.
    tuned: a file with configurations for the kernels.
    """

    folder: Path
    cache: Path
    layer: int
    seqlen: int
    implementation: str
    precision: PrecisionRecord
    tuned: Path | None = None


def target(job: Job, launched: Path) -> tuple[str, ...]:
    """The command of the process that runs the job once inside the range, and writes its launches."""
    return (
        *child.python("ssdprof.stalls.target"),
        str(job.folder),
        *("--layer", str(job.layer)),
        *("--seqlen", str(job.seqlen)),
        *("--implementation", job.implementation),
        *("--intermediates", job.precision.intermediates),
        *("--state-dtype", job.precision.state_dtype),
        *("--launched", str(launched)),
        *(("--tuned", str(job.tuned)) if job.tuned else ()),
    )


def launch(job: Job, *, timeout_s: float = TIMEOUT_S) -> Launched:
    """Run the job without ncu: its launches, and the resources that Triton reports.

    It also compiles every kernel, so that this does not happen under ncu.  Raises SsdprofError with the
    exit code of the failure: BAD_INPUT if the implementation refuses the layer.
    """
    with tempfile.TemporaryDirectory(prefix="ssdprof-") as folder:
        launched = Path(folder) / "launched.json"
        try:
            ncu.run(target(job, launched), timeout_s=timeout_s, environ=_environment(job))
        except MissingCapabilityError as error:
            if refusal := _refusal(launched):
                raise SsdprofError(refusal.message, refusal.hint, ExitCode(refusal.exit_code)) from error
            raise
        if not launched.is_file():
            raise MissingCapabilityError(
                f"{job.implementation} ended its process with exit code 0 before it was profiled.",
                "Leave it out of --impl.",
            )
        return Launched.model_validate_json(launched.read_text(encoding="utf-8"))


def _refusal(launched: Path) -> Refusal | None:
    """The refusal that the target wrote instead of its launches; None if it wrote none."""
    try:
        return Refusal.model_validate_json(launched.read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None


def profile(
    job: Job,
    launched: Launched,
    program: ncu.Program,
    report: Path,
    *,
    sections: Sequence[str] = ncu.SECTIONS,
    timeout_s: float = TIMEOUT_S,
) -> float:
    """Let ncu profile the job's launches into `report`.  Returns the seconds that this took.

    Raises MissingCapabilityError with the reason if ncu fails.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ssdprof-") as folder:
        command = ncu.command(
            program,
            report,
            [launch.kernel for launch in launched.launches],
            launched.launch_count,
            target(job, Path(folder) / "launched.json"),
            sections,
        )
        output = ncu.run(command, timeout_s=timeout_s, environ=_environment(job))
    if not report.is_file():
        raise ncu.explain(output, 0)
    return time.monotonic() - start


def _environment(job: Job) -> dict[str, str]:
    return ncu.clean_environment(os.environ) | child.search_path() | {"TRITON_CACHE_DIR": str(job.cache)}
