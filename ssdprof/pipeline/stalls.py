"""`ssdprof stalls`: captured tensors -> ncu -> records -> files in the run's folder.

locate or capture one layer -> launch it once, without ncu -> profile each implementation -> read -> analyse
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from ssdprof import environment, files, operators, runs
from ssdprof.capture.manifest import read_manifest
from ssdprof.core.base import EXACT_FP32
from ssdprof.core.subject import CheckpointRef
from ssdprof.errors import BadInputError, ExitCode, MissingCapabilityError, SsdprofError
from ssdprof.operators.named import kind_of
from ssdprof.pipeline import limits, stall_files, stall_inputs
from ssdprof.pipeline.request import CaptureRequest
from ssdprof.pipeline.stall_inputs import Captured
from ssdprof.pipeline.stall_request import StallRequest
from ssdprof.pipeline.stored_dims import stored_dims
from ssdprof.progress import Watcher
from ssdprof.schema import RunReport  # TODO
from ssdprof.schema.stalls import Launched, Profiled, Recorded, StallReport  # TODO
from ssdprof.stalls import collect, ncu
from ssdprof.stalls.analyse import analyse
from ssdprof.stalls.open import open_report


def from_files(paths: Sequence[Path]) -> StallReport:
    """The stall report from existing ncu reports."""
    return analyse([open_report(path) for path in paths])


def profile(request: StallRequest, watcher: Watcher) -> tuple[Path, StallReport]:
    """Collect stalls for one layer.  Returns the folder with ncu's reports, and the stall report.

    If ncu cannot run, the report has the reason (`missing`) and the resources that Triton reports.
    Raises MissingCapabilityError without a GPU.
    """
    _require_gpu()
    run = _run(request)
    with _opened(request, run) as folder, stall_inputs.of_request(request, run, watcher) as captured:
        torch.cuda.empty_cache()
        return folder, profile_layer(captured, request, folder, watcher)


def profile_run(
    asked: CaptureRequest, folder: Path, report: RunReport, watcher: Watcher, *, tuned: Path | None = None
) -> StallReport:
    """Stalls of the middle layer of a run that has just ended, on its longest prompt, into the run's folder.

    asked: the request of the run.  tuned: see `StallRequest`.  Raises what `profile` raises.
    """
    _require_gpu()
    wanted = stall_inputs.middle_layer(asked, report)
    request = StallRequest(layer=int(wanted.layers), precision=EXACT_FP32, tuned=tuned, command=report.command)
    with (
        _made(folder / stall_files.FOLDER, overwrite=False) as out,
        stall_inputs.of_ended_run(wanted, folder, request, watcher) as captured,
    ):
        torch.cuda.empty_cache()
        return profile_layer(captured, request, out, watcher)


def profile_layer(captured: Captured, request: StallRequest, folder: Path, watcher: Watcher) -> StallReport:
    """Launch, profile, read and write: `folder` gets an ncu report per implementation, and the stall report."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="ssdprof-") as cache:
        found = _collect(captured, request, folder, Path(cache), watcher)
    report = analyse(
        [open_report(file) for file in found.files],
        Profiled(
            model=_model(read_manifest(captured.folder).checkpoint),
            layer=captured.layer.layer,
            dims=stored_dims(captured.layer),
            precision=request.precision,
            launched=found.launched,
            left_out=found.left_out,
        ),
        recorded=Recorded(
            created=created, command=request.command, environment=environment.collect(), ncu=found.ncu_version
        ),
        missing=found.missing,
    )
    stall_files.write(folder, report)
    return report


@dataclass(frozen=True)
class Collected:
    """launched: by each implementation.  files: ncu's reports, in that order; empty if `missing`.

    left_out: a sentence for each library that cannot be profiled.
    """

    launched: tuple[Launched, ...]
    left_out: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    ncu_version: str = ""
    missing: str = ""


