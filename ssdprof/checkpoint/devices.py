"""A device for each part of a model that does not fit on one device, by accelerate."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ssdprof.checkpoint import accelerate
from ssdprof.checkpoint.weights import layer_index
from ssdprof.core.target import Allocation

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Device = int | str  # the index of a GPU, "cpu" or "disk"
DeviceMap = Mapping[str, Device]  # of each module and its submodules, by path


def infer(model: PreTrainedModel, room: Mapping[Device, int]) -> DeviceMap | None:
    """A map of `model`, on the meta device, that fills the devices of `room` in order.

    It is accelerate's: GPUs, then main memory or the disk.  Decoder layers stay whole.  It brings
    the weights of a module that lies elsewhere to the device of the first layers just before the
    module runs there.

    room: bytes for weights.  The first is where the model begins; what finds no room goes to the
    disk if "disk" is a key, whose number is not read.  None if there is too little room, or if the
    token embedding does not lie in the first one.
    """
    most = {device: size for device, size in room.items() if device != "disk"}
    if min(most.values()) < 0:
        return None
    kept_whole = sorted(model._no_split_modules or ())
    # Without a number for main memory, accelerate would take what the machine has.
    with warnings.catch_warnings(action="ignore"):  # of buffers of a few bytes
        devices: dict[str, Device] = accelerate.infer_auto_device_map(
            model, max_memory={"cpu": 0} | most, no_split_module_classes=kept_whole
        )
    if "disk" in devices.values() and "disk" not in room:
        return None
    embedding = next(
        name for name, part in model.named_modules() if part is model.get_input_embeddings()
    )
    return devices if device_of(f"{embedding}.weight", devices) == next(iter(room)) else None


def device_of(name: str, devices: DeviceMap) -> Device:
    """Where the parameter `name` lies."""
    while name not in devices:
        name = name.rpartition(".")[0]
    return devices[name]


def weights_by_device(model: PreTrainedModel, devices: DeviceMap) -> dict[Device, Allocation]:
    """What each device holds of a model."""
    sizes: Counter[Device] = Counter()
    layers: dict[int, Device] = {}
    for name, parameter in model.named_parameters():
        device = device_of(name, devices)
        sizes[device] += parameter.nbytes
        if (index := layer_index(name)) is not None:
            layers.setdefault(index, device)
    counts = Counter(layers.values())
    return {device: Allocation(layers=counts[device], bytes=size) for device, size in sizes.items()}


def largest_streamed(model: PreTrainedModel, devices: DeviceMap, main: Device) -> tuple[int, int]:
    """Bytes of the largest streamed decoder layer, and of the largest streamed module, which is in
    memory at once.

    accelerate brings a module's own weights, not those of the modules in it.
    main: the device of the first layers, which also computes the modules that are not on a GPU.
    """
    layers: Counter[object] = Counter()
    modules: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        # brought to `main` for each forward call
        if device_of(name, devices) in {"cpu", "disk"} - {main}:
            index = layer_index(name)
            layers[name if index is None else index] += parameter.nbytes
            modules[name.rpartition(".")[0]] += parameter.nbytes
    return max(layers.values(), default=0), max(modules.values(), default=0)
