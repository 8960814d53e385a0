"""`ssdprof stalls`: captured tensors -> ncu -> records -> files in the run's folder.

locate or capture one layer -> launch it once, without ncu -> profile each implementation -> read ->
analyse
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from ssdprof import files, operators
from ssdprof.capture.manifest import is_capture, read_manifest
from ssdprof.core.base import PrecisionName
from ssdprof.core.report import Report
from ssdprof.core.stalls import Launched, StallReport
from ssdprof.core.target import LayerCapture
from ssdprof.environment import machine
from ssdprof.environment.toolchain import require_gpu
from ssdprof.errors import BadInputError, ExitCode, MissingCapabilityError, SsdprofError
from ssdprof.jobs import documents
from ssdprof.jobs.options import ModelOptions, RunOptions, ServedModelOptions, StallsOptions, parsed
from ssdprof.jobs.plan import stored_dims
from ssdprof.jobs.run import capture
from ssdprof.jobs.target import find
from ssdprof.jobs.target import read as read_options
from ssdprof.operators.implementations import kind_of, knows
from ssdprof.progress import Advance, Watcher
from ssdprof.stalls import ncu
from ssdprof.stalls.facts import analyse
from ssdprof.stalls.read import read
from ssdprof.store.reports import CAPTURES, HEADER, RUNS, load, new_folder
from ssdprof.store.tuned import use_saved

NEEDS_GPU = (
    "Warp stalls need",
    "Record them on a machine with a GPU, and read them here with: ssdprof stalls --from FILE.",
)


def profile(request: StallsOptions, watcher: Watcher) -> tuple[Path, StallReport]:
    """Collect stalls for one layer.  Returns the folder with ncu's reports, and the stall report.

    The tensors are those that a run read or stored, else newly captured ones.
    If ncu cannot run, the report has the reason (`missing`) and the resources that Triton reports.
    Raises MissingCapabilityError without a GPU.
    """
    require_gpu(*NEEDS_GPU)
    if not request.no_tuned:
        request = replace(request, tuned=use_saved(watcher.say))
    where = request.where
    wanted: Callable[[], ModelOptions]  # of what is captured if no folder holds captures
    if where is None or any((path / HEADER).is_file() for path in (Path(where), RUNS / where)):
        run, report = load(where, "run")
        _refuse_changed(report)
        request = _of_run(report, request)
        asked = parsed(RunOptions, list(report.command[2:]))
        folders = [Path(asked.model).expanduser(), run / CAPTURES]
        wanted = partial(_captured_again, asked, report, request)
        out = request.out or run
    else:  # a model or captures
        folders = [Path(where).expanduser()]
        wanted = partial(_of_model, request)
        out = request.out or new_folder(where)
    with _new_folder(out / documents.STALLS_FOLDER, overwrite=request.force) as folder:
        return folder, _profile(folders, wanted, request, folder, watcher)


def _profile(
    folders: Sequence[Path],
    wanted: Callable[[], ModelOptions],
    request: StallsOptions,
    folder: Path,
    watcher: Watcher,
) -> StallReport:
    """Launch, profile, read, write into `folder`.  folders: that may hold captures of what is
    `wanted`.
    """
    with _captured(folders, wanted, request, watcher) as (captures, layer):
        torch.cuda.empty_cache()
        created = datetime.now(UTC).isoformat(timespec="seconds")
        missing = ""
        version = ""
        with (
            tempfile.TemporaryDirectory(prefix="ssdprof-") as cache,
            watcher.step("Profiling", 2 * len(request.implementations), unit="steps") as advance,
        ):
            launched, left_out = _launch(captures, layer, request, Path(cache), watcher, advance)
            reports = [
                folder / f"{files.safe_name(launch.implementation)}.ncu-rep"
                for launch in launched.values()
            ]
            try:
                program, newest = ncu.find()
                for (job, launch), report in zip(launched.items(), reports, strict=True):
                    ncu.profile(job, launch, program, report, timeout_s=request.timeout_s)
                    advance(1)
                version = newest
            except MissingCapabilityError as error:
                missing = " ".join(part for part in (error.message, error.hint) if part)
        checkpoint = read_manifest(captures).checkpoint
        stall_report = analyse(
            [] if missing else [read(report) for report in reports],
            tuple(launched.values()),
            missing=missing,
            model=f"{checkpoint.repo_id}, random weights"
            if checkpoint.random_weights
            else checkpoint.repo_id,
            layer=layer.layer,
            dims=stored_dims(layer),
            precision=_precision(request),
            left_out=left_out,
            created=created,
            command=request.command,
            environment=machine.collect(),
            ncu=version,
        )
    documents.write_stalls(folder, stall_report)
    return stall_report


def _launch(
    captures: Path,
    layer: LayerCapture,
    request: StallsOptions,
    cache: Path,
    watcher: Watcher,
    advance: Advance,
) -> tuple[dict[ncu.Job, Launched], tuple[str, ...]]:
    """Each implementation's launches, and a sentence for each library that cannot be profiled."""
    launched: dict[ncu.Job, Launched] = {}
    left_out: list[str] = []
    for name in request.implementations:
        job = ncu.Job(
            folder=captures,
            cache=cache,
            layer=layer.layer.index,
            seqlen=layer.seqlen,
            implementation=name,
            precision=_precision(request),
            tuned=request.tuned,
        )
        try:
            launch = ncu.launch(job, timeout_s=request.timeout_s)
            if not launch.launches:
                raise BadInputError(
                    f"{launch.implementation} launches no Triton kernel.", "Leave it out of --impl."
                )
            launched[job] = launch
        except SsdprofError as error:
            kind = kind_of(operators.get(layer.layer.operator), name)
            if kind == "own":  # a crash or a timeout of the user's kernel counts as a failed gate
                code = (
                    ExitCode.GATE_FAILED
                    if isinstance(error, MissingCapabilityError)
                    else error.exit_code
                )
                raise SsdprofError(
                    f"{name} cannot be profiled.  {error.message}",
                    "'ssdprof run' shows what is wrong with it.",
                    code,
                ) from error
            if kind == "bundled" or (name == request.implementations[-1] and not launched):
                raise
            left_out.append(f"{name} is left out: {error.message}")
            watcher.say(left_out[-1])
        advance(1)
    return launched, tuple(left_out)


