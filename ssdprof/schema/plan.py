"""The record of `--dry-run`: what a run would download and load."""

from __future__ import annotations

from pydantic import computed_field

from ssdprof.schema.base import Record
from ssdprof.schema.checkpoint import CheckpointRef, LayerRef
from ssdprof.schema.placement import Placement
from ssdprof.schema.serving import Serving


class PlannedFile(Record):
    name: str
    size_bytes: int
    cached: bool  # it need not be downloaded


class DryRun(Record):
    """weight_bytes: once loaded.  free_bytes: memory of `device` now.

    placement: None for stored captures, and if no placement fits.

    batch, serving: of each prompt.  tensor_parallel: as in `Asked`.
    """

    checkpoint: CheckpointRef
    layers: tuple[LayerRef, ...]
    dims: str
    seqlens: tuple[int, ...]
    batch: int = 1
    serving: Serving = Serving()
    tensor_parallel: int = 1
    files: tuple[PlannedFile, ...]
    weight_bytes: int
    device: str
    free_bytes: int
    placement: Placement | None = None
    notes: tuple[str, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def download_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files if not file.cached)
