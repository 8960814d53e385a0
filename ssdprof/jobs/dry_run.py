"""Plans a run before anything large is downloaded."""

from __future__ import annotations

from pathlib import Path

from ssdprof.checkpoint.load import check_space
from ssdprof.core.subject import DryRun, Placement, PlannedFile
from ssdprof.errors import BadInputError, MissingCapabilityError
from ssdprof.files import why
from ssdprof.jobs import limits, placement
from ssdprof.jobs.model import build_prompts
from ssdprof.jobs.plan import stored_dims
from ssdprof.jobs.request import CaptureRequest
from ssdprof.jobs.subject import Stored, Subject

_BROKEN_OFF = "This capture was interrupted: layers or prompts may be missing, and a run of it cannot pass."


def plan(found: Subject | Stored, request: CaptureRequest, *, tensor_parallel: int = 1) -> DryRun:
    """The plan of `run` or `capture`: downloads and memory.

    tensor_parallel: ranks among which a run divides the heads.
    BadInputError for a config that transformers cannot use, and for a missing file of a capture.
    """
    planned = _of_stored(found) if isinstance(found, Stored) else _of_model(found, request)
    return planned.model_copy(
        update={"batch": found.batch, "serving": found.serving, "tensor_parallel": tensor_parallel}
    )


def _of_model(subject: Subject, request: CaptureRequest) -> DryRun:
    return DryRun(
        checkpoint=subject.ref,
        layers=subject.layers,
        dims=subject.located.size_words(subject.layers[0]),
        seqlens=subject.seqlens,
        files=subject.located.files(subject.deepest_layer, head=subject.whole),
        weight_bytes=subject.weight_bytes,
        device=str(limits.device()),
        free_bytes=limits.free_bytes(),
        placement=_placement(subject, request),
        notes=subject.located.notes,
    )


def check_start(planned: DryRun, found: Subject | Stored, request: CaptureRequest) -> None:
    """Raise if a model would not run: no placement fits, a prompt cannot be built, or there is no room to download."""
    if isinstance(found, Stored):
        return
    if planned.placement is None:
        placement.check_disk(placement.choose(request, found))
    build_prompts(request, found)
    check_space(found.located, found.deepest_layer, head=found.head)


def _placement(subject: Subject, request: CaptureRequest) -> Placement | None:
    """The placement; None if none fits, and then `check_start` raises after the plan is shown."""
    try:
        placed = placement.choose(request, subject)
        placement.check_disk(placed)
    except MissingCapabilityError:
        return None
    located = subject.located
    depth = located.depth(subject.deepest_layer)
    there = [name for name in located.weights.files(depth, head=subject.head) if located.source.cached(name)]
    return placement.priced(placed, located.source.path(there[0]) if there else None)


def _of_stored(stored: Stored) -> DryRun:
    """The plan for stored captures: no download, and no weights."""
    return DryRun(
        checkpoint=stored.ref,
        layers=stored.layers,
        dims=stored_dims(stored.chosen[0]).words,
        seqlens=stored.seqlens,
        files=tuple(
            PlannedFile(name=capture.file, size_bytes=_size(stored.folder / capture.file), cached=True)
            for capture in stored.chosen
        ),
        weight_bytes=0,
        device=str(limits.device()),
        free_bytes=limits.free_bytes(),
        notes=() if stored.manifest.complete else (_BROKEN_OFF,),
    )


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise BadInputError(f"{file} cannot be read: {why(error)}.", "Capture again.") from error
