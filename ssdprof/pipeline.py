"""The way of the data: one function for each command that runs a model or replays what one left.

locate -> fetch -> build prompts -> load -> capture each layer -> replay it -> record
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ssdprof import limits, runs
from ssdprof.capture import CapturedLayer, capture_layers, choose_segment_length, select_layers, store
from ssdprof.capture.prompt import build_prompt
from ssdprof.checkpoint import LocalCheckpoint, Located, fetch, load_model, locate
from ssdprof.environment import ClockWatch
from ssdprof.errors import BadInputError
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.measure.memory import forget_peak, peak_bytes
from ssdprof.measure.roofline import measure_ceilings
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.plan import Plan, PlannedFile
from ssdprof.progress import Watcher
from ssdprof.record import Recorder, draft, recorded
from ssdprof.replay import ReplayOptions, replay_layer
from ssdprof.request import CaptureRequest, ModelRequest, PromptRequest, Recording
from ssdprof.schema import CaptureManifest, CheckpointRef, LayerRef, Precision, Prompt, RunReport

OnLayer = Callable[[CapturedLayer], object]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a request came to: a checkpoint that is found, its wanted layers, and lengths that suit this machine."""

    located: Located
    layers: tuple[LayerRef, ...]
    seqlens: tuple[int, ...]

    @property
    def ref(self) -> CheckpointRef:
        return self.located.ref

    @property
    def deepest_layer(self) -> int:
        return max(layer.index for layer in self.layers)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model on its device, with the prompts that it will run on.

    ids: each (1, l) int64.  segment_lengths: tokens per forward call, for each prompt.
    """

    model: Any
    ids: tuple[torch.Tensor, ...]
    prompts: tuple[Prompt, ...]
    segment_lengths: tuple[int, ...]


def plan(request: CaptureRequest) -> Plan:
    """What `run` or `capture` would download and load."""
    subject = _find(request)
    return Plan(
        checkpoint=subject.ref,
        layers=subject.layers,
        dims=str(subject.located.dims(subject.layers[0])),
        seqlens=subject.seqlens,
        files=tuple(PlannedFile(**file._asdict()) for file in subject.located.files(subject.deepest_layer)),
        weight_bytes=subject.located.weight_bytes(subject.deepest_layer),
        device=str(limits.device()),
        free_bytes=limits.free_bytes(),
        notes=subject.located.notes,
    )


def capture(
    request: CaptureRequest, out: Path | None, *, overwrite: bool, watcher: Watcher
) -> tuple[Path, CaptureManifest]:
    """Store the inputs of a model's SSD and GDN layers.  Returns their folder and manifest."""
    subject = _find(request)
    loaded = _load(request, subject, watcher)
    folder = out or store.default_folder(subject.ref, loaded.prompts, subject.layers)
    with (
        limits.memory_errors(),
        _store_in(folder, subject, loaded, overwrite=overwrite) as writer,
        watcher.step("Capturing layers", len(subject.layers) * len(loaded.ids)) as advance,
    ):
        _run_model(subject, loaded, writer.add, lambda _: advance(1))
    return folder, writer.manifest


def run(
    request: CaptureRequest,
    precisions: tuple[Precision, ...],
    recording: Recording,
    watcher: Watcher,
    *,
    smallest_difference: float = 0.01,
) -> tuple[Path, RunReport]:
    """Capture a model's SSD layers on each prompt and replay them.  Returns the run's folder and its report.

    smallest_difference: of two times that counts, relative.
    """
    sampling = SamplingPlan(smallest_difference=smallest_difference)
    if store.is_capture(Path(request.model.model).expanduser()):
        return _run_stored(request, precisions, recording, watcher, sampling)
    with runs.opened(recording.out, request.model.model) as folder, ExitStack() as stack:
        subject = _find(request)
        _refuse_gdn(subject.ref, subject.layers)
        limits.check_replay(subject.seqlens)
        loaded = _load(request, subject, watcher)
        report = draft(folder, recording, subject.ref, loaded.prompts, max(loaded.segment_lengths))
        recorder = stack.enter_context(recorded(folder, report, watcher))
        count = len(subject.layers) * len(loaded.ids)
        replay = stack.enter_context(_replaying(recorder, precisions, watcher, count, sampling))
        if recording.save_captures:
            writer = stack.enter_context(_store_in(folder.captures, subject, loaded))
            _run_model(subject, loaded, writer.add, replay)
        else:
            _run_model(subject, loaded, replay)
    return folder.path, recorder.report


def _run_stored(
    request: CaptureRequest,
    precisions: tuple[Precision, ...],
    recording: Recording,
    watcher: Watcher,
    sampling: SamplingPlan,
) -> tuple[Path, RunReport]:
    """Replay stored captures: `request.model.model` is their folder."""
    plain = CaptureRequest(model=ModelRequest(model=request.model.model), layers=request.layers)
    if request != plain or recording.save_captures:
        raise BadInputError(
            f"{request.model.model} holds stored captures: their model, prompt and segments are what they are.",
            "Only --layers, --dtypes, --states and --out go with stored captures.",
        )
    manifest, load = store.load(Path(request.model.model).expanduser())
    layers = select_layers(request.layers, tuple(dict.fromkeys(stored.layer for stored in manifest.layers)))
    chosen = [stored for stored in manifest.layers if stored.layer in layers]
    if not chosen:
        raise BadInputError(f"{request.model.model} holds no layer: its capture was broken off.", "Capture again.")
    _refuse_gdn(manifest.checkpoint, layers)
    limits.check_replay([stored.seqlen for stored in chosen])
    remarks = () if manifest.complete else ("The stored capture was broken off: it may lack layers or prompts.",)
    with runs.opened(recording.out, manifest.checkpoint.repo_id) as folder:
        report = draft(
            folder, recording, manifest.checkpoint, manifest.prompts, manifest.segment_length, remarks=remarks
        )
        with (
            recorded(folder, report, watcher) as recorder,
            _replaying(recorder, precisions, watcher, len(chosen), sampling) as replay,
        ):
            for stored in chosen:
                replay(load(stored, limits.device()))
    return folder.path, recorder.report


