"""Fetches a checkpoint's files, checks them, and loads the model from them."""

from __future__ import annotations

import json
import math
import pickle
import re
import shutil
import tempfile
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

from ssdprof.checkpoint.config import PICKLE
from ssdprof.checkpoint.hub import CONFIG, HubRepo, Source, TensorInfo, broken_file
from ssdprof.checkpoint.meta import (
    Destination,
    build,
    destinations,
    missing,
    quiet_transformers,
    refusals,
)
from ssdprof.checkpoint.model import Model
from ssdprof.checkpoint.names import shown
from ssdprof.checkpoint.weights import INDEX
from ssdprof.core.target import DECODED_ON_LOAD, CheckpointRef
from ssdprof.core.words import size_words, words
from ssdprof.errors import BadInputError, MissingCapabilityError, ModelUnavailableError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DType = torch.dtype | Literal["auto"]
Shapes = Mapping[str, tuple[int, ...]]  # by stored key
REWRITTEN = "rewritten"  # streamed weights that transformers converts
_HEAD = "lm_head.weight"
# of classifiers
_OTHER_HEAD = re.compile(r"(^|\.)(score|classifier|qa_outputs|v_head|value_head|summary)\.")
_MOST_COMPUTED = 1 << 24  # elements of tables, such as frequencies of positions
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_EXACT = ("F32", "F64")
# are computed in fp32 if they are stored so in a checkpoint of 16-bit weights
_OPERATOR_PARAMETERS = ("A_log", "D", "dt_bias")


