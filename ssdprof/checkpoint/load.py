"""Fetches a checkpoint's files, checks them, and loads the model from them, on several devices if
it does not fit on one.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
import tempfile
import warnings
import weakref
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ssdprof.checkpoint import accelerate
from ssdprof.checkpoint.config import PICKLE
from ssdprof.checkpoint.hub import CONFIG, HubRepo, Source, TensorInfo, broken_file
from ssdprof.checkpoint.meta import (
    Destinations,
    destinations,
    missing,
    quiet_transformers,
    refusals,
)
from ssdprof.checkpoint.model import Model
from ssdprof.checkpoint.names import shown
from ssdprof.checkpoint.weights import FLOATS, INDEX, layer_index
from ssdprof.core.target import DECODED_ON_LOAD, Allocation
from ssdprof.core.words import size_words, words
from ssdprof.errors import BadInputError, MissingCapabilityError, ModelUnavailableError
from ssdprof.operators.late import lazy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

finegrained_fp8 = lazy("transformers.integrations.finegrained_fp8")
DType = torch.dtype | Literal["auto"]
StoredWeights = Mapping[str, TensorInfo]  # weights by their stored key
# renamings of stored keys that transformers does not know, and where each weight goes
Fit = tuple[dict[str, str], Destinations]
Device = int | str  # the index of a GPU, "cpu" or "disk"
DeviceMap = Mapping[str, Device]  # of each module and its submodules, by path
REWRITTEN = "rewritten"  # streamed weights that transformers converts
_HEAD = "lm_head.weight"
# heads of classifiers
_OTHER_HEAD = re.compile(r"(^|\.)(score|classifier|qa_outputs|v_head|value_head|summary)\.")
_MOST_COMPUTED = 1 << 24  # elements of tables, such as frequencies of positions
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_EXACT = ("F32", "F64")
# the first releases of GPTQ and AWQ described the quantisation in such a file, not in the config
_QUANTISERS = ("quantize_config.json", "quant_config.json")
# parameters that are computed in fp32 if a checkpoint of 16-bit weights stores them so
_OPERATOR_PARAMETERS = ("A_log", "D", "dt_bias")


@dataclass(eq=False)
class LocalCheckpoint:
    """A checkpoint on this machine, cut to its first decoder layers.

    folder: loads with stock transformers, except for the original format, which `load_model` reads.
    Its config names no remote code and no vision tower.  It is temporary and goes when this object
    does.
    empty: its model on the meta device, with the language-model head if that is part of it.
    fit: of its weights, and tensors: their headers; None for a pickle, which has no header.
    """

    model: Model
    folder: Path
    empty: PreTrainedModel
    fit: Fit | None
    tensors: StoredWeights | None = None


def fetch_tokenizer(model: Model) -> Source | None:
    """Download the tokenizer, which is small, so that an invalid prompt is found before the weights
    are downloaded.

    Its folder is for AutoTokenizer.  None if there is no tokenizer.  Raises what `fetch` raises.
    """
    source = model.tokenizer_source
    if source is not None:
        for name in source.tokenizer_files():
            source.path(name)
    return source


def fetch(
    model: Model,
    *,
    deepest_layer: int | None = None,
    head: bool = False,
    progress: Callable[[str], None] | None = None,
) -> LocalCheckpoint:
    """Download and check the files that layers 0 to `deepest_layer` need (all layers for None).

    head: with the language-model head.
    `progress` is called with one line before a download; the hub's client draws its bars on stderr.

    BadInputError: transformers cannot use the config, or the weights do not fit it, both of which
    are raised before any large download.
    ModelUnavailableError: a file is not available, is truncated or corrupt, or lacks weights that
    it should hold.
    MissingCapabilityError: no room for it on the disk, or no permission.
    """
    repo_id = model.source.label
    weights = model.part(deepest_layer, head=head)
    try:
        empty, fit = _check_fit(model, deepest_layer, head=head)
        folder = Path(tempfile.mkdtemp(prefix="ssdprof-"))
        local = LocalCheckpoint(model, folder, empty, fit)
        weakref.finalize(local, shutil.rmtree, local.folder, ignore_errors=True)
        config = model.load_config(weights.depth, model.dtype)
        # Infinities as the checkpoints write them
        (local.folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        files, size = check_space(model, deepest_layer, head=head)
        if files and progress is not None:
            progress(f"Downloading {files} files, {size_words(size)}, of {repo_id}")

        paths = {name: model.source.path(name) for name in weights.files}
        local.tensors = None if weights.pickled else weights.tensors
        for name, path in paths.items():
            target = local.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            # transformers would take the last copy of a tensor, whatever the index says
            if not weights.pickled and (misplaced := weights.misplaced(name)):
                _copy_without(path, misplaced, target)
            else:
                target.symlink_to(path.resolve())
        if weights.shards is not None:
            index = {"metadata": {}, "weight_map": weights.needed_shards}
            (local.folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    except OSError as error:
        raise MissingCapabilityError(
            f"The temporary folder for {repo_id} cannot be written: {error.strerror or error}.",
            "Make room there or set TMPDIR to another folder.",
        ) from None
    return local


def _copy_without(path: Path, left_out: set[str], target: Path) -> None:
    """Write the tensors of a safetensors file without some of them."""
    with safe_open(path, framework="pt", device="cpu") as opened:
        kept = sorted(set(opened.keys()) - left_out)
        tensors = {key: opened.get_tensor(key) for key in kept}
    save_file(tensors, target, metadata={"format": "pt"})


def check_space(
    model: Model, deepest_layer: int | None = None, *, head: bool = False
) -> tuple[int, int]:
    """The number of files that `fetch` would download, and their bytes.

    MissingCapabilityError unless the hub's cache has room for them.
    """
    to_download = [file for file in model.files(deepest_layer, head=head) if not file.cached]
    need = sum(file.size_bytes for file in to_download)
    if to_download and isinstance(model.source, HubRepo):
        model.source.check_space(need)
    return len(to_download), need


def check_fetch(model: Model, deepest_layer: int | None = None, *, head: bool = False) -> None:
    """Raise before a download what `fetch` and `load_model` would raise: no room, or weights that
    do not fit the config.

    If all files are here, loads the model on the meta device; else, and if it is quantised, reads
    the headers of its files only.
    """
    file_count, _ = check_space(model, deepest_layer, head=head)
    if file_count or model.quantization is not None:
        _check_fit(model, deepest_layer, head=head)
    else:
        load_model(fetch(model, deepest_layer=deepest_layer, head=head), device="meta")


def _check_fit(
    model: Model, deepest_layer: int | None, *, head: bool
) -> tuple[PreTrainedModel, Fit | None]:
    """The model on the meta device, and how the weights fit it by their headers; None for a pickle.
    Raises for a config that transformers cannot use, and for weights that do not fit it.
    """
    empty = model.cut_on_meta(deepest_layer=deepest_layer, head=head)
    weights = model.part(deepest_layer, head=head)
    if weights.pickled:
        return empty, None
    return empty, _fit(model, weights.tensors, empty)


# --- loading


def load_model(
    local: LocalCheckpoint,
    *,
    device: torch.device | str,
    dtype: DType = "auto",
    device_map: DeviceMap | None = None,
) -> PreTrainedModel:
    """The checkpoint's base model with the decoder layers of `local`, on `device`, in eval mode.

    With its language-model head if it was fetched with one.

    dtype: of the weights; "auto" takes the checkpoint's own.
    device_map: the place of every module, from `infer_devices`; None: `device`.  Weights on the
    disk
        are read from `local` as long as the model runs.

    BadInputError: a config that transformers refuses or that describes more than the weights hold,
    a pickle that holds more than tensors.  ModelUnavailableError: weights are missing.
    MissingCapabilityError: a package that decodes the quantisation is not installed.
    """
    device = torch.device(device)
    with quiet_transformers():
        # With a map, weights are moved to the GPU one by one, without a complete copy in host
        # memory.
        if device_map is not None:
            return _load(local, dtype, device_map).eval()
        everywhere = None if device.type == "cpu" else {"": device}
        return _load(local, dtype, everywhere).to(device).eval()


def _fit(model: Model, stored: StoredWeights, empty: PreTrainedModel) -> Fit:
    """The renamings with which the stored weights fit the model, and where each weight goes.

    empty: the model on the meta device.

    Raises, before anything is allocated, for a weight that is missing, of another shape or stored
    as codes, and for a config that describes more parameters than the weights hold.
    """
    label = model.source.label
    names = _renamings(model)
    places = destinations(empty, stored, names)
    if model.quantization not in (None, *DECODED_ON_LOAD):  # packed
        return names, places
    _refuse_classifier(label, stored, empty)
    lost = missing(empty, places)
    if lost and (wrappers := _wrappers(stored.keys() - places.keys(), empty)):
        names |= wrappers
        places = destinations(empty, stored, names)
        lost = missing(empty, places)
    _refuse_codes(model, stored, places.keys(), lost)
    _refuse_missing(model, lost, stored.keys() - places.keys())
    parameters = dict(empty.named_parameters(remove_duplicate=False))
    for key, (parameter_names, whole) in sorted(places.items()):
        parameter = parameters.get(parameter_names[0]) if whole else None
        if parameter is not None and list(parameter.shape) != stored[key].shape:
            raise _other_shape(label, key, stored[key].shape, parameter.shape)
    described = sum(parameter.numel() for parameter in empty.parameters())
    held = sum(tensor.parameter_count for tensor in stored.values())
    if described > held:
        raise BadInputError(
            f"The config of {label} describes {described} parameters in its first layers, "
            f"but the weights hold {held}.",
            "Config and weights do not belong together, or weights are missing.",
        )
    computed = sum(buffer.numel() for buffer in empty.buffers())
    if computed > _MOST_COMPUTED:
        raise BadInputError(
            f"The config of {label} describes tables of {computed} elements in addition to "
            "the weights.",
            "The config is damaged, most often in rope_parameters.",
        )
    return names, places


def _renamings(model: Model) -> dict[str, str]:
    """Renamings of stored keys that transformers does not know: ModelOpt's scales, and the
    embedding of the original Mamba-2 checkpoints.
    """
    names = {r"\.weight_scale$": ".weight_scale_inv"} if model.quantization == "fp8" else {}
    return names | ({r"\bembedding\.": "embeddings."} if model.model_type == "mamba2" else {})


def _refuse_codes(
    model: Model, stored: StoredWeights, known: Collection[str], lost: Iterable[str]
) -> None:
    """BadInputError for weights in integers or 8 bit and less, codes, without a scale or a
    quantisation.  What is no weight of the model may be stored in anything.

    known: stored keys of its parameters.  lost: parameters without one, whose codes may have
    another name.
    """
    modules = {_module(name) for name in lost}
    for name, tensor in stored.items():
        is_code = tensor.dtype not in FLOATS and not _is_scaled(model, name, stored)
        if not is_code or (name not in known and _module(name) not in modules):
            continue
        described = next((file for file in _QUANTISERS if file in model.source.sizes), None)
        if model.quantization:
            why = f"has no {model.quantization} scale for it"
        elif described:
            why = (
                f"its config names no quantisation; {described} does, in a format that ssdprof "
                "cannot load"
            )
        else:
            why = "its config names no quantisation"
        if described:
            hint = "Take the unquantised checkpoint."
        else:
            hint = (
                "Take the config.json that came with these weights, or the unquantised checkpoint."
            )
        raise BadInputError(
            f"{model.source.label} stores codes, such as {shown(name)} in {tensor.dtype}, and "
            f"{why}.",
            hint,
        )


def _is_scaled(model: Model, name: str, stored: StoredWeights) -> bool:
    """Whether `name` is a scale, or has one from which transformers decodes it."""
    if model.quantization is None:
        return False
    layer = name.removesuffix("weight")
    scales = {f"{name}_scale", f"{name}_scale_inv", f"{layer}scale", f"{layer}qscale_weight"}
    fit = any(
        stored[scale].shape in ([], [1]) or stored[scale].shape[1:]
        for scale in scales & stored.keys()
    )
    return "scale" in name or (fit and stored[name].dtype != "U8")


def _module(name: str) -> str:
    """What a parameter belongs to, from its layer on."""
    path = name.rpartition(".")[0]
    return path[max(path.find("layers."), 0) :]


def _refuse_classifier(label: str, keys: Iterable[str], empty: PreTrainedModel) -> None:
    """BadInputError for a head that predicts no tokens where the model needs one that does."""
    heads = [key for key in keys if _OTHER_HEAD.search(key)]
    predicts = any(key.endswith(_HEAD) for key in keys)
    if heads and not predicts and empty.get_output_embeddings() is not None:
        raise BadInputError(
            f"{label} is a classifier, with {shown(min(heads))} and no {_HEAD}: it predicts "
            "no tokens.",
            "Name a language model, or leave out what needs its predictions.",
        )


def _wrappers(keys: Iterable[str], model: PreTrainedModel) -> dict[str, str]:
    """Renamings without the names that wrappers put into keys: "_orig_mod" anywhere, and what is
    before the layers.

    keys: those that transformers leaves aside.
    """
    parameters = [name for name, _ in model.named_parameters()]
    known = set(".".join(parameters).split("."))
    most: Counter[str] = Counter()
    stripped = set()
    for key in keys:
        path = key.split(".")
        inside = [part for part in path[:-1] if part.startswith("_") and part not in known]
        most |= Counter(inside)
        stripped.add(".".join(part for part in path if part not in inside))
    # transformers applies a renaming once to each key; a comment makes a second one of it
    renamings: dict[str, str] = {}
    for part, times in most.items():
        renamings |= {rf"{re.escape(part)}\.(?#{number})": "" for number in range(times)}
    for name in parameters:
        before, layers, rest = name.partition("layers.")
        for key in stripped if layers and rest.startswith("0.") else ():
            prefix = key.removesuffix(layers + rest)
            if prefix not in (key, before):
                wrapper = prefix.removesuffix(before)
                return renamings | {
                    f"^{re.escape(wrapper)}": "" if prefix.endswith(before) else before
                }
    return renamings


def _load(
    local: LocalCheckpoint, dtype: DType, device_map: Mapping[str, int | str | torch.device] | None
) -> PreTrainedModel:
    """See `load_model`."""
    model = local.model
    empty = local.empty
    kind = type(empty)
    pickled = None
    stored = local.tensors
    if stored is None:
        pickled = _pickled(local)
        stored = {key: _described(tensor) for key, tensor in pickled.items()}
    key_mapping, places = local.fit or _fit(model, stored, empty)
    whole = {
        key: parameter_names[0] for key, (parameter_names, is_whole) in places.items() if is_whole
    }
    exact = [name for key, name in whole.items() if stored[key].dtype in _EXACT]
    gates = [name for name in exact if name.rpartition(".")[2] in _OPERATOR_PARAMETERS]
    try:
        with (
            refusals(f"config and weights of {model.source.label}"),
            _whole_blocks(),
            _in_fp32(kind, gates),
        ):
            loaded, info = kind.from_pretrained(
                local.folder if pickled is None else None,
                config=kind.config_class.from_pretrained(local.folder),
                state_dict=pickled,
                dtype=dtype,
                device_map=None if device_map is None else dict(device_map),
                offload_folder=local.folder / REWRITTEN,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, by name
                key_mapping=key_mapping or None,
            )
    except MissingCapabilityError as error:
        if model.quantization is not None:
            error.hint += "  Or take the unquantised checkpoint."
        raise
    _refuse_missing(model, info["missing_keys"], stored.keys() - places.keys())
    for name, shape, expected in sorted(info["mismatched_keys"]):
        raise _other_shape(model.source.label, name, shape, expected)
    return loaded


@contextmanager
def _in_fp32(kind: type[PreTrainedModel], names: Collection[str]) -> Iterator[None]:
    """Makes transformers load these parameters in fp32, wherever they are put: it would round them
    like the weights.
    """
    post_init = kind.post_init

    def with_fp32(model: PreTrainedModel) -> None:
        post_init(model)
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.data = parameter.data.float()

    kind.post_init = with_fp32
    try:
        yield
    finally:
        kind.post_init = post_init


@contextmanager
def _whole_blocks() -> Iterator[None]:
    """Fills up the last FP8 block, which may be cut off: transformers would take blocks of equal
    sizes instead.
    """
    kind = finegrained_fp8.Fp8Dequantize
    decode = kind._dequantize_one

    def decode_blocks(
        self: Any, codes: Tensor, scales: Tensor, *rest: object, **options: object
    ) -> object:
        """codes (rows, columns), scales (blocks of rows, blocks of columns) -> (rows, columns)."""
        block = self.hf_quantizer.quantization_config.weight_block_size
        rows, columns = codes.shape[-2:]
        if block is None or scales.ndim < 2 or codes.dtype not in _FP8:
            return decode(self, codes, scales, *rest, **options)
        missing = [-rows % block[0], -columns % block[1]]
        padded = torch.nn.functional.pad(codes.float(), (0, missing[1], 0, missing[0]))
        expected = padded.shape[-2] // block[0], padded.shape[-1] // block[1]
        if any(missing) and tuple(scales.shape[-2:]) != expected:
            raise ValueError(
                f"weight {rows, columns} is not a multiple of its scale grid "
                f"{tuple(scales.shape[-2:])}"
            )
        decoded = decode(self, padded if any(missing) else codes, scales, *rest, **options)
        return decoded[..., :rows, :columns].contiguous()

    kind._dequantize_one = decode_blocks
    try:
        yield
    finally:
        kind._dequantize_one = decode


def unpickled(path: Path) -> Any:
    """What torch.save wrote, on the CPU, nothing of it executed.  Raises errors of any class."""
    with zipfile.ZipFile(path) as archive:  # torch checks no checksums
        if damaged := archive.testzip():
            raise ValueError(f"the checksum of {damaged} differs")
    # memory-mapped, it would check no sizes
    return torch.load(path, map_location="cpu", weights_only=True)


def _pickled(local: LocalCheckpoint) -> dict[str, Tensor]:
    """The tables of floats in a pickle by stored name.  All other entries must be no weights of
    the model.
    """
    path = local.folder / PICKLE
    label = local.model.source.label
    try:
        content = unpickled(path)
    except pickle.UnpicklingError:
        raise BadInputError(
            f"{PICKLE} of {label} holds more than tensors and was not executed.",
            "Do not trust this checkpoint; take its safetensors revision, often --revision "
            "refs/pr/1.",
        ) from None
    except Exception as error:  # of any class: torch's reader checks little of what it reads
        raise broken_file(path.resolve(), PICKLE, error) from None
    entries = content if isinstance(content, dict) else {"": content}
    for name in entries:
        if not isinstance(name, str):
            raise BadInputError(
                f"{PICKLE} of {label} holds an entry {shown(name)}, which is no name of a weight.",
                "Save the model's state_dict(), or take another revision.",
            )
    weights = {name: entry for name, entry in entries.items() if _is_dense(entry)}
    others = sorted(entries.keys() - weights.keys())
    # entries that are no weights of the model are ignored, unless there is nothing else
    damaged = list(destinations(local.empty, others, _renamings(local.model)))
    if not weights and not damaged:
        damaged = others
    if damaged:
        raise BadInputError(
            f"{PICKLE} of {label} holds {shown(damaged[0])}, which is no table of floats.",
            "Save the model's state_dict(), fetch the checkpoint again, or take another revision.",
        )
    return weights


def _is_dense(entry: object) -> bool:
    """Whether it is a tensor of floats with values."""
    return (
        isinstance(entry, Tensor)
        and entry.layout == torch.strided
        and not entry.is_meta
        and entry.is_floating_point()
    )


def _described(tensor: Tensor) -> TensorInfo:
    """A tensor as the header of a safetensors file describes it."""
    names = {getattr(torch, name): code for code, name in FLOATS.items()}
    code = names.get(tensor.dtype, str(tensor.dtype))
    shape = list(tensor.shape)
    offsets = (0, tensor.nbytes)
    # a dtype that safetensors does not have is refused by name
    return TensorInfo(code, shape, offsets)  # type: ignore[arg-type]


def _refuse_missing(model: Model, lost: set[str], unused: Iterable[str]) -> None:
    """Raise for missing weights, which transformers would replace by random ones.

    unused: stored keys of no parameter.
    """
    label = model.source.label
    in_layers = [name for name in sorted(lost) if "layers." in name]
    for name, key in product(in_layers, sorted(unused)):
        if ".base_layer." in key and _wraps(key, name):
            why = "an adapter was not merged"
        elif _wraps(key, name):
            why = "it was saved in a wrapper"
        elif _place(key) == _place(name):
            why = "it has the names of another library or model type"
        else:
            continue
        raise BadInputError(
            f"{label} has {shown(key)}, not {name}: {why}.",
            "Save the model itself, by save_pretrained: merge the adapter, or save what the "
            "wrapper holds.",
        )
    if lost:
        which = f"{len(lost)} weights, such as {min(lost)}"
        if len(lost) == 1:
            which = f"{min(lost)} among its weights"
        error = ModelUnavailableError(
            f"{label} lacks {which}.",
            "The checkpoint is incomplete, or its config describes more than it holds; fetch it "
            "again or take another revision.",
        )
        if spare := model.weights.outside_index():
            error.hint = f"The index does not name {words(spare)}.  {error.hint}"
        raise error


def _wraps(key: str, name: str) -> bool:
    """Whether a stored key has the path of a parameter, from its layer on, and names besides:
    "model.layers.0.base_layer.norm" that of "layers.0.norm".
    """
    path = iter(key.split("."))  # each part is looked for behind the one before it
    return all(part in path for part in name[name.index("layers.") :].split("."))


def _place(name: str) -> tuple[list[str], str]:
    """What two libraries' names of one weight have in common: its numbers, and its last two
    parts.
    """
    path = name.casefold().split(".")
    return [part for part in path if part.isdecimal()], ".".join(path[-2:])


def _other_shape(
    label: str, name: str, stored: Iterable[int], expected: Iterable[int]
) -> BadInputError:
    return BadInputError(
        f"The weights of {label} do not fit its config: {shown(name)} is {tuple(stored)} in "
        f"the file and {tuple(expected)} by the config.",
        "Config and weights do not belong together.",
    )


# --- a device for each part of a model that does not fit on one device, by accelerate


def infer_devices(model: PreTrainedModel, room: Mapping[Device, int]) -> DeviceMap | None:
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
