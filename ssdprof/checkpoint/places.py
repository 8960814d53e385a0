"""A place for each part of a model that does not fit on one device, by accelerate."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ssdprof.checkpoint import accelerate
from ssdprof.checkpoint.weights import layer_index
from ssdprof.core.subject import Held

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Place = int | str  # the index of a GPU, "cpu" or "disk"
DeviceMap = Mapping[str, Place]  # of each module and its submodules, by path


def infer(model: PreTrainedModel, room: Mapping[Place, int]) -> DeviceMap | None:
    """A map of `model`, on the meta device, that fills the places of `room` in order.

    It is accelerate's: GPUs, then main memory or the disk.  Decoder layers stay whole.  It brings
    the weights of a module that lies elsewhere to the device of the first layers just before the
    module runs there.

    room: bytes for weights.  The first is where the model begins; what finds no room goes to the
    disk if "disk" is a key, whose number is not read.  None if there is too little room, or if the
    token embedding does not lie in the first place.
    """
    most = {place: size for place, size in room.items() if place != "disk"}
    if min(most.values()) < 0:
        return None
    kept_whole = sorted(model._no_split_modules or ())
    # Without a number for main memory, accelerate would take what the machine has.
    with warnings.catch_warnings(action="ignore"):  # of buffers of a few bytes
        places: dict[str, Place] = accelerate.infer_auto_device_map(
            model, max_memory={"cpu": 0} | most, no_split_module_classes=kept_whole
        )
    if "disk" in places.values() and "disk" not in room:
        return None
    embedding = next(
        name for name, part in model.named_modules() if part is model.get_input_embeddings()
    )
    return places if place_of(f"{embedding}.weight", places) == next(iter(room)) else None


def place_of(name: str, places: DeviceMap) -> Place:
    """Where the parameter `name` lies."""
    while name not in places:
        name = name.rpartition(".")[0]
    return places[name]


def weights_by_place(model: PreTrainedModel, places: DeviceMap) -> dict[Place, Held]:
    """What each place holds of a model."""
    sizes: Counter[Place] = Counter()
    layers: dict[int, Place] = {}
    for name, parameter in model.named_parameters():
        place = place_of(name, places)
        sizes[place] += parameter.nbytes
        if (index := layer_index(name)) is not None:
            layers.setdefault(index, place)
    counts = Counter(layers.values())
    return {place: Held(layers=counts[place], bytes=size) for place, size in sizes.items()}


def largest_streamed(model: PreTrainedModel, places: DeviceMap, main: Place) -> tuple[int, int]:
    """Bytes of the largest streamed decoder layer, and of the largest streamed module, which is in
    memory at once.

    accelerate brings a module's own weights, not those of the modules in it.
    main: the device of the first layers, which also computes the modules that are not on a GPU.
    """
    layers: Counter[object] = Counter()
    modules: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        # brought to `main` for each forward call
        if place_of(name, places) in {"cpu", "disk"} - {main}:
            index = layer_index(name)
            layers[name if index is None else index] += parameter.nbytes
            modules[name.rpartition(".")[0]] += parameter.nbytes
    return max(layers.values(), default=0), max(modules.values(), default=0)
