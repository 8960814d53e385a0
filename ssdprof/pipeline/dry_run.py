"""What a run would take, before anything large is downloaded."""

from __future__ import annotations

from ssdprof.pipeline import limits
from ssdprof.pipeline.subject import Subject
from ssdprof.schema.plan import DryRun, PlannedFile


def plan(subject: Subject) -> DryRun:
    """What `run` or `capture` would download and load."""
    return DryRun(
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
