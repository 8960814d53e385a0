"""`ssdprof run`: from a model or stored captures to a report.

locate -> fetch -> build prompts -> load -> capture each layer -> replay it -> record
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ssdprof import operators, runs
from ssdprof.capture import CapturedLayer, select_layers, store
from ssdprof.environment import ClockWatch
from ssdprof.errors import BadInputError
from ssdprof.measure.memory import forget_peak, peak_bytes
from ssdprof.measure.roofline import measure_ceilings
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.pipeline import limits
from ssdprof.pipeline.model import OnLayer, Subject, find, load, run_model, store_in
from ssdprof.pipeline.replay import ReplayOptions, refuse_unknown, replay_layer, unready
from ssdprof.pipeline.request import CaptureRequest, Keep, ModelRequest, ReplayRequest
from ssdprof.progress import Watcher
from ssdprof.runs.record import Recorder, draft, recorded
from ssdprof.schema import CaptureManifest, LayerCapture, LayerRef, RunReport


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Layers of a stored capture that a run would replay, and how each is read."""

    folder: Path
    manifest: CaptureManifest
    chosen: tuple[LayerCapture, ...]
    load: store.Loader

    @property
    def layers(self) -> tuple[LayerRef, ...]:
        return tuple(dict.fromkeys(capture.layer for capture in self.chosen))


def run(request: CaptureRequest, replay: ReplayRequest, keep: Keep, watcher: Watcher) -> tuple[Path, RunReport]:
    """Capture a model's layers on each prompt and replay them.  Returns the run's folder and its report."""
    if is_stored(request):
        return _run_stored(request, replay, keep, watcher)
    with runs.opened(keep.out, request.model.model) as folder, ExitStack() as stack:
        subject = find(request)
        check(subject, replay)
        loaded = load(request, subject, watcher)
        report = draft(
            folder,
            keep.command,
            subject.ref,
            loaded.prompts,
            max(loaded.segment_lengths),
            asked=replay.asked(subject.layers),
        )
        recorder = stack.enter_context(recorded(folder, report, watcher))
        count = len(subject.layers) * len(loaded.ids)
        on_layer = stack.enter_context(_replaying(recorder, replay, watcher, count))
        if keep.save_captures:
            writer = stack.enter_context(store_in(folder.captures, subject, loaded))
            run_model(subject, loaded, writer.add, on_layer)
        else:
            run_model(subject, loaded, on_layer)
    return folder.path, recorder.report


def _run_stored(request: CaptureRequest, replay: ReplayRequest, keep: Keep, watcher: Watcher) -> tuple[Path, RunReport]:
    """Replay stored captures: `request.model.model` is their folder."""
    stored = find_stored(request, keep)
    check(stored, replay)
    manifest = stored.manifest
    with runs.opened(keep.out, manifest.checkpoint.repo_id) as folder:
        report = draft(
            folder,
            keep.command,
            manifest.checkpoint,
            manifest.prompts,
            manifest.segment_length,
            asked=replay.asked(stored.layers),
            capture_complete=manifest.complete,
        )
        with (
            recorded(folder, report, watcher) as recorder,
            _replaying(recorder, replay, watcher, len(stored.chosen)) as on_layer,
        ):
            for capture in stored.chosen:
                on_layer(stored.load(capture, limits.device()))
    return folder.path, recorder.report


def is_stored(request: CaptureRequest) -> bool:
    """Whether the request names a folder of stored captures, and not a model."""
    return store.is_capture(Path(request.model.model).expanduser())


def find_stored(request: CaptureRequest, keep: Keep) -> Stored:
    """The wanted layers of a stored capture.  BadInputError for options that do not go with one."""
    plain = CaptureRequest(model=ModelRequest(model=request.model.model), layers=request.layers)
    if request != plain or keep.save_captures:
        raise BadInputError(
            f"{request.model.model} holds stored captures: their model, prompt and segments are what they are.",
            "Of the options of a model, only --layers goes with stored captures.",
        )
    folder = Path(request.model.model).expanduser()
    manifest, load_layer = store.load(folder)
    layers = select_layers(request.layers, tuple(dict.fromkeys(stored.layer for stored in manifest.layers)))
    chosen = tuple(stored for stored in manifest.layers if stored.layer in layers)
    if not chosen:
        raise BadInputError(f"{request.model.model} holds no layer: its capture was broken off.", "Capture again.")
    return Stored(folder=folder, manifest=manifest, chosen=chosen, load=load_layer)


def check(found: Subject | Stored, replay: ReplayRequest) -> None:
    """Raise what keeps this machine from replaying what was found.  Loads nothing; `--dry-run` asks the same."""
    if isinstance(found, Stored):
        ref, seqlens = found.manifest.checkpoint, tuple(capture.seqlen for capture in found.chosen)
    else:
        ref, seqlens = found.ref, found.seqlens
    for name in dict.fromkeys(layer.operator for layer in found.layers):
        if why := unready(name):
            raise BadInputError(
                f"{ref.repo_id} has {operators.outline(name).layers} layers: their inputs can be captured, but not be "
                f"replayed yet, because {why}.",
                "Use 'ssdprof capture' for now, or run a model with other layers.",
            )
        refuse_unknown(replay.implementations, name)
    limits.check_replay(seqlens)
    if isinstance(found, Subject):
        limits.check_weights(found.located, found.layers)


@contextmanager
def _replaying(recorder: Recorder, wanted: ReplayRequest, watcher: Watcher, layers: int) -> Iterator[OnLayer]:
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
            precisions=wanted.precisions,
            implementations=wanted.implementations,
            sampling=SamplingPlan(smallest_difference=wanted.smallest_difference),
            ceilings=recorder.report.ceilings,
            watcher=watcher,
            on_case=recorder.finished,
            on_timed=clocks.poll,
        )

        def replay(captured: CapturedLayer) -> None:
            recorder.captured(captured.layer)
            replay_layer(captured.layer, captured.inputs, options)
            if gpu:
                recorder.update(clocks=clocks.clocks, model_peak_bytes=peak_bytes(gpu))
            advance(1)

        yield replay
