"""Provides one layer's tensors for profiling: stored ones, or newly captured ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ssdprof import operators, runs
from ssdprof.capture.manifest import is_capture, read_manifest
from ssdprof.core.subject import CaptureManifest, LayerCapture
from ssdprof.errors import BadInputError
from ssdprof.operators.named import knows
from ssdprof.jobs.capture import capture
from ssdprof.jobs.request import CaptureRequest, ModelRequest, PromptRequest, ServingRequest
from ssdprof.jobs.stall_request import StallRequest
from ssdprof.progress import Watcher
from ssdprof.schema import RunReport  # TODO


@dataclass(frozen=True)
class Captured:
    """One layer of a folder of captures."""

    folder: Path
    layer: LayerCapture


@contextmanager
def of_request(request: StallRequest, run: tuple[Path, RunReport] | None, watcher: Watcher) -> Iterator[Captured]:
    """The layer of a request: stored tensors, else newly captured ones, which exist while the context is open.

    run: the run that the request names; None if it names a model or captures.
    """
    if run is not None and run[1].cast:
        raise BadInputError(
            f"The inputs of this run were {run[1].cast}, and stalls are profiled in the model's own dtype.",
            "Name the model or its captures instead of the run.",
        )
    asked = run[1].asked if run is not None else None
    if asked is not None and asked.tensor_parallel > 1:
        raise BadInputError(
            f"This run replayed the share of the first of {asked.tensor_parallel} tensor-parallel ranks, and stalls "
            "are profiled with all heads.",
            "Name the model or its captures instead of the run.",
        )
    place = run[0] / runs.CAPTURES if run is not None else Path(request.where or "").expanduser()
    if is_capture(place):
        yield _stored(place, request)
        return
    wanted = _of_run(run[1], request) if run is not None else _of_model(request)
    with _captured_anew(wanted, request, watcher) as anew:
        yield anew


@contextmanager
def of_ended_run(wanted: CaptureRequest, run: Path, request: StallRequest, watcher: Watcher) -> Iterator[Captured]:
    """The layer of a run that has just ended: the tensors that it read or stored, else newly captured as `wanted`.

    run: its folder.
    """
    model = Path(wanted.model.model).expanduser()
    stored = next((path for path in (model, run / runs.CAPTURES) if is_capture(path)), None)
    if stored is not None:
        yield _stored(stored, request)
        return
    with _captured_anew(wanted, request, watcher) as anew:
        yield anew


def middle_layer(asked: CaptureRequest, report: RunReport) -> CaptureRequest:
    """The request of a run, narrowed to its middle layer and its longest prompt."""
    layers = report.captured_layers
    return replace(
        asked,
        layers=str(layers[len(layers) // 2].index),
        prompt=_whole(asked.prompt, max(prompt.seqlen for prompt in report.prompts)),
    )


@contextmanager
def _captured_anew(wanted: CaptureRequest, request: StallRequest, watcher: Watcher) -> Iterator[Captured]:
    with tempfile.TemporaryDirectory(prefix="ssdprof-") as temporary:
        try:
            folder, _ = capture(wanted, Path(temporary) / "captures", overwrite=False, watcher=watcher)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None  # what it kept goes with the folder
        yield _stored(folder, request)


def _stored(folder: Path, request: StallRequest) -> Captured:
    return Captured(folder, _choose(read_manifest(folder), request, folder))


def _choose(manifest: CaptureManifest, request: StallRequest, folder: Path) -> LayerCapture:
    """The requested layer, or the middle one; the requested length, or the longest."""
    found = [
        stored
        for stored in manifest.layers
        if all(knows(operators.get(stored.layer.operator), word) for word in request.implementations) and stored.whole
    ]
    if request.layer is not None:
        found = [stored for stored in found if stored.layer.index == request.layer]
    if request.seqlen is not None:
        found = [stored for stored in found if stored.seqlen == request.seqlen]
    if not found:
        there = sorted({(stored.layer.index, stored.seqlen) for stored in manifest.layers})
        raise BadInputError(
            f"{folder} holds no such layer with a whole prompt that {' and '.join(request.implementations)} could run.",
            f"It holds (layer, tokens): {', '.join(map(str, there)) or 'none'}.",
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
            "The run's prompt came from a file, which the run does not store.",
            "Run it with --save-captures, or name the model: its operators are then run on the built-in text.",
        )
    if prompt.serving.packed:
        raise BadInputError(
            "The run's sequences were packed, and the run did not store them.", "Run it with --save-captures."
        )
    return CaptureRequest(
        model=ModelRequest(model=report.checkpoint.requested, revision=report.checkpoint.revision),
        prompt=PromptRequest(text=prompt.kind, seqlens=(prompt.seqlen,), serving=ServingRequest(batch=prompt.batch)),
        layers=str(layers[len(layers) // 2].index),
    )


def _of_model(request: StallRequest) -> CaptureRequest:
    return CaptureRequest(
        model=ModelRequest(model=request.where or ""),
        prompt=PromptRequest(seqlens=None if request.seqlen is None else (request.seqlen,)),
        layers="first:1" if request.layer is None else str(request.layer),
    )


def _whole(prompt: PromptRequest, seqlen: int) -> PromptRequest:
    """The prompt as one call of every operator, without decode steps.  A pack is drawn with the same lengths."""
    serving = replace(prompt.serving, chunk=None, decode=0)
    return replace(prompt, seqlens=None if serving.packed else (seqlen,), serving=serving)
