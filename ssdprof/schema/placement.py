"""Records of where a model's weights are while it runs."""

from __future__ import annotations

from typing import Literal

from ssdprof.schema.base import Record

PlacementKind = Literal["one-gpu", "all-gpus", "cpu-offload", "disk-offload"]


class Held(Record):
    """The weights in one place.  place: "cuda:0", "cpu" or "disk".  layers: decoder layers that begin there."""

    place: str
    layers: int
    weight_bytes: int


class Placement(Record):
    """device: where the model computes, the first one of several.  held: all weights.

    predicted_peak_bytes: memory on `device` while the model runs and inputs are captured, predicted before
        loading, without replaying.  None if the model's code does not run on the meta device.
    streamed_layer_bytes: weights of the largest decoder layer that is brought to `device` for each forward call; 0 if
        none is.
    bytes_per_s: measured speed of streaming; None if nothing is streamed, or before the download.
    forward_calls: of the model, for the longest prompt: its segments, packed sequences and decode steps.
    """

    kind: PlacementKind
    device: str
    held: tuple[Held, ...]
    predicted_peak_bytes: int | None
    streamed_layer_bytes: int = 0
    bytes_per_s: float | None = None
    forward_calls: int = 1

    @property
    def seconds_per_layer(self) -> float | None:
        """Streaming time of the largest layer in each forward call; None if unknown, or if nothing is streamed."""
        return self.streamed_layer_bytes / self.bytes_per_s if self.bytes_per_s else None
