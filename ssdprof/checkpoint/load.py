"""Fetches a checkpoint's files, checks them, and loads the model from them, on one device or
several.
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
from statistics import multimode
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError, safe_open
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
from ssdprof.core.base import grouped
from ssdprof.core.target import DECODED_ON_LOAD, Allocation
from ssdprof.core.words import size_words, words
from ssdprof.errors import BadInputError, MissingCapabilityError, ModelUnavailableError
from ssdprof.files import why
from ssdprof.operators.late import lazy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

finegrained_fp8 = lazy("transformers.integrations.finegrained_fp8")
DType = torch.dtype | Literal["auto"]
StoredWeights = Mapping[str, TensorInfo]  # stored key -> description of the tensor
# How stored weights fit a model: renamings that transformers does not know, as its `key_mapping`
# takes them (pattern of a stored key -> replacement), and the parameters to which each key
# contributes.
Fit = tuple[dict[str, str], Destinations]
Device = int | str  # the index of a GPU, "cpu" or "disk"
DeviceMap = Mapping[str, Device]  # path of a module -> the device of it and its submodules
REWRITTEN = "rewritten"  # folder of streamed weights that transformers has converted
_HEAD = "lm_head.weight"
# keys of heads that predict no tokens
_OTHER_HEAD = re.compile(r"(^|\.)(score|classifier|qa_outputs|v_head|value_head|summary)\.")
# The most elements of computed tables, such as frequencies of positions, together: a damaged config
# can make them fill the memory.  Real ones have a few thousand elements.
_MOST_COMPUTED = 1 << 24
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_EXACT = ("F32", "F64")  # dtypes in safetensors with at least the precision of fp32
# files in which the first releases of GPTQ and AWQ described the quantisation
_QUANTISERS = ("quantize_config.json", "quant_config.json")
# Parameters of the operators.  If they are stored in fp32 or fp64, they are loaded in fp32, in
# whatever dtype the other weights are.
_OPERATOR_PARAMETERS = ("A_log", "D", "dt_bias")


@dataclass(eq=False)
class LocalCheckpoint:
    """A checkpoint on this machine, cut to its first decoder layers.

    folder: a temporary folder, from which `load_model` loads the model, and which is deleted with
        this object.  Its config names no remote code and no vision tower.
    empty: `model` cut to these layers, on the meta device, with the language-model head if that was
        fetched.
    fit: how the weights fit the model; None for a pickle, which has no header.
    tensors: descriptions of the weights, from the headers; None for a pickle.
    """

    model: Model
    folder: Path
    empty: PreTrainedModel
    fit: Fit | None
    tensors: StoredWeights | None = None


def fetch_tokenizer(model: Model) -> Source | None:
    """Download the tokenizer.  Returns its files, whose folder AutoTokenizer can load; None if
    `Model.tokenizer_source` is None.

    It is small, and with it an invalid prompt is found before the weights are downloaded.
    Raises what `Model.tokenizer_source` and `Source.path` raise.
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
    """Download and check the files that layers 0 to `deepest_layer` need.

    deepest_layer: None: all layers.  head: also the language-model head.
    progress: called with one line if something must be downloaded, before that; the hub's client
        draws its bars on stderr.

    Raises BadInputError if transformers cannot use the config, or if the weights do not fit it.
    Both are checked before any large download.  How buffers, a pickle, and quantised weights that
    transformers does not decode on loading fit, `load_model` checks.
    Raises ModelUnavailableError if a file is not available, is truncated or corrupt, or lacks
    weights that it should have.
    Raises MissingCapabilityError if the disk has no room, if a file may not be read or written, or
    if transformers cannot load the quantisation on this machine.
    """
    repo_id = model.source.label
    weights = model.part(deepest_layer, head=head)
    try:
        empty, fit = _check_fit(model, deepest_layer, head=head)
        folder = Path(tempfile.mkdtemp(prefix="ssdprof-"))
        local = LocalCheckpoint(model, folder, empty, fit)
        weakref.finalize(local, shutil.rmtree, local.folder, ignore_errors=True)
        config = model.load_config(weights.depth, model.dtype)
        # json writes an infinity as Infinity, as the configs of checkpoints have it
        (local.folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        file_count, size = check_space(model, deepest_layer, head=head)
        if file_count and progress is not None:
            progress(f"Downloading {file_count} files, {size_words(size)}, of {repo_id}")

        for name in weights.files:
            path = model.source.path(name)
            target = local.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            # transformers would take the last copy of a tensor, whatever the index says
            misplaced = weights.misplaced(name)
            if misplaced:
                _copy_without(path, misplaced, target)
            else:
                target.symlink_to(path.resolve())
        local.tensors = None if weights.pickled else weights.tensors
        if weights.shards is not None:
            index = {"metadata": {}, "weight_map": weights.needed_shards}
            (local.folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise MissingCapabilityError(
            f"The temporary folder for {repo_id} cannot be written: {why(error)}.",
            "Make room there or set TMPDIR to another folder.",
        ) from None
    return local


def _copy_without(path: Path, left_out: set[str], target: Path) -> None:
    """Copy a safetensors file without the tensors in `left_out`.

    Raises OSError or SafetensorError if the copy cannot be written.
    """
    with safe_open(path, framework="pt", device="cpu") as opened:
        kept = sorted(set(opened.keys()) - left_out)
        tensors = {key: opened.get_tensor(key) for key in kept}
    save_file(tensors, target, metadata={"format": "pt"})


def check_space(
    model: Model, deepest_layer: int | None = None, *, head: bool = False
) -> tuple[int, int]:
    """The number of files that `fetch` and `fetch_tokenizer` would download, and their bytes.

    Raises MissingCapabilityError unless the hub's cache has room for them.  For a local folder,
    whose tokenizer may be on the hub, the room is not checked.
    """
    to_download = [file for file in model.files(deepest_layer, head=head) if not file.cached]
    need_bytes = sum(file.size_bytes for file in to_download)
    if to_download and isinstance(model.source, HubRepo):
        model.source.check_space(need_bytes)
    return len(to_download), need_bytes


def check_fetch(model: Model, deepest_layer: int | None = None, *, head: bool = False) -> None:
    """Raise, before a download, the error of `fetch` or `load_model` for too little room in the
    hub's cache, or for weights that do not fit the config.

    If all files of `Model.files` are on this machine, the model is loaded on the meta device.  If
    one is not, or the weights are quantised, only the headers are read.  Then the weights of a
    pickle, and of a quantisation outside of `DECODED_ON_LOAD`, are not compared with the config.
    """
    file_count, _ = check_space(model, deepest_layer, head=head)
    if file_count or model.quantization is not None:
        _check_fit(model, deepest_layer, head=head)
    else:
        load_model(fetch(model, deepest_layer=deepest_layer, head=head), device="meta")


def _check_fit(
    model: Model, deepest_layer: int | None, *, head: bool
) -> tuple[PreTrainedModel, Fit | None]:
    """The model on the meta device, and how the weights fit it by their headers; None instead of
    the latter for a pickle.

    Raises the error of `fetch` for a config that transformers cannot use, and for weights that do
    not fit it.
    """
    empty = model.cut_on_meta(deepest_layer=deepest_layer, head=head)
    weights = model.part(deepest_layer, head=head)
    return empty, None if weights.pickled else _fit(model, weights.tensors, empty)


# --- loading


def load_model(
    local: LocalCheckpoint,
    *,
    device: torch.device | str,
    dtype: DType = "auto",
    device_map: DeviceMap | None = None,
) -> PreTrainedModel:
    """The checkpoint's base model with the decoder layers of `local`, on `device`, in eval mode;
    with its language-model head if that was fetched.

    dtype: the dtype of the weights; "auto": the checkpoint's own.  The operator's A_log, D and
        dt_bias are in fp32 nevertheless if they are stored in fp32 or fp64.
    device_map: the device of every module, from `infer_devices`; None: `device`.  Weights on the
        disk are read from `local` as long as the model runs.

    Raises BadInputError for a config that transformers refuses, for weights that do not fit it, and
    for a pickle with other objects than tensors.
    Raises ModelUnavailableError if weights are missing or a pickle is damaged, and
    MissingCapabilityError if a package that decodes the quantisation is not installed or the memory
    is full.
    """
    device = torch.device(device)
    with quiet_transformers():
        if device_map is not None:
            return _load(local, dtype, device_map).eval()
        # With a map, weights are moved to the GPU one by one, without a complete copy in main
        # memory.
        one_device = None if device.type == "cpu" else {"": device}
        return _load(local, dtype, one_device).to(device).eval()


def _fit(model: Model, stored: StoredWeights, empty: PreTrainedModel) -> Fit:
    """How the stored weights fit the model.  empty: the model on the meta device.

    Raises, before anything is allocated, an error for a weight that is missing, stored twice or
    stored as codes, for one that becomes a parameter as it is and has another shape, for a config
    that describes more parameters than there are weights, and for one that describes huge tables.
    The weights of a quantisation outside of `DECODED_ON_LOAD` are not checked.
    """
    label = model.source.label
    renamings = _renamings(model)
    places = destinations(empty, stored, renamings)
    if model.quantization not in (None, *DECODED_ON_LOAD):
        return renamings, places  # packed weights have other shapes, and no dtype of their own
    _refuse_classifier(label, stored, empty)
    lost = missing(empty, places)
    if lost and (wrappers := _wrappers(stored.keys() - places.keys(), lost, empty)):
        renamings |= wrappers
        places = destinations(empty, stored, renamings)
        lost = missing(empty, places)
    decoded = {}
    if model.quantization is not None:
        decoded = destinations(empty, stored, renamings, decoded=True)
    _refuse_codes(model, stored, places, lost, decoded)
    _refuse_missing(model, lost, stored.keys() - places.keys())
    parameters = dict(empty.named_parameters(remove_duplicate=False))
    key_of: dict[str, str] = {}  # name of a parameter -> key of the weight that it becomes as it is
    for key, (parameter_names, is_whole) in sorted(places.items()):
        if not is_whole:
            continue
        name = parameter_names[0]
        if name in key_of:
            raise BadInputError(
                f"{label} has two weights for {name}: {shown(key_of[name])} and {shown(key)}.",
                "Remove the one that is not meant, or take another revision.",
            )
        key_of[name] = key
        if name in parameters and list(parameters[name].shape) != stored[key].shape:
            raise _other_shape(label, key, stored[key].shape, parameters[name].shape)
    described = sum(parameter.numel() for parameter in empty.parameters())
    stored_count = sum(tensor.parameter_count for tensor in stored.values())
    if described > stored_count:
        raise BadInputError(
            f"The config of {label} describes {described} parameters in its first layers, "
            f"but the weights hold {stored_count}.",
            "Config and weights do not belong together, or weights are missing.",
        )
    computed = sum(buffer.numel() for buffer in empty.buffers())
    if computed > _MOST_COMPUTED:
        raise BadInputError(
            f"The config of {label} describes tables of {computed} elements in addition to "
            "the weights.",
            "The config is damaged, most often in rope_parameters.",
        )
    return renamings, places


def _renamings(model: Model) -> dict[str, str]:
    """Renamings of stored keys that transformers does not know: scales as ModelOpt names them, and
    the embedding of the original Mamba-2 checkpoints.
    """
    renamings: dict[str, str] = {}
    if model.quantization in DECODED_ON_LOAD:
        renamings[r"\.weight_scale$"] = ".weight_scale_inv"
    if model.model_type == "mamba2":
        renamings[r"\bembedding\."] = "embeddings."
    return renamings


def _refuse_codes(
    model: Model,
    stored: StoredWeights,
    places: Destinations,
    lost: Iterable[str],
    decoded: Destinations,
) -> None:
    """BadInputError for weights that are stored as codes, in integers or in 8 bits and less, if no
    scale or no quantisation says how to decode them.

    Tensors that are no weights of the model may have any dtype.
    places: the destinations of stored weights.  lost: names of parameters without a stored key;
    codes in the module of one are taken for it, because they may have another name.
    decoded: the destinations of weights and scales that transformers decodes; empty without a
    quantisation.
    """
    modules = {_module(name) for name in lost}
    for name, tensor in stored.items():
        is_code = tensor.dtype not in FLOATS and not _is_scaled(name, stored, decoded)
        if is_code and (name in places or _module(name) in modules):
            raise _undecodable(model, name, tensor.dtype)


def _undecodable(model: Model, name: str, dtype: str) -> BadInputError:
    """The error for a weight that is stored as codes.  dtype: its dtype in safetensors."""
    quantisers = [file for file in _QUANTISERS if file in model.source.sizes]
    reason = "its config names no quantisation"
    if model.quantization:
        reason = f"has no {model.quantization} scale with which transformers decodes it"
    elif quantisers:
        reason += f"; {quantisers[0]} does, in a format that ssdprof cannot load"
    hint = "Take the config.json that came with these weights, or the unquantised checkpoint."
    if quantisers:
        hint = "Take the unquantised checkpoint."
    return BadInputError(
        f"{model.source.label} stores codes, such as {shown(name)} in {dtype}, and {reason}.", hint
    )


def _is_scaled(name: str, stored: StoredWeights, decoded: Destinations) -> bool:
    """Whether the tensor `name` is a scale, or has one with which transformers decodes it.

    decoded: see `_refuse_codes`.
    """
    if name not in decoded:
        return False
    if "scale" in name:
        return True
    layer = name.removesuffix("weight")
    scales = {f"{name}_scale", f"{name}_scale_inv", f"{layer}scale", f"{layer}qscale_weight"}
    # transformers may rename the weight only.  Then it takes the codes as values.
    shapes = [
        stored[scale].shape
        for scale in scales & decoded.keys()
        if decoded[scale][0] == decoded[name][0]
    ]
    # One scale for the tensor, or a matrix with one for each block.  transformers would misread a
    # vector with one for each row, and take codes in U8 as values.
    has_scale = any(shape in ([], [1]) or len(shape) > 1 for shape in shapes)
    return has_scale and stored[name].dtype != "U8"


def _module(name: str) -> str:
    """The path of the module to which a parameter belongs, from "layers." on if that is in it."""
    path = name.rpartition(".")[0]
    return path[max(path.find("layers."), 0) :]


def _refuse_classifier(label: str, keys: Iterable[str], empty: PreTrainedModel) -> None:
    """BadInputError if the model has a language-model head, and the checkpoint has only a head that
    predicts no tokens.

    keys: the stored keys.  empty: the model on the meta device.
    """
    heads = [key for key in keys if _OTHER_HEAD.search(key)]
    predicts = any(key.endswith(_HEAD) for key in keys)
    if heads and not predicts and empty.get_output_embeddings() is not None:
        raise BadInputError(
            f"{label} is a classifier, with {shown(min(heads))} and no {_HEAD}: it predicts "
            "no tokens.",
            "Name a language model, or leave out what needs its predictions.",
        )


def _wrappers(keys: Iterable[str], lost: set[str], model: PreTrainedModel) -> dict[str, str]:
    """Renamings that remove the names that wrappers of a model have put into stored keys.

    Such names are "_orig_mod" and the like, anywhere in a key, and a prefix before the layers.
    keys: the stored keys that transformers ignores.  lost: parameters without a stored key.
    """
    parameters = [name for name, _ in model.named_parameters()]
    own_parts = set(".".join(parameters).split("."))
    most: Counter[str] = Counter()  # name of a wrapper -> how often it is in one key, at most
    stripped = set()  # the keys without these names
    for key in keys:
        path = key.split(".")
        wrappers = [part for part in path[:-1] if part.startswith("_") and part not in own_parts]
        most |= Counter(wrappers)
        stripped.add(".".join(part for part in path if part not in wrappers))
    # transformers applies each renaming once to a key.  A name that occurs several times needs
    # several renamings, which differ by a comment in the pattern.
    renamings: dict[str, str] = {}
    for wrapper, times in most.items():
        for number in range(times):
            renamings[rf"{re.escape(wrapper)}\.(?#{number})"] = ""
    return renamings | _prefix_renaming(parameters, lost, stripped)


def _prefix_renaming(
    parameters: Iterable[str], lost: set[str], keys: Iterable[str]
) -> dict[str, str]:
    """A renaming that replaces the prefix of stored keys by that of the model's parameters.

    The prefix is the one with which most parameters of layers are stored.  The renaming is empty if
    there is none, if it is the model's, or if two are equally frequent, of which either could be
    the language model's.  It is empty, too, if any parameter of a layer is not lost: then keys with
    another prefix belong to another model, such as a draft model.

    keys: without the names that wrappers have put between the parts of a path.
    """
    in_layers = [name for name in parameters if "layers." in name]
    if not lost.issuperset(in_layers):
        return {}
    own_prefix = in_layers[0].partition("layers.")[0]
    paths = {name.removeprefix(own_prefix) for name in in_layers}  # from "layers." on
    prefixes: list[str] = []  # of each key that has one of these paths
    for key in keys:
        prefix, separator, path = key.partition("layers.")
        if separator + path in paths:
            prefixes.append(prefix)
    likeliest = multimode(prefixes)
    if len(likeliest) != 1 or own_prefix in likeliest:
        return {}
    prefix = likeliest[0]
    if prefix.endswith(own_prefix):
        # "wrap.model." where the model has "model.": the head is inside the wrapper, too, so that
        # "wrap." is removed from every key
        return {f"^{re.escape(prefix.removesuffix(own_prefix))}": ""}
    # "backbone." where the model has "model."
    return {f"^{re.escape(prefix)}": own_prefix}


def _load(
    local: LocalCheckpoint, dtype: DType, device_map: Mapping[str, int | str | torch.device] | None
) -> PreTrainedModel:
    """The model, loaded by transformers; see `load_model`.

    device_map: as transformers takes it; None: on the CPU.
    """
    model = local.model
    empty = local.empty
    model_class = type(empty)
    pickled = None
    stored = local.tensors
    if stored is None:
        pickled = _pickled(local)
        stored = {key: _described(tensor) for key, tensor in pickled.items()}
    key_mapping, places = local.fit or _fit(model, stored, empty)
    fp32_parameters = [
        parameter_names[0]
        for key, (parameter_names, is_whole) in places.items()
        if is_whole
        and stored[key].dtype in _EXACT
        and parameter_names[0].rpartition(".")[2] in _OPERATOR_PARAMETERS
    ]
    try:
        with (
            refusals(f"config and weights of {model.source.label}"),
            _whole_blocks(),
            _in_fp32(model_class, fp32_parameters),
        ):
            loaded, info = model_class.from_pretrained(
                local.folder if pickled is None else None,
                config=model_class.config_class.from_pretrained(local.folder),
                state_dict=pickled,
                dtype=dtype,
                device_map=None if device_map is None else dict(device_map),
                offload_folder=local.folder / REWRITTEN,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                key_mapping=key_mapping or None,
            )
    except MissingCapabilityError as error:
        if model.quantization is not None:
            error.hint += "  Or take the unquantised checkpoint."
        raise
    _refuse_missing(model, info["missing_keys"], stored.keys() - places.keys())
    mismatched = sorted(info["mismatched_keys"])
    if mismatched:
        name, shape, expected = mismatched[0]
        raise _other_shape(model.source.label, name, shape, expected)
    return loaded


@contextmanager
def _in_fp32(model_class: type[PreTrainedModel], names: Collection[str]) -> Iterator[None]:
    """While the context is open, transformers loads these parameters in fp32, on any device.

    Otherwise they would get the dtype of the other weights.  transformers loads a weight in the
    dtype of the empty model's parameter.  `post_init`, which is called last when the empty model is
    built, can therefore set that dtype.

    names: of parameters of `model_class`.
    """
    post_init = model_class.post_init

    def with_fp32(model: PreTrainedModel) -> None:
        post_init(model)
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.data = parameter.data.float()

    model_class.post_init = with_fp32
    try:
        yield
    finally:
        model_class.post_init = post_init


@contextmanager
def _whole_blocks() -> Iterator[None]:
    """While the context is open, transformers also decodes FP8 weights whose last blocks are cut
    off.

    Such a weight is padded to whole blocks.  transformers itself would divide it into as many equal
    blocks as there are scales, which do not belong to these blocks, or refuse it.
    """
    dequantizer = finegrained_fp8.Fp8Dequantize
    decode = dequantizer._dequantize_one

    def decode_blocks(
        self: Any, codes: Tensor, scales: Tensor, *rest: object, **options: object
    ) -> object:
        """Decode one weight, in place of transformers' method.

        codes: (..., rows, columns).  scales: (..., blocks of rows, blocks of columns).
        Returns the weight, (..., rows, columns).
        Raises ValueError, as transformers does, if the scales do not fit the codes.
        """
        block = self.hf_quantizer.quantization_config.weight_block_size
        rows, columns = codes.shape[-2:]
        if block is None or scales.ndim < 2 or codes.dtype not in _FP8:
            return decode(self, codes, scales, *rest, **options)
        missing_rows = -rows % block[0]
        missing_columns = -columns % block[1]
        if not missing_rows and not missing_columns:
            return decode(self, codes, scales, *rest, **options)
        padded = torch.nn.functional.pad(codes.float(), (0, missing_columns, 0, missing_rows))
        grid = padded.shape[-2] // block[0], padded.shape[-1] // block[1]
        if tuple(scales.shape[-2:]) != grid:
            raise ValueError(
                f"weight {rows, columns} is not a multiple of its scale grid "
                f"{tuple(scales.shape[-2:])}"
            )
        decoded = decode(self, padded, scales, *rest, **options)
        return decoded[..., :rows, :columns].contiguous()

    dequantizer._dequantize_one = decode_blocks
    try:
        yield
    finally:
        dequantizer._dequantize_one = decode


def unpickled(path: Path) -> Any:
    """The object that torch.save has written to a file, on the CPU.  No code in it is executed.

    Raises pickle.UnpicklingError for an object of a class that torch does not allow.  For a damaged
    file, and for one in the format before torch 1.6, it raises errors of any class, and may raise
    that one, too.
    """
    with zipfile.ZipFile(path) as archive:  # torch.load does not compare the checksums
        if damaged := archive.testzip():
            raise ValueError(f"the checksum of {damaged} differs")
    # without mmap, with which torch.load would not check the sizes
    return torch.load(path, map_location="cpu", weights_only=True)


def _pickled(local: LocalCheckpoint) -> dict[str, Tensor]:
    """The tensors of floats in the checkpoint's pickle, by stored name.  Other entries are ignored.

    Raises BadInputError if an entry with the name of a weight is no such tensor, if the pickle
    holds no such tensor at all, or if it holds a name that is no text or an object that torch does
    not allow.  Raises what `broken_file` returns for a damaged file.
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
    except Exception as error:  # torch raises errors of any class for a damaged file
        raise broken_file(path, PICKLE, error) from None
    entries = content if isinstance(content, dict) else {"": content}
    for name in entries:
        if not isinstance(name, str):
            raise BadInputError(
                f"{PICKLE} of {label} holds an entry {shown(name)}, which is no name of a weight.",
                "Save the model's state_dict(), or take another revision.",
            )
    weights = {name: entry for name, entry in entries.items() if _is_dense(entry)}
    others = sorted(entries.keys() - weights.keys())
    # An entry with the name of a weight must not be ignored, and without a tensor none is.
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
    """Whether an entry of a pickle is a strided tensor of 8-bit or longer floats, with values."""
    return (
        isinstance(entry, Tensor)
        and entry.layout == torch.strided
        and not entry.is_meta
        and entry.is_floating_point()
    )


def _described(tensor: Tensor) -> TensorInfo:
    """The description of a tensor, as in the header of a safetensors file; of a dtype that is not
    in `FLOATS`, with torch's name for it.
    """
    codes = {getattr(torch, name): code for code, name in FLOATS.items()}
    # `_refuse_codes` refuses any other dtype
    code = codes.get(tensor.dtype, str(tensor.dtype))
    return TensorInfo(code, list(tensor.shape), (0, tensor.nbytes))  # type: ignore[arg-type]


def _refuse_missing(model: Model, lost: set[str], unused: Iterable[str]) -> None:
    """Raise an error for missing weights, which transformers would replace by random ones.

    lost: names of parameters and buffers without weights; if there are none, there is no error.
    unused: stored keys that belong to no parameter.  If one of them resembles a lost name in the
    first layer that has lost names, the error is a BadInputError whose message says why the names
    differ.  Otherwise it is a ModelUnavailableError.
    """
    label = model.source.label
    in_layers = grouped([name for name in sorted(lost) if "layers." in name], layer_index)
    # The first layer suffices: a mixture of experts may have 100,000 keys to compare with.
    for name, key in product(next(iter(in_layers.values()), ()), sorted(unused)):
        if ".base_layer." in key and _wraps(key, name):
            reason = "an adapter was not merged"
        elif _wraps(key, name):
            reason = "it was saved in a wrapper, or belongs to another model"
        elif _place(key) == _place(name):
            reason = "it has the names of another library or model type"
        else:
            continue
        raise BadInputError(
            f"{label} has {shown(key)}, not {name}: {reason}.",
            "Save the model itself, by save_pretrained: merge the adapter, or save what the "
            "wrapper holds.",
        )
    if lost:
        description = f"{len(lost)} weights, such as {min(lost)}"
        if len(lost) == 1:
            description = f"{min(lost)} among its weights"
        error = ModelUnavailableError(
            f"{label} lacks {description}.",
            "The checkpoint is incomplete, or its config describes more than it holds; fetch it "
            "again or take another revision.",
        )
        if unnamed := model.weights.outside_index():
            error.hint = f"The index does not name {words(unnamed)}.  {error.hint}"
        raise error


def _wraps(key: str, name: str) -> bool:
    """Whether a stored key has all parts of a parameter's path, from "layers." on, in their order,
    perhaps with other parts between or around: "model.layers.0.base_layer.norm" wraps
    "layers.0.norm".
    """
    remaining = iter(key.split("."))  # `in` consumes the parts up to the one that it finds
    return all(part in remaining for part in name[name.index("layers.") :].split("."))


def _place(name: str) -> tuple[list[str], str]:
    """The parts of a weight's name on which different libraries agree: its numbers, and its last
    two parts, in lower case.
    """
    path = name.casefold().split(".")
    return [part for part in path if part.isdecimal()], ".".join(path[-2:])


def _other_shape(
    label: str, name: str, stored: Iterable[int], expected: Iterable[int]
) -> BadInputError:
    """The error for a weight whose stored shape is not the one that the config describes."""
    return BadInputError(
        f"The weights of {label} do not fit its config: {shown(name)} is {tuple(stored)} in "
        f"the file and {tuple(expected)} by the config.",
        "Config and weights do not belong together.",
    )


# --- a device for each part of a model that does not fit on one device, by accelerate


def infer_devices(model: PreTrainedModel, room: Mapping[Device, int]) -> DeviceMap | None:
    """A device for each module of `model`, which is on the meta device, by accelerate.

    accelerate fills the GPUs by index, then main memory, then the disk.  Decoder layers stay whole.
    When the model runs, accelerate brings the weights of a module that is not on a GPU to the first
    device, just before the module is computed there.

    room: bytes for weights on each device, in the order in which they are filled; at least one that
        is not the disk.  The model begins on the first device.  If "disk" is a key, weights without
        room go to the disk; its number is not read.

    Returns None if there is too little room, if a number is negative, or if the first device has no
    room for the token embedding.
    """
    most = {device: size for device, size in room.items() if device != "disk"}
    if min(most.values()) < 0:
        return None
    kept_whole = sorted(model._no_split_modules or ())
    # Without a number for "cpu", accelerate would fill the machine's main memory.
    with warnings.catch_warnings(action="ignore"):  # it warns about buffers of a few bytes
        devices: dict[str, Device] = accelerate.infer_auto_device_map(
            model, max_memory={"cpu": 0} | most, no_split_module_classes=kept_whole
        )
    if "disk" in devices.values() and "disk" not in room:
        return None
    embedding = model.get_input_embeddings()
    path = next(name for name, module in model.named_modules() if module is embedding)
    first_device = next(iter(room))
    return devices if device_of(f"{path}.weight", devices) == first_device else None


def device_of(name: str, devices: DeviceMap) -> Device:
    """The device of the parameter `name`: that of the innermost module around it in the map.

    The map must have such a module; the name of the whole model is "".
    """
    while name not in devices:
        name = name.rpartition(".")[0]
    return devices[name]


def weights_by_device(model: PreTrainedModel, devices: DeviceMap) -> dict[Device, Allocation]:
    """For each device with weights: the number of decoder layers whose first weight is there, and
    the bytes of all weights there.
    """
    sizes: Counter[Device] = Counter()
    layers: dict[int, Device] = {}
    for name, parameter in model.named_parameters():
        device = device_of(name, devices)
        sizes[device] += parameter.nbytes
        index = layer_index(name)
        if index is not None:
            layers.setdefault(index, device)
    counts = Counter(layers.values())
    return {device: Allocation(layers=counts[device], bytes=size) for device, size in sizes.items()}


def largest_streamed(model: PreTrainedModel, devices: DeviceMap, main: Device) -> tuple[int, int]:
    """Bytes of the largest streamed decoder layer, or weight outside of layers, and of the largest
    streamed module; 0 if none is streamed.

    Streamed weights are those on the CPU or on the disk, unless that is `main`.  They are brought
    to `main` for each forward call, one module's own weights at a time, without those of its
    submodules.
    main: the device of the first layers, which also computes the modules that are not on a GPU.
    """
    layers: Counter[object] = Counter()  # by layer index; a weight outside of layers by its name
    modules: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if device_of(name, devices) in {"cpu", "disk"} - {main}:
            index = layer_index(name)
            layers[name if index is None else index] += parameter.nbytes
            modules[name.rpartition(".")[0]] += parameter.nbytes
    return max(layers.values(), default=0), max(modules.values(), default=0)
