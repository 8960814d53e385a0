"""`ssdprof run`: from a model or stored captures to a report.

locate -> fetch -> build prompts -> load -> capture each layer -> replay it -> compare answers, if requested -> record
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from ssdprof import operators
from ssdprof.capture import store
from ssdprof.capture.captured import CapturedLayer
from ssdprof.environment.machine import ClockWatch
from ssdprof.environment.ranks import Ranks
from ssdprof.environment.toolchain import unusable_gpu
from ssdprof.errors import BadInputError
from ssdprof.measure.memory import forget_peak, peak_bytes
from ssdprof.measure.rehearsal import Rehearsals
from ssdprof.measure.roofline import measure_ceilings
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.operators.dtypes import dtype_name
from ssdprof.pipeline import limits, tensor_parallel
from ssdprof.pipeline.answers_request import AnswersRequest
from ssdprof.pipeline.cast import cast as cast_inputs
from ssdprof.pipeline.compare_answers import compare_answers
from ssdprof.pipeline.lineup import Lineup, line_up
from ssdprof.pipeline.model import OnLayer, load, run_model, store_in
from ssdprof.pipeline.replay import ReplayOptions, replay_layer, unready
from ssdprof.pipeline.request import STEPS, CaptureRequest, Keep, ReplayRequest
from ssdprof.pipeline.stored_dims import stored_dims
from ssdprof.pipeline.subject import Stored, Subject, find_to_replay, refuse_larger
from ssdprof.progress import Watcher
from ssdprof.report.format import plural
from ssdprof.runs.record import Recorder, draft, recorded
from ssdprof.runs.shared import opened_by_first, recorder_of
from ssdprof.schema import DType, RunReport


def run(
    request: CaptureRequest,
    replay: ReplayRequest,
    keep: Keep,
    watcher: Watcher,
    *,
    found: Subject | Stored | None = None,
    ranks: Ranks | None = None,
) -> tuple[Path, RunReport]:
    """Capture a model's layers on each prompt, or open stored captures, and replay them.

    found: the result of `find_to_replay` for the request, if it was called before.
    ranks: processes that share the layers.  The first one returns the report of all.
    Returns the run's folder and its report.
    """
    found = found or find_to_replay(request, save_captures=keep.save_captures)
    if why := unusable_gpu():
        watcher.say(f"This run uses the CPU.  {why}")
    if isinstance(found, Stored):
        return _run_stored(found, replay, keep, watcher, ranks)
    with opened_by_first(keep.out, request.model.model, ranks) as folder, ExitStack() as stack:
        lineup = check(found, replay, ranks)
        loaded = load(request, found, watcher)
        dtype = dtype_name(loaded.model.dtype)
        report = draft(
            folder,
            keep.command,
            found.ref,
            loaded.prompts,
            max(loaded.segment_lengths),
            asked=lineup.asked(replay, found.layers, dtype, decode=found.serving.decode > 0),
            baseline=lineup.baseline,
            left_out=lineup.absent,
            gates=replay.gates,
            placement=loaded.placement,
            ranks=ranks.count if ranks else 1,
        )
        recorder = stack.enter_context(recorded(recorder_of(folder, report, ranks), watcher))
        found = replace(found, layers=ranks.share(found.layers) if ranks else found.layers)
        on_layer = stack.enter_context(_replaying(recorder, replay, lineup, dtype, watcher, found.calls))
        if keep.save_captures:
            writer = stack.enter_context(store_in(folder.captures, found, loaded))
            run_model(found, loaded, writer.add, on_layer)
        else:
            run_model(found, loaded, on_layer)
        if found.whole and not found.serving.decode:  # with --decode the model is whole, but no answers are compared
            compare_answers(loaded, found, _answers_wanted(replay, lineup), watcher, recorder.answered)
    return folder.path, recorder.report


def _answers_wanted(replay: ReplayRequest, lineup: Lineup) -> AnswersRequest:
    """The same precisions and implementations, except other libraries, in the dtype of the captured model."""
    names = lineup.answering
    return AnswersRequest(precisions=replay.precisions, implementations=names, weights="own")


def _run_stored(
    stored: Stored, replay: ReplayRequest, keep: Keep, watcher: Watcher, ranks: Ranks | None
) -> tuple[Path, RunReport]:
    lineup = check(stored, replay, ranks)
    manifest, load_layer = store.load(stored.folder)
    dtype = stored_dims(stored.chosen[0]).dtype
    mine = ranks.share(stored.layers) if ranks else stored.layers
    chosen = [capture for capture in stored.chosen if capture.layer in mine]
    with opened_by_first(keep.out, stored.ref.repo_id, ranks) as folder:
        report = draft(
            folder,
            keep.command,
            stored.ref,
            manifest.prompts,
            manifest.segment_length,
            asked=lineup.asked(replay, stored.layers, dtype, decode=stored.serving.decode > 0),
            baseline=lineup.baseline,
            left_out=lineup.absent,
            gates=replay.gates,
            capture_complete=manifest.complete,
            ranks=ranks.count if ranks else 1,
        )
        with (
            recorded(recorder_of(folder, report, ranks), watcher) as recorder,
            _replaying(recorder, replay, lineup, dtype, watcher, len(chosen)) as on_layer,
        ):
            for capture in chosen:
                on_layer(load_layer(capture, limits.device()))
    return folder.path, recorder.report


def check(found: Subject | Stored, replay: ReplayRequest, ranks: Ranks | None = None) -> Lineup:
    """Resolve the implementations.  Raises if this machine cannot replay the subject; `--dry-run` calls it too.

    ranks: processes that share the layers.
    Loads nothing.  `placement.choose` decides whether a model's weights fit.
    """
    if ranks is not None and ranks.count > (layers := len(found.layers)):
        raise BadInputError(
            f"{ranks.count} ranks cannot share {plural(layers, 'layer')}.",
            f"Start torchrun --nproc-per-node {layers}, or take more layers.",
        )
    for name in dict.fromkeys(layer.operator for layer in found.layers):
        if why := unready(name):
            raise BadInputError(
                f"{found.ref.repo_id} has {operators.outline(name).layers} layers: their inputs can be captured, but "
                f"not be replayed yet, because {why}.",
                "Use 'ssdprof capture' for now, or run a model with other layers.",
            )
        if found.serving.decode and (why := unready(name, STEPS.implementations)):
            raise BadInputError(f"Decode steps cannot be replayed: {why}.", "Leave out --decode.")
    lineup = line_up(replay.implementations, replay.baseline, found.layers)
    limits.check_replay(found.seqlens, found.batch)
    if isinstance(found, Subject):
        for layer in found.layers:
            tensor_parallel.refuse(found.ref, layer, vars(found.located.dims(layer)), replay.tensor_parallel)
    else:
        for capture in found.chosen:
            sizes = stored_dims(capture).sizes
            refuse_larger(found.ref, capture.layer, sizes)
            tensor_parallel.refuse(found.ref, capture.layer, sizes, replay.tensor_parallel)
    return lineup


@contextmanager
def _replaying(
    recorder: Recorder, wanted: ReplayRequest, lineup: Lineup, dtype: DType, watcher: Watcher, calls: int
) -> Iterator[OnLayer]:
    """The context's value replays a layer and records the results.  dtype: of the model.  calls: expected number."""
    cast_to = cast.to if (cast := wanted.cast_from(dtype)) else None
    gpu = limits.device() if limits.device().type == "cuda" else None
    with (
        limits.memory_errors(),
        # In the interpreter NumPy would warn about masked lanes.  Outputs are checked for NaN in any case.
        np.errstate(invalid="ignore", over="ignore"),
        ClockWatch() as clocks,
        watcher.step("Replaying", calls, unit="calls") as advance,
    ):
        if gpu:
            recorder.update(ceilings=measure_ceilings(gpu))
            forget_peak(gpu)
        options = ReplayOptions(
            precisions=wanted.precisions(cast_to or dtype),
            implementations=wanted.implementations,
            baseline=wanted.baseline,
            roster=lineup.roster,
            rehearsals=Rehearsals(wanted.first_call_s),
            sampling=SamplingPlan(smallest_difference=wanted.smallest_difference, warm=wanted.warm),
            ceilings=recorder.report.ceilings,
            watcher=watcher,
            on_case=recorder.finished,
            on_timed=clocks.poll,
        )

        of_steps = replace(
            options, precisions=STEPS.precisions, implementations=STEPS.implementations, baseline=STEPS.baseline
        )

        def replay(captured: CapturedLayer) -> None:
            inputs = tensor_parallel.first_rank(captured.inputs, wanted.tensor_parallel)
            inputs, lost = cast_inputs(inputs, cast_to)
            recorder.captured(captured.layer, captured.remark)
            where = f"{captured.layer.name}, {captured.call}" if captured.call else captured.layer.name
            recorder.captured(captured.layer, lost and f"{where}: {lost}")
            step = captured.call is not None and captured.call.kind == "decode"
            replay_layer(captured.layer, inputs, of_steps if step else options, captured.call)
            del inputs
            if gpu:
                recorder.update(clocks=clocks.clocks)
                recorder.peaked(peak_bytes(gpu))
            advance(1)

        yield replay