@dataclass(eq=False)
class LocalCheckpoint:
    """A checkpoint on this machine, cut to its first `depth` decoder layers.

    folder: loads with stock transformers, except for the original format, which `load_model` reads.
    Its config names no remote code and no vision tower.  It is temporary and goes when this object
    does.
    head: whether the language-model head is part of it.
    tensors: the needed weights as stored, by name; None for a pickle, which has no header.
    spare: files of weights that the index does not name.
    """

    ref: CheckpointRef
    folder: Path
    depth: int
    head: bool = False
    tensors: dict[str, TensorInfo] | None = None
    spare: tuple[str, ...] = ()


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

    BadInputError: transformers cannot use the config, which is raised before any large download; or
    the weights are codes, and the config names no quantisation.
    ModelUnavailableError: a file is not available, is truncated or corrupt, or lacks weights that
    it should hold.
    MissingCapabilityError: no room for it on the disk, or no permission.
    """
    depth, repo_id, weights = model.depth(deepest_layer), model.source.label, model.weights
    try:
        local = LocalCheckpoint(model.ref, Path(tempfile.mkdtemp(prefix="ssdprof-")), depth, head)
        weakref.finalize(local, shutil.rmtree, local.folder, ignore_errors=True)
        config = model.load_config(depth, model.dtype)
        # Infinities as the checkpoints write them
        (local.folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        build(config, repo_id)  # refuse an unusable config before the download
        files, size = check_space(model, deepest_layer, head=head)
        if files and progress is not None:
            progress(f"Downloading {files} files, {size_words(size)}, of {repo_id}")

        paths = {name: model.source.path(name) for name in weights.files(depth, head=head)}
        local.tensors = None if weights.pickled else weights.tensors(depth, head=head)
        local.spare = weights.outside_index()
        model.refuse_codes(deepest_layer, head=head)
        for name, path in paths.items():
            target = local.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            # transformers would take the last copy of a tensor, whatever the index says
            if not weights.pickled and (misplaced := weights.misplaced(name)):
                _copy_without(path, misplaced, target)
            else:
                target.symlink_to(path.resolve())
        if weights.shards is not None:
            index = {"metadata": {}, "weight_map": weights.needed_shards(depth, head=head)}
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
    missing = [file for file in model.files(deepest_layer, head=head) if not file.cached]
    need = sum(file.size_bytes for file in missing)
    if missing and isinstance(model.source, HubRepo):
        model.source.check_space(need)
    return len(missing), need


def check_fetch(model: Model, deepest_layer: int | None = None, *, head: bool = False) -> None:
    """Raise in advance what `fetch` and `load_model` raise without room, or for weights that do not
    fit the config.

    What is here already is loaded, without its values.
    """
    missing, _ = check_space(model, deepest_layer, head=head)
    if not missing and model.quantization is None:
        load_model(fetch(model, deepest_layer=deepest_layer, head=head), device="meta")
    elif not model.weights.pickled:
        empty = model.cut_on_meta(deepest_layer=deepest_layer, head=head)
        tensors = model.weights.tensors(model.depth(deepest_layer), head=head)
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        _fit(model.ref, shapes, empty, model.weights.outside_index())


# --- loading


def load_model(
    local: LocalCheckpoint,
    *,
    device: torch.device | str,
    dtype: DType = "auto",
    device_map: Mapping[str, int | str] | None = None,
) -> PreTrainedModel:
    """The checkpoint's base model with its first `local.depth` decoder layers, on `device`, in eval
    mode.

    With its language-model head if it was fetched with one.

    dtype: of the weights; "auto" takes the checkpoint's own.
    device_map: the place of every module, from `devices.infer`; None: `device`.  Weights on the
    disk
        are read from `local` as long as the model runs.

    BadInputError: a config that transformers refuses or that describes more than the weights hold,
    a pickle that holds more than tensors.  ModelUnavailableError: weights are missing.
    MissingCapabilityError: a package that decodes the quantisation is not installed.
    """
    device = torch.device(device)
    with quiet_transformers():
        empty = build(
            json.loads((local.folder / CONFIG).read_bytes()), local.ref.repo_id, head=local.head
        )
        # With a map, weights are moved to the GPU one by one, without a complete copy in host
        # memory.
        if device_map is not None:
            return _load(local, empty, dtype, device_map).eval()
        everywhere = None if device.type == "cpu" else {"": device}
        return _load(local, empty, dtype, everywhere).to(device).eval()


def _fit(
    ref: CheckpointRef, shapes: Shapes, empty: PreTrainedModel, spare: tuple[str, ...]
) -> tuple[dict[str, str], dict[str, Destination]]:
    """Renamings of stored keys that transformers does not know, and where each weight goes.

    shapes: of the stored weights.  empty: the model on the meta device.  spare: files of weights
    that are not read.

    Raises, before anything is allocated, for a weight that is missing or of another shape, and for
    a config that describes more parameters than the weights hold.
    """
    names = _renamings(ref)
    places = destinations(empty, shapes, names)
    if ref.quantization not in (None, *DECODED_ON_LOAD):  # packed
        return names, places
    _refuse_classifier(ref, shapes, empty)
    lost = missing(empty, places)
    if lost and (wrappers := _wrappers(shapes.keys() - places.keys(), empty)):
        names |= wrappers
        places = destinations(empty, shapes, names)
        lost = missing(empty, places)
    _refuse_missing(ref, lost, shapes.keys() - places.keys(), spare)
    parameters = dict(empty.named_parameters(remove_duplicate=False))
    for key, place in sorted(places.items()):
        parameter = parameters.get(place.names[0]) if place.whole else None
        if parameter is not None and tuple(parameter.shape) != shapes[key]:
            raise _other_shape(ref, key, shapes[key], parameter.shape)
    described = sum(parameter.numel() for parameter in empty.parameters())
    stored = sum(math.prod(shape) for shape in shapes.values())
    if described > stored:
        raise BadInputError(
            f"The config of {ref.repo_id} describes {described} parameters in its first layers, "
            f"but the weights hold {stored}.",
            "Config and weights do not belong together, or weights are missing.",
        )
    computed = sum(buffer.numel() for buffer in empty.buffers())
    if computed > _MOST_COMPUTED:
        raise BadInputError(
            f"The config of {ref.repo_id} describes tables of {computed} elements in addition to "
            "the weights.",
            "The config is damaged, most often in rope_parameters.",
        )
    return names, places


def _renamings(ref: CheckpointRef) -> dict[str, str]:
    """For keys that transformers does not know: ModelOpt's scales, the original embedding."""
    names = {r"\.weight_scale$": ".weight_scale_inv"} if ref.quantization == "fp8" else {}
    return names | ({r"\bembedding\.": "embeddings."} if ref.model_type == "mamba2" else {})