def _precision(request: StallsOptions) -> PrecisionName:
    return f"{request.intermediates}, {request.state_dtype} states"


# --- the layer's tensors


@contextmanager
def _captured(
    folders: Sequence[Path],
    wanted: Callable[[], ModelOptions],
    request: StallsOptions,
    watcher: Watcher,
) -> Iterator[tuple[Path, LayerCapture]]:
    """A folder of captures and one layer in it: stored, else captured anew, which exists while the
    context is open.
    """
    stored = next((place for place in folders if is_capture(place)), None)
    if stored is not None:
        yield stored, _choose(stored, request)
        return
    with tempfile.TemporaryDirectory(prefix="ssdprof-") as temporary:
        try:
            target = find(wanted())
            folder, _ = capture(
                target, Path(temporary) / "captures", overwrite=False, watcher=watcher
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None  # what it kept goes with the folder
        yield folder, _choose(folder, request)


def _choose(folder: Path, request: StallsOptions) -> LayerCapture:
    """The requested layer, or the middle one; the requested length, or the longest."""
    layers = read_manifest(folder).layers
    fitting = [
        stored
        for stored in layers
        if stored.whole
        and all(
            knows(operators.get(stored.layer.operator), word) for word in request.implementations
        )
        and request.layer in (None, stored.layer.index)
        and request.seqlen in (None, stored.seqlen)
    ]
    if not fitting:
        pairs = sorted({(stored.layer.index, stored.seqlen) for stored in layers})
        raise BadInputError(
            f"{folder} holds no such layer with a whole prompt that "
            f"{' and '.join(request.implementations)} could run.",
            f"It holds (layer, tokens): {', '.join(map(str, pairs)) or 'none'}.",
        )
    most = max(stored.seqlen for stored in fitting)
    longest = [stored for stored in fitting if stored.seqlen == most]
    return longest[len(longest) // 2]


def _refuse_changed(report: Report) -> None:
    """Raises BadInputError for a run whose inputs are not those of the model."""
    hint = "Name the model or its captures instead of the run."
    if report.cast:
        raise BadInputError(
            f"The inputs of this run were {report.cast_words}, and stalls are profiled in the "
            "model's own dtype.",
            hint,
        )
    if report.tensor_parallel > 1:
        raise BadInputError(
            f"This run replayed the share of the first of {report.tensor_parallel} tensor-parallel "
            "ranks, and stalls are profiled with all heads.",
            hint,
        )


def _of_run(report: Report, request: StallsOptions) -> StallsOptions:
    """The request with its layer, which is the middle one of the run unless it names another."""
    lengths = [prompt.seqlen for prompt in report.prompts]
    layers = [layer.index for layer in report.captured if request.layer in (None, layer.index)]
    if not layers or request.seqlen not in (None, *lengths):
        there = ", ".join(str(layer.index) for layer in report.captured)
        raise BadInputError(
            "The run has no such layer or prompt.",
            f"Its prompts have {', '.join(map(str, lengths))} tokens, its layers are {there}.",
        )
    return replace(request, layer=layers[len(layers) // 2])


def _captured_again(asked: RunOptions, report: Report, request: StallsOptions) -> ModelOptions:
    """The options of a run for the layer and one prompt, the longest unless the request names
    another: as one call of every operator, without decode steps.
    """
    assert report.model
    changed = asked.prompt_file and asked.prompt_file.stat().st_mtime
    if changed and changed > datetime.fromisoformat(report.created).timestamp():
        raise BadInputError(
            f"{asked.prompt_file} has changed since the run.", "Run it again, or name the model."
        )
    longest = max(prompt.seqlen for prompt in report.prompts)
    typed = read_options(asked)
    return replace(
        typed,
        revision=report.model.revision,
        layers=str(request.layer),
        # a pack is generated with the same lengths
        seqlens=None if typed.packed else (request.seqlen or longest,),
        chunk=None,
        decode=0,
    )


def _of_model(request: StallsOptions) -> ModelOptions:
    return ServedModelOptions(
        model=request.where or "",
        seqlens=None if request.seqlen is None else (request.seqlen,),
        layers="first:1" if request.layer is None else str(request.layer),
    )


@contextmanager
def _new_folder(folder: Path, *, overwrite: bool) -> Iterator[Path]:
    """A new folder in one that may be new; both are removed if nothing was written into them."""
    if (folder / documents.STALLS_RECORD).exists() and not overwrite:
        raise BadInputError(
            f"{folder} holds stalls already.", "Give --force to replace them, or --out."
        )
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        for path in (folder, folder.parent):
            if not any(path.iterdir()):
                path.rmdir()
