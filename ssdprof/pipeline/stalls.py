"""`ssdprof stalls`: captured tensors -> ncu -> records -> files beside the run.

locate or capture one layer -> launch it once, without ncu -> profile each implementation -> read -> analyse
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from ssdprof import environment, files, operators, runs
from ssdprof.capture import store
from ssdprof.errors import BadInputError, MissingCapabilityError, SsdprofError
from ssdprof.operators.named import knows
from ssdprof.pipeline import limits, stall_files
from ssdprof.pipeline.capture import capture
from ssdprof.pipeline.request import CaptureRequest, ModelRequest, PromptRequest, ServingRequest
from ssdprof.pipeline.stored_dims import stored_dims
from ssdprof.progress import Watcher
from ssdprof.schema import CaptureManifest, CheckpointRef, LayerCapture, PrecisionRecord, RunReport
from ssdprof.schema.stalls import Launched, Profiled, Recorded, StallReport
from ssdprof.stalls import collect, ncu
from ssdprof.stalls.analyse import analyse
from ssdprof.stalls.open import open_report

DEFAULT_PRECISION = PrecisionRecord(intermediates="exact", state_dtype="fp32")


@dataclass(frozen=True, kw_only=True)
class StallRequest:
    """where: a run, a model, a folder of captures; None is the latest run.  layer, seqlen: None takes what is there.

    implementations: names, as `operators.named` resolves them.
    out: the folder for what is found; None takes the run's, or makes one under runs/.
    overwrite: stalls that were found before.  tuned: a file of configurations that the kernels shall take.
    command: as typed.
    """

    where: str | None = None
    layer: int | None = None
    seqlen: int | None = None
    implementations: tuple[str, ...] = ("unfused", "fused")
    precision: PrecisionRecord
    timeout_s: float = collect.TIMEOUT_S
    out: Path | None = None
    overwrite: bool = False
    tuned: Path | None = None
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Captured:
    """One layer of a folder of captures."""

    folder: Path
    layer: LayerCapture


def from_files(paths: Sequence[Path]) -> StallReport:
    """What reports that were made elsewhere say."""
    return analyse([open_report(path) for path in paths])


def profile(request: StallRequest, watcher: Watcher) -> tuple[Path, StallReport]:
    """Collect stalls for one layer.  Returns the folder with the reports and what they say.

    Where ncu cannot work, the report says why (`missing`), and what Triton knows by itself.
    Raises MissingCapabilityError without a GPU.
    """
    _require_gpu()
    run = _run(request)
    with _opened(request, run) as folder, _captured(request, run, watcher) as captured:
        torch.cuda.empty_cache()
        return folder, profile_layer(captured, request, folder, watcher)


def profile_run(
    asked: CaptureRequest, folder: Path, report: RunReport, watcher: Watcher, *, tuned: Path | None = None
) -> StallReport:
    """Stalls of the middle layer of a run that has just ended, on its longest prompt, into the run's folder.

    asked: what the run captured.  tuned: see `StallRequest`.  Raises what `profile` raises.
    """
    _require_gpu()
    model = Path(asked.model.model).expanduser()
    stored = next((path for path in (model, folder / runs.CAPTURES) if store.is_capture(path)), None)
    layers = report.captured_layers
    wanted = replace(
        asked,
        layers=str(layers[len(layers) // 2].index),
        prompt=_whole(asked.prompt, max(prompt.seqlen for prompt in report.prompts)),
    )
    request = StallRequest(layer=int(wanted.layers), precision=DEFAULT_PRECISION, tuned=tuned, command=report.command)
    with _made(folder / stall_files.FOLDER, overwrite=False) as out, ExitStack() as stack:
        if stored is not None:
            captured = _stored(stored, request)
        else:
            captured = stack.enter_context(_captured_anew(wanted, request, watcher))
        torch.cuda.empty_cache()
        return profile_layer(captured, request, out, watcher)


def profile_layer(captured: Captured, request: StallRequest, folder: Path, watcher: Watcher) -> StallReport:
    """Launch, profile, read and write: `folder` gets an ncu report per implementation, and what they say."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="ssdprof-") as cache:
        found = _collect(captured, request, folder, Path(cache), watcher)
    report = analyse(
        [open_report(file) for file in found.files],
        Profiled(
            model=_model(store.read_manifest(captured.folder).checkpoint),
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
    """launched: by each implementation.  files: ncu's reports, in that order; none if something is `missing`.

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
                if (job == jobs[-1] and not launched) or not _is_library(captured, job.implementation):
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
    """Raises BadInputError for an implementation that launches nothing that could be profiled, and what
    `collect.launch` raises."""
    launched = collect.launch(job, timeout_s=timeout_s)
    if not launched.launches:
        raise BadInputError(f"{launched.implementation} launches no Triton kernel.", "Leave it out of --impl.")
    return launched


def _is_library(captured: Captured, word: str) -> bool:
    return word.partition("=")[0] in operators.get(captured.layer.layer.operator).drawing.peers


def _require_gpu() -> None:
    if limits.device().type != "cuda":
        raise MissingCapabilityError(
            "Warp stalls need an NVIDIA GPU, and this machine has none.",
            "Record them on a machine with a GPU, and read them here with: ssdprof stalls --from FILE.",
        )


# --- what to profile


def _run(request: StallRequest) -> tuple[Path, RunReport] | None:
    """The run that the request names; None if it names a model or captures."""
    where = request.where
    if where is not None and not any((path / runs.REPORT).is_file() for path in (Path(where), runs.RUNS / where)):
        return None
    return runs.read(where)


@contextmanager
def _opened(request: StallRequest, run: tuple[Path, RunReport] | None) -> Iterator[Path]:
    """The folder for what is found."""
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
    """A folder that is removed again if nothing was written into it."""
    if (folder / stall_files.RECORD).exists() and not overwrite:
        raise BadInputError(f"{folder} holds stalls already.", "Give --force to replace them, or --out.")
    folder.mkdir(exist_ok=True)
    try:
        yield folder
    finally:
        if not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def _captured(request: StallRequest, run: tuple[Path, RunReport] | None, watcher: Watcher) -> Iterator[Captured]:
    """The layer's tensors: those that are stored, else captured anew, for as long as they are needed."""
    if run is not None and run[1].cast:
        raise BadInputError(
            f"The inputs of this run were {run[1].cast}, and stalls are those of inputs as the model has them.",
            "Name the model or its captures instead of the run.",
        )
    place = run[0] / runs.CAPTURES if run is not None else Path(request.where or "").expanduser()
    if store.is_capture(place):
        yield _stored(place, request)
        return
    wanted = _of_run(run[1], request) if run is not None else _of_model(request)
    with _captured_anew(wanted, request, watcher) as captured:
        yield captured


@contextmanager
def _captured_anew(wanted: CaptureRequest, request: StallRequest, watcher: Watcher) -> Iterator[Captured]:
    with tempfile.TemporaryDirectory(prefix="ssdprof-") as temporary:
        folder, _ = capture(wanted, Path(temporary) / "captures", overwrite=False, watcher=watcher)
        yield _stored(folder, request)


def _stored(folder: Path, request: StallRequest) -> Captured:
    return Captured(folder, _choose(store.read_manifest(folder), request, folder))


def _choose(manifest: CaptureManifest, request: StallRequest, folder: Path) -> LayerCapture:
    """The wanted layer, or the middle one; the wanted length, or the longest."""
    found = [
        stored
        for stored in manifest.layers
        if all(knows(operators.get(stored.layer.operator), word) for word in request.implementations)
        and (stored.call is None or stored.call.kind == "packed")
    ]
    if request.layer is not None:
        found = [stored for stored in found if stored.layer.index == request.layer]
    if request.seqlen is not None:
        found = [stored for stored in found if stored.seqlen == request.seqlen]
    if not found:
        there = sorted({(stored.layer.index, stored.seqlen) for stored in manifest.layers})
        raise BadInputError(
            f"{folder} holds no such layer with a whole prompt that {' and '.join(request.implementations)} could run.",
            f"There are (layer, tokens): {', '.join(map(str, there)) or 'none'}.",
        )
    longest = [stored for stored in found if stored.seqlen == max(one.seqlen for one in found)]
    return longest[len(longest) // 2]


def _of_run(report: RunReport, request: StallRequest) -> CaptureRequest:
    """One layer and prompt of a run, to be captured again."""
    prompts = [prompt for prompt in report.prompts if request.seqlen in (None, prompt.seqlen)]
    layers = [layer for layer in report.captured_layers if request.layer in (None, layer.index)]
    if not prompts or not layers:
        raise BadInputError(
            "The run has no such layer or prompt.",
            f"Its prompts have {', '.join(str(prompt.seqlen) for prompt in report.prompts)} tokens, its layers are "
            f"{', '.join(str(layer.index) for layer in report.captured_layers)}.",
        )
    prompt = max(prompts, key=lambda one: one.seqlen)
    if prompt.kind == "file":
        raise BadInputError(
            "The run's prompt came from a file, which it does not keep.",
            "Run it with --save-captures, or name the model: its operators are then run on the built-in text.",
        )
    if prompt.serving.packed:
        raise BadInputError(
            "The run's sequences were packed, and it does not keep them.", "Run it with --save-captures."
        )
    return CaptureRequest(
        model=ModelRequest(model=report.checkpoint.requested, revision=report.checkpoint.revision),
        prompt=PromptRequest(text=prompt.kind, seqlens=(prompt.seqlen,), serving=ServingRequest(batch=prompt.batch)),
        layers=str(layers[len(layers) // 2].index),
    )


def _whole(prompt: PromptRequest, seqlen: int) -> PromptRequest:
    """The prompt in one call of every operator, without the steps after it; a pack is drawn again as it was."""
    serving = replace(prompt.serving, chunk=None, decode=0)
    return replace(prompt, seqlens=None if serving.packed else (seqlen,), serving=serving)


def _of_model(request: StallRequest) -> CaptureRequest:
    return CaptureRequest(
        model=ModelRequest(model=request.where or ""),
        prompt=PromptRequest(seqlens=None if request.seqlen is None else (request.seqlen,)),
        layers="first:1" if request.layer is None else str(request.layer),
    )


def _model(ref: CheckpointRef) -> str:
    return f"{ref.repo_id}, random weights" if ref.random_weights else ref.repo_id