def _refuse_classifier(ref: CheckpointRef, keys: Iterable[str], empty: PreTrainedModel) -> None:
    """BadInputError for a head that predicts no tokens where the model needs one that does."""
    heads = [key for key in keys if _OTHER_HEAD.search(key)]
    predicts = any(key.endswith(_HEAD) for key in keys)
    if heads and not predicts and empty.get_output_embeddings() is not None:
        raise BadInputError(
            f"{ref.repo_id} is a classifier, with {shown(min(heads))} and no {_HEAD}: it predicts "
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
    local: LocalCheckpoint,
    empty: PreTrainedModel,
    dtype: DType,
    device_map: Mapping[str, int | str | torch.device] | None,
) -> PreTrainedModel:
    """empty: the model on the meta device."""
    kind = type(empty)
    pickled = _pickled(local, empty) if local.tensors is None else None
    shapes = {key: tuple(tensor.shape) for key, tensor in (pickled or local.tensors or {}).items()}
    key_mapping, places = _fit(local.ref, shapes, empty, local.spare)
    if pickled is None:
        exact = {key for key, tensor in (local.tensors or {}).items() if tensor.dtype in _EXACT}
    else:
        exact = {key for key, tensor in pickled.items() if tensor.dtype.itemsize > 2}
    whole = [places[key].names[0] for key in exact & places.keys() if places[key].whole]
    gates = [name for name in whole if name.rpartition(".")[2] in _OPERATOR_PARAMETERS]
    try:
        with (
            refusals(f"config and weights of {local.ref.repo_id}"),
            _whole_blocks(),
            _in_fp32(kind, gates),
        ):
            model, info = kind.from_pretrained(
                local.folder if pickled is None else None,
                config=kind.config_class.from_pretrained(local.folder),
                state_dict=None if pickled is None else dict(pickled),
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
        if local.ref.quantization is not None:
            error.hint += "  Or take the unquantised checkpoint."
        raise
    _refuse_missing(local.ref, info["missing_keys"], shapes.keys() - places.keys(), local.spare)
    for name, stored, expected in sorted(info["mismatched_keys"]):
        raise _other_shape(local.ref, name, stored, expected)
    return model


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
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    decode = Fp8Dequantize._dequantize_one

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

    Fp8Dequantize._dequantize_one = decode_blocks
    try:
        yield
    finally:
        Fp8Dequantize._dequantize_one = decode


def unpickled(path: Path) -> Any:
    """What torch.save wrote, on the CPU, nothing of it executed.  Raises errors of any class."""
    with zipfile.ZipFile(path) as archive:  # torch checks no checksums
        if damaged := archive.testzip():
            raise ValueError(f"the checksum of {damaged} differs")
    # memory-mapped, it would check no sizes
    return torch.load(path, map_location="cpu", weights_only=True)


def _pickled(local: LocalCheckpoint, empty: PreTrainedModel) -> dict[str, Tensor]:
    """The tables of floats in a pickle by stored name.  All other entries must be no weights of
    the model `empty`.
    """
    path = local.folder / PICKLE
    try:
        content = unpickled(path)
    except pickle.UnpicklingError:
        raise BadInputError(
            f"{PICKLE} of {local.ref.repo_id} holds more than tensors and was not executed.",
            "Do not trust this checkpoint; take its safetensors revision, often --revision "
            "refs/pr/1.",
        ) from None
    except Exception as error:  # of any class: torch's reader checks little of what it reads
        raise broken_file(path.resolve(), PICKLE, error) from None
    entries = content if isinstance(content, dict) else {"": content}
    for name in entries:
        if not isinstance(name, str):
            raise BadInputError(
                f"{PICKLE} of {local.ref.repo_id} holds an entry {shown(name)}, which is no name "
                "of a weight.",
                "Save the model's state_dict(), or take another revision.",
            )
    weights = {name: entry for name, entry in entries.items() if _is_dense(entry)}
    others = sorted(entries.keys() - weights.keys())
    if damaged := [*destinations(empty, others, _renamings(local.ref))] or (
        [] if weights else others
    ):
        raise BadInputError(
            f"{PICKLE} of {local.ref.repo_id} holds {shown(damaged[0])}, which is no table of "
            "floats.",
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


def _refuse_missing(
    ref: CheckpointRef, lost: set[str], unused: Iterable[str], spare: tuple[str, ...]
) -> None:
    """Raise for missing weights, which transformers would replace by random ones.

    unused: stored keys of no parameter.  spare: files that are not read.
    """
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
            f"{ref.repo_id} has {shown(key)}, not {name}: {why}.",
            "Save the model itself, by save_pretrained: merge the adapter, or save what the "
            "wrapper holds.",
        )
    if lost:
        which = f"{len(lost)} weights, such as {min(lost)}"
        if len(lost) == 1:
            which = f"{min(lost)} among its weights"
        error = ModelUnavailableError(
            f"{ref.repo_id} lacks {which}.",
            "The checkpoint is incomplete, or its config describes more than it holds; fetch it "
            "again or take another revision.",
        )
        if spare:
            error.hint = f"The index does not name {words(spare)}.  {error.hint}"
        raise error


def _wraps(key: str, name: str) -> bool:
    """Whether a stored key has the path of a parameter, from its layer on, and names besides."""
    path = iter(key.split("."))
    return all(part in path for part in name[name.index("layers.") :].split("."))


def _place(name: str) -> tuple[list[str], str]:
    """What stays of a name in any library: its numbers, and its last two parts."""
    path = name.casefold().split(".")
    return [part for part in path if part.isdecimal()], ".".join(path[-2:])


def _other_shape(
    ref: CheckpointRef, name: str, stored: Iterable[int], expected: Iterable[int]
) -> BadInputError:
    return BadInputError(
        f"The weights of {ref.repo_id} do not fit its config: {shown(name)} is {tuple(stored)} in "
        f"the file and {tuple(expected)} by the config.",
        "Config and weights do not belong together.",
    )