def _find(request: CaptureRequest) -> Subject:
    model = request.model
    located = locate(model.model, revision=model.revision, tokenizer=model.tokenizer)
    layers = select_layers(request.layers, located.ref.layers)
    return Subject(located=located, layers=layers, seqlens=request.prompt.seqlens or limits.default_seqlens())


def _refuse_gdn(ref: CheckpointRef, layers: tuple[LayerRef, ...]) -> None:
    if any(layer.operator == "gdn" for layer in layers):
        raise BadInputError(
            f"{ref.repo_id} has Gated-DeltaNet layers: their inputs can be captured, but their replay comes with a "
            "later version.",
            "Use 'ssdprof capture' for now, or run a model with Mamba-2 layers.",
        )


def _load(request: CaptureRequest, subject: Subject, watcher: Watcher) -> Loaded:
    """Download, build the prompts, then load the model: a wrong prompt is found before the model is in memory."""
    for note in subject.located.notes:
        watcher.say(note)
    limits.check_weights(subject.located, subject.layers)
    local = fetch(subject.located, deepest_layer=subject.deepest_layer, progress=watcher.say)
    built = [_prompt(local, request.prompt, seqlen) for seqlen in subject.seqlens]
    _quiet_transformers()
    with limits.memory_errors(), watcher.step(f"Loading {subject.ref.repo_id}"):
        model = load_model(local, device=limits.device())
    lengths = [
        min(request.segment_length or choose_segment_length(model, seqlen, subject.layers), seqlen)
        for seqlen in subject.seqlens
    ]
    return Loaded(
        model=model,
        ids=tuple(ids for ids, _ in built),
        prompts=tuple(prompt for _, prompt in built),
        segment_lengths=tuple(lengths),
    )


def _quiet_transformers() -> None:
    """Its bars are not ours, and it warns of slow fallbacks that capture replaces."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _prompt(local: LocalCheckpoint, wanted: PromptRequest, seqlen: int) -> tuple[torch.Tensor, Prompt]:
    folder = local.tokenizer_folder
    if isinstance(wanted.text, Path):
        ids, prompt = build_prompt(folder, seqlen, kind="file", file=wanted.text)
    else:
        ids, prompt = build_prompt(folder, seqlen, kind=wanted.text)
    return ids, prompt.model_copy(update={"tokenizer": f"{local.tokenizer_name}: {prompt.tokenizer}"})


def _store_in(folder: Path, subject: Subject, loaded: Loaded, *, overwrite: bool = False) -> store.CaptureWriter:
    return store.CaptureWriter(
        folder,
        checkpoint=subject.ref,
        prompts=loaded.prompts,
        segment_length=max(loaded.segment_lengths),
        overwrite=overwrite,
    )


def _run_model(subject: Subject, loaded: Loaded, *handlers: OnLayer) -> None:
    """Run the model on every prompt; each handler sees each wanted layer."""

    def on_layer(captured: CapturedLayer) -> None:
        for handle in handlers:
            handle(captured)

    for ids, segment_length in zip(loaded.ids, loaded.segment_lengths, strict=True):
        capture_layers(
            loaded.model, ids, subject.layers, ref=subject.ref, segment_length=segment_length, on_layer=on_layer
        )


@contextmanager
def _replaying(
    recorder: Recorder, precisions: tuple[Precision, ...], watcher: Watcher, layers: int, sampling: SamplingPlan
) -> Iterator[OnLayer]:
    """The context's value replays a layer and records what comes out."""
    gpu = limits.device() if limits.device().type == "cuda" else None
    with (
        limits.memory_errors(),
        # In the interpreter NumPy would warn of lanes that a kernel masks.  Outputs are checked for NaN in any case.
        np.errstate(invalid="ignore", over="ignore"),
        ClockWatch() as clocks,
        watcher.step("Replaying", layers, unit="layers") as advance,
    ):
        if gpu:
            recorder.update(ceilings=measure_ceilings(gpu))
            forget_peak(gpu)
        options = ReplayOptions(
            precisions=precisions,
            sampling=sampling,
            ceilings=recorder.report.ceilings,
            watcher=watcher,
            on_case=recorder.finished,
            on_timed=clocks.poll,
        )

        def replay(captured: CapturedLayer) -> None:
            assert isinstance(captured.inputs, SSDInputs)
            recorder.captured(captured.layer)
            replay_layer(captured.layer, captured.inputs, options)
            if gpu:
                recorder.update(clocks=clocks.clocks, model_peak_bytes=peak_bytes(gpu))
            advance(1)

        yield replay
