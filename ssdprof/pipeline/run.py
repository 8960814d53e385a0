"""`ssdprof run`: from a model or stored captures to a report.

locate -> fetch -> build prompts -> load -> capture each layer -> replay it -> record
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
from ssdprof.pipeline.model import OnLayer, load, run_model, store_in
from ssdprof.pipeline.replay import ReplayOptions, replay_layer, unready
from ssdprof.pipeline.request import CaptureRequest, Keep, ModelRequest
from ssdprof.pipeline.subject import Subject, captures_of, find_to_replay
from ssdprof.progress import Watcher
from ssdprof.runs.record import Recorder, draft, recorded
from ssdprof.schema import CheckpointRef, LayerRef, PrecisionRecord, RunReport


def run(
    request: CaptureRequest,
    precisions: tuple[PrecisionRecord, ...],
    keep: Keep,
    watcher: Watcher,
    *,
    subject: Subject | None = None,
    smallest_difference: float = 0.01,
) -> tuple[Path, RunReport]:
    """Capture a model's layers on each prompt and replay them.  Returns the run's folder and its report.

    subject: what `find_to_replay` gave for the request, if it was asked already.
    smallest_difference: of two times that counts, relative.
    """
    sampling = SamplingPlan(smallest_difference=smallest_difference)
    if captures_of(request) is not None:
        return _run_stored(request, precisions, keep, watcher, sampling)
    with runs.opened(keep.out, request.model.model) as folder, ExitStack() as stack:
        subject = subject or find_to_replay(request)
        assert subject is not None, "the request names no captures"
        _refuse_unready(subject.ref, subject.layers)
        limits.check_replay(subject.seqlens)
        loaded = load(request, subject, watcher)
        report = draft(folder, keep.command, subject.ref, loaded.prompts, max(loaded.segment_lengths))
        recorder = stack.enter_context(recorded(folder, report, watcher))
        count = len(subject.layers) * len(loaded.ids)
        replay = stack.enter_context(_replaying(recorder, precisions, watcher, count, sampling))
        if keep.save_captures:
            writer = stack.enter_context(store_in(folder.captures, subject, loaded))
            run_model(subject, loaded, writer.add, replay)
        else:
            run_model(subject, loaded, replay)
    return folder.path, recorder.report


def _run_stored(
    request: CaptureRequest,
    precisions: tuple[PrecisionRecord, ...],
    keep: Keep,
    watcher: Watcher,
    sampling: SamplingPlan,
) -> tuple[Path, RunReport]:
    """Replay stored captures: `request.model.model` is their folder."""
    plain = CaptureRequest(model=ModelRequest(model=request.model.model), layers=request.layers)
    if request != plain or keep.save_captures:
        raise BadInputError(
            f"{request.model.model} holds stored captures: their model, prompt and segments are what they are.",
            "Only --layers, --dtypes, --states and --out go with stored captures.",
        )
    manifest, load_layer = store.load(Path(request.model.model).expanduser())
    layers = select_layers(request.layers, tuple(dict.fromkeys(stored.layer for stored in manifest.layers)))
    chosen = [stored for stored in manifest.layers if stored.layer in layers]
    if not chosen:
        raise BadInputError(f"{request.model.model} holds no layer: its capture was broken off.", "Capture again.")
    _refuse_unready(manifest.checkpoint, layers)
    limits.check_replay([stored.seqlen for stored in chosen])
    remarks = () if manifest.complete else ("The stored capture was broken off: it may lack layers or prompts.",)
    with runs.opened(keep.out, manifest.checkpoint.repo_id) as folder:
        report = draft(
            folder, keep.command, manifest.checkpoint, manifest.prompts, manifest.segment_length, remarks=remarks
        )
        with (
            recorded(folder, report, watcher) as recorder,
            _replaying(recorder, precisions, watcher, len(chosen), sampling) as replay,
        ):
            for stored in chosen:
                replay(load_layer(stored, limits.device()))
    return folder.path, recorder.report


def _refuse_unready(ref: CheckpointRef, layers: tuple[LayerRef, ...]) -> None:
    """BadInputError if the operator of a layer can be captured and not yet be replayed."""
    for name in dict.fromkeys(layer.operator for layer in layers):
        why = unready(name)
        if why:
            raise BadInputError(
                f"{ref.repo_id} has {operators.outline(name).layers} layers: their inputs can be captured, but not be "
                f"replayed yet, because {why}.",
                "Use 'ssdprof capture' for now, or run a model with other layers.",
            )


@contextmanager
def _replaying(
    recorder: Recorder, precisions: tuple[PrecisionRecord, ...], watcher: Watcher, layers: int, sampling: SamplingPlan
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
            recorder.captured(captured.layer, captured.remark)
            replay_layer(captured.layer, captured.inputs, options)
            if gpu:
                recorder.update(clocks=clocks.clocks, model_peak_bytes=peak_bytes(gpu))
            advance(1)

        yield replay
