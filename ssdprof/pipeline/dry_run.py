"""What a run would take, before anything large is downloaded."""

from __future__ import annotations

from ssdprof.pipeline import limits
from ssdprof.pipeline.model import find
from ssdprof.pipeline.request import CaptureRequest
from ssdprof.schema.plan import Plan, PlannedFile


def plan(request: CaptureRequest) -> Plan:
    """What `run` or `capture` would download and load."""
    subject = find(request)
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
