"""Fetches a checkpoint's files, checks them, and loads the model from them."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import tempfile
import weakref
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import safe_open

from ssdprof.checkpoint.config import PICKLE
from ssdprof.checkpoint.hub import CONFIG, HubRepo, Source, TensorInfo, broken_file
from ssdprof.checkpoint.meta import build, meta_model, quiet_transformers, refusals
from ssdprof.checkpoint.model import Model
from ssdprof.checkpoint.names import shown
from ssdprof.checkpoint.weights import INDEX
from ssdprof.core.subject import DECODED_ON_LOAD, CheckpointRef
from ssdprof.core.words import size_words
from ssdprof.errors import BadInputError, MissingCapabilityError, ModelUnavailableError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DType = torch.dtype | Literal["auto"]
REWRITTEN = "rewritten"  # streamed weights that transformers converts
_HEAD = "lm_head.weight"
# of classifiers
_OTHER_HEAD = re.compile(r"(^|\.)(score|classifier|qa_outputs|v_head|value_head|summary)\.")
_MOST_COMPUTED = 1 << 24  # elements of tables, such as frequencies of positions
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# keep their stored dtype: fp32 in checkpoints of 16-bit weights
_OPERATOR_PARAMETERS = ("A_log", "D", "dt_bias")


@dataclass(eq=False)
class LocalCheckpoint:
    """A checkpoint on this machine, cut to its first `depth` decoder layers.

    folder: loads with stock transformers, except for the original format, which `load_model` reads.
    Its config names no remote code and no vision tower.  It is temporary and goes when this object
    does.
    head: whether the language-model head is part of it.
    tensors: the needed weights as stored, by name; None for a pickle, which has no header.
    """

    ref: CheckpointRef
    folder: Path
    depth: int
    head: bool = False
    tensors: dict[str, TensorInfo] | None = None


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
        config = model.cut_config(depth, model.dtype)
        # Infinities as the checkpoints write them
        (local.folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        build(config, repo_id)  # refuse an unusable config before the download
        files, size = check_space(model, deepest_layer, head=head)
        if files and progress is not None:
            progress(f"Downloading {files} files, {size_words(size)}, of {repo_id}")

        paths = {name: model.source.path(name) for name in weights.files(depth, head=head)}
        local.tensors = None if weights.pickled else weights.tensors(depth, head=head)
        model.refuse_codes(deepest_layer, head=head)
        for name, path in paths.items():
            (local.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (local.folder / name).symlink_to(path.resolve())
        if weights.shards is not None:
            index = {"metadata": {}, "weight_map": weights.needed_shards(depth, head=head)}
            (local.folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    except OSError as error:
        raise MissingCapabilityError(
            f"The temporary folder for {repo_id} cannot be written: {error.strerror or error}.",
            "Make room there or set TMPDIR to another folder.",
        ) from None
    return local


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
        empty = meta_model(model, deepest_layer=deepest_layer, head=head)
        _check_fit(model.ref, model.weights.tensors(model.depth(deepest_layer), head=head), empty)


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
    device_map: the place of every module, from `meta.infer`; None: `device`.  Weights on the disk
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
        if local.tensors is not None:
            _check_fit(local.ref, local.tensors, empty)
        if device_map is not None:
            return _load(local, type(empty), dtype, device_map).eval()
        # With a map, weights are moved to the GPU one by one, without a complete copy in host
        # memory.
        return (
            _load(local, type(empty), dtype, None if device.type == "cpu" else {"": device})
            .to(device)
            .eval()
        )


def _check_fit(
    ref: CheckpointRef, tensors: Mapping[str, TensorInfo], empty: PreTrainedModel
) -> None:
    """Refuse a config that describes more parameters than the weights hold, before they are
    allocated.
    """
    if ref.quantization not in (None, *DECODED_ON_LOAD):  # packed
        return
    heads = {key for key in tensors if _OTHER_HEAD.search(key)}
    if (out := empty.get_output_embeddings()) is not None and not any(
        key.endswith(_HEAD) for key in tensors
    ):
        if heads:
            raise BadInputError(
                (
                    f"{ref.repo_id} is a classifier, with {shown(min(heads))} and no {_HEAD}: it "
                    "predicts no tokens."
                ),
                "Name a language model, or leave out what needs its predictions.",
            )
        if out.weight is not empty.get_input_embeddings().weight:
            raise _incomplete(f"{ref.repo_id} lacks {_HEAD}.")
    described = sum(parameter.numel() for parameter in empty.parameters())
    stored = sum(tensor.parameter_count for tensor in tensors.values())
    if described > stored:
        raise BadInputError(
            f"The config of {ref.repo_id} describes {described} parameters in its first layers, "
            "but the weights hold "
            f"{stored}.",
            "Config and weights do not belong together, or weights are missing.",
        )
    computed = sum(buffer.numel() for buffer in empty.buffers())
    if computed > _MOST_COMPUTED:
        raise BadInputError(
            (
                f"The config of {ref.repo_id} describes tables of {computed} elements in "
                "addition to "
                "the weights."
            ),
            "The config is damaged, most often in rope_parameters.",
        )


def _load(
    local: LocalCheckpoint,
    kind: type[PreTrainedModel],
    dtype: DType,
    device_map: Mapping[str, int | str | torch.device] | None,
) -> PreTrainedModel:
    # The scales of ModelOpt, the embedding of the original format
    names = {r"\.weight_scale$": ".weight_scale_inv"} if local.ref.quantization == "fp8" else {}
    names |= {r"\bembedding\.": "embeddings."} if local.ref.model_type == "mamba2" else {}
    pickled = _pickled(local) if local.tensors is None else None

    def load(renamed: dict[str, str]) -> tuple[PreTrainedModel, dict[str, Any]]:
        with refusals(f"config and weights of {local.ref.repo_id}"), _whole_blocks():
            return kind.from_pretrained(  # type: ignore[no-any-return]
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
                key_mapping=names | renamed or None,
            )

    try:
        model, info = load({})
        if info["missing_keys"] and (renamed := _foreign_prefix(local, model)):
            model, info = load(renamed)
    except MissingCapabilityError as error:
        if local.ref.quantization is not None:
            error.hint += "  Or take the unquantised checkpoint."
        raise
    _refuse_missing(local, info["missing_keys"])
    for name, stored, expected in sorted(info["mismatched_keys"]):
        raise BadInputError(
            f"The weights of {local.ref.repo_id} do not fit its config: {shown(name)} is "
            f"{tuple(stored)} in the file "
            f"and {tuple(expected)} by the config.",
            "Config and weights do not belong together.",
        )
    _restore_parameters(local, model, pickled or {})
    return model


def _foreign_prefix(local: LocalCheckpoint, model: PreTrainedModel) -> dict[str, str] | None:
    """transformers' renaming of stored weights whose layers have another prefix; None if none have,
    or all lack one.
    """
    for name, _ in model.named_parameters():
        before, layers, rest = name.partition("layers.")
        for key in local.tensors or () if layers and rest.startswith("0.") else ():
            prefix = key.removesuffix(layers + rest)
            if prefix not in (key, before):
                return {f"^{re.escape(prefix)}": before}
    return None


@contextmanager
def _whole_blocks() -> Iterator[None]:
    """Fills up the last FP8 block, which may be cut off: transformers would take blocks of equal
    sizes instead.
    """
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    decode = Fp8Dequantize._dequantize_one

    def decode_blocks(
        self: Any, codes: torch.Tensor, scales: torch.Tensor, *rest: Any, **options: Any
    ) -> Any:
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


def _restore_parameters(
    local: LocalCheckpoint, model: PreTrainedModel, pickled: Mapping[str, torch.Tensor]
) -> None:
    """Give the operators their parameters as they are stored in fp32: transformers rounds them like
    the weights.
    """
    wanted = {
        name[name.index("layers.") :]: parameter
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[2] in _OPERATOR_PARAMETERS
        and "layers." in name
        and not parameter.is_meta
    }

    def restore(key: str, read: Callable[[str], torch.Tensor]) -> None:
        parameter = wanted.get(key[key.find("layers.") :])
        if parameter is not None and parameter.dtype != torch.float32:
            parameter.data = read(key).to(parameter.device)

    for key, tensor in pickled.items():
        if tensor.dtype == torch.float32:
            restore(key, pickled.__getitem__)
    exact = {key for key, tensor in (local.tensors or {}).items() if tensor.dtype == "F32"}
    for file in sorted(local.folder.rglob("*.safetensors")) if exact and wanted else ():
        with safe_open(file, framework="pt", device="cpu") as opened:
            for key in exact.intersection(opened.keys()):
                restore(key, opened.get_tensor)


def unpickled(path: Path) -> Any:
    """What torch.save wrote, on the CPU, nothing of it executed.  Raises errors of any class."""
    with zipfile.ZipFile(path) as archive:  # torch checks no checksums
        if damaged := archive.testzip():
            raise ValueError(f"the checksum of {damaged} differs")
    # memory-mapped, it would check no sizes
    return torch.load(path, map_location="cpu", weights_only=True)


def _pickled(local: LocalCheckpoint) -> dict[str, torch.Tensor]:
    """The tensors of a pickle by stored name."""
    path = local.folder / PICKLE
    try:
        found = unpickled(path)
    except pickle.UnpicklingError:
        raise BadInputError(
            f"{PICKLE} of {local.ref.repo_id} holds more than tensors and was not executed.",
            (
                "Do not trust this checkpoint; take its safetensors revision, often --revision "
                "refs/pr/1."
            ),
        ) from None
    except Exception as error:  # of any class: torch's reader checks little of what it reads
        raise broken_file(path.resolve(), PICKLE, error) from None
    found = found if isinstance(found, dict) else {"": found}
    for name, one in found.items():
        dense = isinstance(one, torch.Tensor) and one.layout == torch.strided and not one.is_meta
        if not dense or not one.is_floating_point():
            raise BadInputError(
                (
                    f"{PICKLE} of {local.ref.repo_id} holds {shown(name)}, which is no table of "
                    "floats."
                ),
                "The checkpoint is damaged; fetch it again or take another revision.",
            )
    return found


def _refuse_missing(local: LocalCheckpoint, missing: set[str]) -> None:
    """Raise for missing weights, which transformers would replace by random ones."""
    if not missing:
        return
    for name in sorted(missing):
        end = name[name.find("layers.") :] if "layers." in name else name
        for key in local.tensors or ():
            if key.replace(".base_layer.", ".").endswith(end):
                wrapper = (
                    "an adapter was not merged"
                    if ".base_layer." in key
                    else "it was saved in a wrapper"
                )
                raise BadInputError(
                    f"{local.ref.repo_id} has {shown(key)}, not {name}: {wrapper}.",
                    "Save the model itself: merge the adapter, or save what the wrapper holds.",
                )
    raise _incomplete(f"{local.ref.repo_id} lacks {len(missing)} weights, such as {min(missing)}.")


def _incomplete(message: str) -> ModelUnavailableError:
    return ModelUnavailableError(
        message, "The checkpoint is incomplete; fetch it again or take another revision."
    )
