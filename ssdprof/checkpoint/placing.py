"""Assigns the parts of a model to places, as accelerate's device map: GPUs, then main memory or the disk.

accelerate keeps decoder layers whole, and brings the weights of a module that lies elsewhere to the computing device
just before it runs.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Place = int | str  # the index of a GPU, "cpu" or "disk"
STREAMED = ("cpu", "disk")  # weights are stored there, and a GPU computes
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class DeviceMap:
    """places: the place of each module and its submodules, by path.

    main: the device of the first layers, which also computes the modules that are not on a GPU.
    """

    places: Mapping[str, Place]
    main: Place

    def place(self, name: str) -> Place:
        """Where the parameter `name` lies."""
        path = name
        while path not in self.places:
            path = path.rpartition(".")[0]
        return self.places[path]

    def streams(self, place: Place) -> bool:
        """Whether weights that lie at `place` are brought to `main` for each forward call."""
        return place in STREAMED and place != self.main


def infer(model: PreTrainedModel, room: Mapping[Place, int]) -> DeviceMap | None:
    """A map of `model`, on the meta device, that fills the places of `room` in order.

    room: bytes for weights.  The first is where the model begins; what finds no room goes to the disk if "disk" is a
    key, whose number is not read.
    None if there is too little room, or if the token embedding does not lie in the first place.
    """
    from accelerate import infer_auto_device_map

    main = next(iter(room))
    most = {place: size for place, size in room.items() if place != "disk"}
    if min(most.values()) < 0:
        return None
    kept_whole = sorted(model._no_split_modules or ())
    # Without a number for main memory, accelerate would take what the machine has.
    with warnings.catch_warnings(action="ignore"):  # of buffers of a few bytes
        found = infer_auto_device_map(model, max_memory={"cpu": 0} | most, no_split_module_classes=kept_whole)
    mapped = DeviceMap(dict(found), main)
    if "disk" in found.values() and "disk" not in room:
        return None
    embedding = next(name for name, one in model.named_modules() if one is model.get_input_embeddings())
    return mapped if mapped.place(f"{embedding}.weight") == main else None


def weights_by_place(model: PreTrainedModel, mapped: DeviceMap) -> dict[Place, tuple[int, int]]:
    """Decoder layers that begin at each place, and bytes of all weights there."""
    sizes: Counter[Place] = Counter()
    layers: dict[str, Place] = {}
    for name, parameter in model.named_parameters():
        place = mapped.place(name)
        sizes[place] += parameter.nbytes
        if layer := _LAYER.search(name):
            layers.setdefault(layer[1], place)
    counts = Counter(layers.values())
    return {place: (counts[place], size) for place, size in sizes.items()}


def largest_streamed(model: PreTrainedModel, mapped: DeviceMap) -> tuple[int, int]:
    """Bytes of the largest streamed decoder layer, and of the largest streamed module, which is in memory at once.

    accelerate brings a module's own weights, not those of the modules in it.
    """
    layers: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if mapped.streams(mapped.place(name)):
            layer = _LAYER.search(name)
            layers[layer[0] if layer else name] += parameter.nbytes
            modules[name.rpartition(".")[0]] += parameter.nbytes
    return max(layers.values(), default=0), max(modules.values(), default=0)
