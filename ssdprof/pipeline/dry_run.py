"""What a run would take, before anything large is downloaded."""

from __future__ import annotations

from pathlib import Path

from ssdprof.checkpoint import check_config
from ssdprof.errors import BadInputError
from ssdprof.files import why
from ssdprof.pipeline import limits
from ssdprof.pipeline.stored_dims import stored_dims
from ssdprof.pipeline.subject import Stored, Subject
from ssdprof.schema.plan import DryRun, PlannedFile

_BROKEN_OFF = "This capture was interrupted: layers or prompts may be missing, and a run of it cannot pass."


def plan(found: Subject | Stored, *, tensor_parallel: int = 1) -> DryRun:
    """What `run` or `capture` would download and load.

    tensor_parallel: ranks among which a run divides the heads.
    BadInputError for a config that transformers cannot use, and for a file of a capture that is not there.
    """
    planned = _of_stored(found) if isinstance(found, Stored) else _of_model(found)
    return planned.model_copy(
        update={"batch": found.batch, "serving": found.serving, "tensor_parallel": tensor_parallel}
    )


def _of_model(subject: Subject) -> DryRun:
    check_config(subject.located, deepest_layer=subject.deepest_layer)
    return DryRun(
        checkpoint=subject.ref,
        layers=subject.layers,
        dims=str(subject.located.dims(subject.layers[0])),
        seqlens=subject.seqlens,
        files=tuple(
            PlannedFile(**file._asdict()) for file in subject.located.files(subject.deepest_layer, head=subject.whole)
        ),
        weight_bytes=subject.weight_bytes,
        device=str(limits.device()),
        free_bytes=limits.free_bytes(),
        notes=subject.located.notes,
    )


def _of_stored(stored: Stored) -> DryRun:
    """Nothing is downloaded, and no weights are loaded."""
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
