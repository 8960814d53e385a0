"""`ssdprof stalls`: profiles one captured layer with ncu, and writes a report into a run's folder,
or into a new one.

locate or capture the layer -> launch each implementation once, without ncu -> profile each with ncu
-> read ncu's reports -> analyse them
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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

    The tensors are those that the run read or stored, else newly captured ones.
    If ncu cannot run, the report has the reason (`missing`) and the resources that Triton reports.

    Raises MissingCapabilityError without a GPU, and BadInputError if there is nothing that can be
    profiled as requested.
    """
    require_gpu(*NEEDS_GPU)
    if not request.no_tuned:
        request = replace(request, tuned=use_saved(watcher.say))
    where = request.where
    to_capture: Callable[[], ModelOptions]  # called if no folder holds captures
    # a run, by default the latest one
    if where is None or any((path / HEADER).is_file() for path in (Path(where), RUNS / where)):
        run, report = load(where, "run")
        _refuse_changed(report)
        request = _of_run(report, request)
        run_options = parsed(RunOptions, list(report.command[2:]))
        folders = [Path(run_options.model).expanduser(), run / CAPTURES]
        to_capture = partial(_captured_again, run_options, report, request)
        out = request.out or run
    else:  # a model or captures
        folders = [Path(where).expanduser()]
        to_capture = partial(_of_model, request, where)
        out = request.out or new_folder(where)
    with _folder_of_stalls(out / documents.STALLS_FOLDER, overwrite=request.force) as folder:
        return folder, _profile(folders, to_capture, request, folder, watcher)