def _collect(captured: Captured, request: StallRequest, folder: Path, cache: Path, watcher: Watcher) -> Collected:
    jobs = [
        collect.Job(
            folder=captured.folder,
            cache=cache,
            layer=captured.layer.layer.index,
            seqlen=captured.layer.seqlen,
            implementation=implementation,
            precision=request.precision,
            tuned=request.tuned,
        )
        for implementation in request.implementations
    ]
    launched: dict[collect.Job, Launched] = {}
    left_out: list[str] = []
    with watcher.step("Profiling", 2 * len(jobs), unit="steps") as advance:
        for job in jobs:
            try:
                launched[job] = _launch(job, request.timeout_s)
            except SsdprofError as error:
                kind = kind_of(operators.get(captured.layer.layer.operator), job.implementation)
                if kind == "own":
                    raise _unfit(job.implementation, error) from error
                if kind == "bundled" or (job == jobs[-1] and not launched):
                    raise
                left_out.append(f"{job.implementation} is left out: {error.message}")
                watcher.say(left_out[-1])
            advance(1)
        reports = {job: folder / f"{files.safe_name(one.implementation)}.ncu-rep" for job, one in launched.items()}
        found = Collected(tuple(launched.values()), tuple(left_out))
        try:
            program = ncu.find()
            for job, one in launched.items():
                collect.profile(job, one, program, reports[job], timeout_s=request.timeout_s)
                advance(1)
        except MissingCapabilityError as error:
            return replace(found, missing=" ".join(part for part in (error.message, error.hint) if part))
    return replace(found, files=tuple(reports.values()), ncu_version=program.version)


def _launch(job: collect.Job, timeout_s: float) -> Launched:
    """Raises BadInputError for an implementation that launches no Triton kernel, and what `collect.launch` raises."""
    launched = collect.launch(job, timeout_s=timeout_s)
    if not launched.launches:
        raise BadInputError(f"{launched.implementation} launches no Triton kernel.", "Leave it out of --impl.")
    return launched


def _unfit(name: str, error: SsdprofError) -> SsdprofError:
    """The error for a user's kernel that cannot be profiled.  A crash or a timeout counts as a failed gate."""
    code = ExitCode.GATE_FAILED if isinstance(error, MissingCapabilityError) else error.exit_code
    return SsdprofError(
        f"{name} cannot be profiled.  {error.message}", "'ssdprof run' shows what is wrong with it.", code
    )


def _model(ref: CheckpointRef) -> str:
    return f"{ref.repo_id}, random weights" if ref.random_weights else ref.repo_id


def _require_gpu() -> None:
    if limits.device().type != "cuda":
        raise MissingCapabilityError(
            "Warp stalls need an NVIDIA GPU, and this machine has none.",
            "Record them on a machine with a GPU, and read them here with: ssdprof stalls --from FILE.",
        )


def _run(request: StallRequest) -> tuple[Path, RunReport] | None:
    """The run of the request; None if it names a model or captures."""
    where = request.where
    if where is not None and not any((path / runs.REPORT).is_file() for path in (Path(where), runs.RUNS / where)):
        return None
    return runs.read(where)


@contextmanager
def _opened(request: StallRequest, run: tuple[Path, RunReport] | None) -> Iterator[Path]:
    """The folder for the results."""
    if request.out is None and run is not None:
        with _made(run[0] / stall_files.FOLDER, overwrite=request.overwrite) as folder:
            yield folder
        return
    with (
        runs.opened(request.out, request.where or "model") as opened,
        _made(opened.path / stall_files.FOLDER, overwrite=request.overwrite) as folder,
    ):
        yield folder


@contextmanager
def _made(folder: Path, *, overwrite: bool) -> Iterator[Path]:
    """A new folder, removed if nothing was written into it."""
    if (folder / stall_files.RECORD).exists() and not overwrite:
        raise BadInputError(f"{folder} holds stalls already.", "Give --force to replace them, or --out.")
    folder.mkdir(exist_ok=True)
    try:
        yield folder
    finally:
        if not any(folder.iterdir()):
            folder.rmdir()
