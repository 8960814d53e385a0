"""Describes a placement of a model's weights, and its cost."""

from __future__ import annotations

from ssdprof.core.words import size_words
from ssdprof.schema.placement import Held, Placement

_PLACES = {"cpu": "in main memory", "disk": "on the disk"}


def placement_words(placement: Placement) -> str:
    """ "disk-offload: 3 layers (4.8 GiB) on cuda:0, 7 layers (11.2 GiB) on the disk; ..." """
    held = ", ".join(_held(held) for held in placement.held)
    words = [held if placement.kind == "one-gpu" and placement.device == "cpu" else f"{placement.kind}: {held}"]
    if placement.streamed_layer_bytes:
        words.append(_cost(placement))
    if placement.predicted_peak_bytes is not None:
        words.append(
            f"predicted peak on {placement.device}: {size_words(placement.predicted_peak_bytes)} before replaying"
        )
    return "; ".join(words)


def _held(held: Held) -> str:
    layers = f"{held.layers} layer{'s' * (held.layers != 1)} ({size_words(held.weight_bytes)})"
    return f"{layers} {_PLACES.get(held.place, f'on {held.place}')}"


def _cost(placement: Placement) -> str:
    size, seconds = size_words(placement.streamed_layer_bytes), placement.seconds_per_layer
    how_often = f"for each of {placement.forward_calls} forward calls" if placement.forward_calls > 1 else "once"
    if seconds is None or placement.bytes_per_s is None:
        return f"a layer of {size} is read {how_often}, at a speed that is measured after the download"
    speed = f"{placement.bytes_per_s / 1e9:.1f} GB/s"
    return f"a layer of {size} is read {how_often}, in {seconds:.2g} s at the measured {speed}"