def _profile(
    folders: Sequence[Path],
    to_capture: Callable[[], ModelOptions],
    request: StallsOptions,
    folder: Path,
    watcher: Watcher,
) -> StallReport:
    """Launch and profile each implementation, and write the reports into `folder`.

    folders, to_capture: see `_captured`.
    """
    with _captured(folders, to_capture, request, watcher) as (captures, layer):
        torch.cuda.empty_cache()  # for the processes that ncu profiles
        created = datetime.now(UTC).isoformat(timespec="seconds")
        missing = ""  # the reason why there is no report of ncu
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
                program, version = ncu.find()
                for (job, launch), report in zip(launched.items(), reports, strict=True):
                    ncu.profile(job, launch, program, report, timeout_s=request.timeout_s)
                    advance(1)
            except MissingCapabilityError as error:
                version = ""
                missing = f"{error.message} {error.hint}".rstrip()
        checkpoint = read_manifest(captures).checkpoint
        model = checkpoint.repo_id
        if checkpoint.random_weights:
            model += ", random weights"
        stall_report = analyse(
            [] if missing else [read(report) for report in reports],
            tuple(launched.values()),
            missing=missing,
            model=model,
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
    """Launch each implementation once.  Returns their launches, and a sentence for each library
    that cannot be profiled.

    captures, layer: the folder of the captures, and the one that is replayed.  cache: a folder for
    compiled kernels, which the launches share with ncu's processes.

    Raises the error of a bundled kernel or a user's kernel that cannot be launched or that launches
    no Triton kernel, and that of the last library if nothing can be profiled.
    """
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
            if kind == "own":
                code = error.exit_code
                if isinstance(error, MissingCapabilityError):
                    code = ExitCode.GATE_FAILED  # for a crash or a timeout of the user's kernel
                raise SsdprofError(
                    f"{name} cannot be profiled.  {error.message}",
                    "'ssdprof run' shows what is wrong with it.",
                    code,
                ) from error
            # if it fails too, nothing is left to profile
            is_last_hope = name == request.implementations[-1] and not launched
            if kind == "bundled" or is_last_hope:
                raise
            left_out.append(f"{name} is left out: {error.message}")
            watcher.say(left_out[-1])
        advance(1)
    return launched, tuple(left_out)


def _precision(request: StallsOptions) -> PrecisionName:
    """The precision at which all implementations are profiled: "exact, fp32 states"."""
    return f"{request.intermediates}, {request.state_dtype} states"


# --- the layer's tensors


@contextmanager
def _captured(
    folders: Sequence[Path],
    to_capture: Callable[[], ModelOptions],
    request: StallsOptions,
    watcher: Watcher,
) -> Iterator[tuple[Path, LayerCapture]]:
    """A folder of captures, and the capture in it that is profiled.

    folders: the first of them that holds captures is taken.  If none does, `to_capture` gives the
    options of a new capture, which exists while the context is open.
    """
    for folder in folders:
        if is_capture(folder):
            yield folder, _choose_capture(folder, request)
            return
    with tempfile.TemporaryDirectory(prefix="ssdprof-") as temporary:
        try:
            target = find(to_capture())
            folder, _ = capture(
                target, Path(temporary) / "captures", overwrite=False, watcher=watcher
            )
        except KeyboardInterrupt:
            # without the message of `capture`: the folder that it names is deleted here
            raise KeyboardInterrupt from None
        yield folder, _choose_capture(folder, request)


def _choose_capture(folder: Path, request: StallsOptions) -> LayerCapture:
    """The capture of the requested layer and length; by default of the longest prompt, and of the
    middle one of its layers.

    Raises BadInputError if the folder has no such capture, of a whole prompt and of an operator
    that all implementations have.
    """
    captures = read_manifest(folder).layers
    fitting = [
        capture
        for capture in captures
        if capture.whole
        and request.layer in (None, capture.layer.index)
        and request.seqlen in (None, capture.seqlen)
        and _all_know(request.implementations, capture.layer.operator)
    ]
    if not fitting:
        pairs = sorted({(capture.layer.index, capture.seqlen) for capture in captures})
        raise BadInputError(
            f"{folder} holds no such layer with a whole prompt that "
            f"{' and '.join(request.implementations)} could run.",
            f"It holds (layer, tokens): {', '.join(map(str, pairs)) or 'none'}.",
        )
    longest_seqlen = max(capture.seqlen for capture in fitting)
    longest = [capture for capture in fitting if capture.seqlen == longest_seqlen]
    # a server's recording may have several prompts of this length
    of_layer = {capture.layer.index: capture for capture in reversed(longest)}
    indices = sorted(of_layer)
    return of_layer[indices[len(indices) // 2]]


def _all_know(implementations: Sequence[str], operator: str) -> bool:
    """Whether the operator has implementations of all these names."""
    return all(knows(operators.get(operator), name) for name in implementations)


def _refuse_changed(report: Report) -> None:
    """Raises BadInputError for a run that replayed the inputs in another dtype, or only a share of
    the heads.
    """
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
    """The request for a run, with the index of a layer that the run captured; by default the middle
    one.

    Raises BadInputError if the run has no such layer or no prompt of the requested length.
    """
    lengths = [prompt.seqlen for prompt in report.prompts]
    layers = [layer.index for layer in report.captured if request.layer in (None, layer.index)]
    if not layers or request.seqlen not in (None, *lengths):
        indices = ", ".join(str(layer.index) for layer in report.captured)
        raise BadInputError(
            "The run has no such layer or prompt.",
            f"Its prompts have {', '.join(map(str, lengths))} tokens, its layers are {indices}.",
        )
    return replace(request, layer=layers[len(layers) // 2])


def _captured_again(
    run_options: RunOptions, report: Report, request: StallsOptions
) -> ModelOptions:
    """The options that capture the layer of a run again, on one of its prompts, as one call.

    The prompt is the longest one, unless the request names a length.
    Raises BadInputError if the file of the prompt has changed since the run.
    """
    assert report.model
    prompt_file = run_options.prompt_file
    created = datetime.fromisoformat(report.created).timestamp()
    if prompt_file and prompt_file.stat().st_mtime > created:
        raise BadInputError(
            f"{prompt_file} has changed since the run.", "Run it again, or name the model."
        )
    longest = max(prompt.seqlen for prompt in report.prompts)
    return replace(
        read_options(run_options),
        revision=report.model.revision,
        layers=str(request.layer),
        # packed sequences get the lengths that they had in the run
        seqlens=None if run_options.packed else (request.seqlen or longest,),
        chunk=None,
        decode=0,
    )


def _of_model(request: StallsOptions, model: str) -> ModelOptions:
    """The options that capture a layer of a model; by default the first one with an operator."""
    return ServedModelOptions(
        model=model,
        seqlens=None if request.seqlen is None else (request.seqlen,),
        layers="first:1" if request.layer is None else str(request.layer),
    )


@contextmanager
def _folder_of_stalls(folder: Path, *, overwrite: bool) -> Iterator[Path]:
    """Create a folder, and its parents, if they do not exist.

    At the end of the context, the created folders are removed if they are empty.

    Raises BadInputError if the folder has stalls already, unless `overwrite` is set, and OSError if
    it cannot be made.
    """
    if (folder / documents.STALLS_RECORD).exists() and not overwrite:
        raise BadInputError(
            f"{folder} holds stalls already.", "Give --force to replace them, or --out."
        )
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        with suppress(OSError):  # a folder that is not empty stays, and so do its parents
            for path in new_folders:
                path.rmdir()
