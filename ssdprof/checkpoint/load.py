"""A fetched checkpoint -> the base model, or the model with its language-model head, in eval mode."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch

from ssdprof.checkpoint import original
from ssdprof.checkpoint.definition import empty_model, quiet_transformers, refusals
from ssdprof.checkpoint.fetched import LocalCheckpoint
from ssdprof.checkpoint.integrity import broken_file
from ssdprof.checkpoint.sizes import LIMIT, shown
from ssdprof.checkpoint.weights import is_needed
from ssdprof.core.subject import DECODED_ON_LOAD
from ssdprof.errors import BadInputError, MissingCapabilityError, ModelUnavailableError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DType = torch.dtype | Literal["auto"]
REWRITTEN = "rewritten"  # streamed weights that transformers converts
_OPERATOR_PARAMETERS = ("A_log", "D", "dt_bias")  # keep their stored dtype: fp32 in checkpoints of 16-bit weights


def load_model(
    local: LocalCheckpoint,
    *,
    device: torch.device | str,
    dtype: DType = "auto",
    device_map: Mapping[str, int | str] | None = None,
) -> PreTrainedModel:
    """The checkpoint's base model with its first `local.depth` decoder layers, on `device`.

    With its language-model head if it was fetched with one.

    dtype: of the weights; "auto" takes the checkpoint's own.
    device_map: the place of every module, from `placing.infer`; None: `device`.  Weights on the disk are read from
        `local` as long as the model runs.

    BadInputError: a config that transformers refuses or that describes more than the weights hold, a pickle that
    holds more than tensors.  ModelUnavailableError: weights are missing.  MissingCapabilityError: a package that
    decodes the quantisation is not installed.
    """
    device = torch.device(device)
    with quiet_transformers():
        empty = empty_model(local.folder, local.ref.repo_id, head=local.head)
        _check_described_size(local, empty)
        if local.description.original:
            return _fill_original(local, empty, dtype).to(device).eval()
        del empty
        if device_map is not None:
            return _load(local, dtype, device_map).eval()
        # With a map, weights are moved to the GPU one by one, without a complete copy in host memory.
        return _load(local, dtype, None if device.type == "cpu" else {"": device}).to(device).eval()


def _check_described_size(local: LocalCheckpoint, empty: PreTrainedModel) -> None:
    """Refuse a config that describes more parameters than the weights hold, before they are allocated."""
    if local.tensors is None or local.ref.quantization not in (None, *DECODED_ON_LOAD):  # packed
        return
    described = sum(parameter.numel() for parameter in empty.parameters())
    stored = sum(math.prod(tensor.shape) for tensor in local.tensors.values())
    if described > stored:
        raise BadInputError(
            f"The config of {local.ref.repo_id} describes {described} parameters in {local.depth} layers, "
            f"but the weights hold {stored}.",
            "Config and weights do not belong together, or weights are missing.",
        )
    computed = sum(buffer.numel() for buffer in empty.buffers())
    if computed > LIMIT:
        raise BadInputError(
            f"The config of {local.ref.repo_id} describes tables of {computed} elements in addition to the weights.",
            "The config is damaged, most often in rope_parameters.",
        )


def _load(
    local: LocalCheckpoint, dtype: DType, device_map: Mapping[str, int | str | torch.device] | None
) -> PreTrainedModel:
    from transformers import AutoModel, AutoModelForCausalLM

    try:
        with refusals(f"config and weights of {local.ref.repo_id}"):
            model, info = (AutoModelForCausalLM if local.head else AutoModel).from_pretrained(
                local.folder,
                dtype=dtype,
                device_map=None if device_map is None else dict(device_map),
                offload_folder=local.folder / REWRITTEN,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, by name
            )
    except MissingCapabilityError as error:
        if local.ref.quantization is not None:
            error.hint += "  Or take the unquantised checkpoint."
        raise
    _refuse_missing(local, info["missing_keys"])
    for name, stored, expected in sorted(info["mismatched_keys"]):
        raise _does_not_fit(local, name, tuple(stored), tuple(expected))
    return model


def _fill_original(local: LocalCheckpoint, model: PreTrainedModel, dtype: DType) -> PreTrainedModel:
    """Give `model`, which is on the meta device, the weights of the original format."""
    stored = _original_state(local)
    needed = {key: value for key, value in stored.items() if is_needed(key, local.depth, head=local.head)}
    wanted = {original.convert_key(key, head=local.head): value for key, value in needed.items()}
    if local.head and model.config.tie_word_embeddings:
        wanted.setdefault("lm_head.weight", wanted["backbone.embeddings.weight"])
    expected = model.state_dict()
    _refuse_missing(local, set(expected) - set(wanted))
    for name, tensor in wanted.items():
        shape = tuple(expected[name].shape) if name in expected else None
        if tuple(tensor.shape) != shape:
            raise _does_not_fit(local, name, tuple(tensor.shape), shape)
    embeddings = next(tensor for name, tensor in wanted.items() if name.endswith("embeddings.weight"))
    target = embeddings.dtype if dtype == "auto" else dtype
    model.load_state_dict({name: _cast(name, tensor, target) for name, tensor in wanted.items()}, assign=True)
    model.tie_weights()  # one parameter again, after `assign`
    return model


def _does_not_fit(
    local: LocalCheckpoint, name: str, stored: tuple[int, ...], expected: tuple[int, ...] | None
) -> BadInputError:
    """expected: None where the config has no such weight."""
    wanted = f"is {stored} in the file and {expected} by the config" if expected else "is not in the config"
    return BadInputError(
        f"The weights of {local.ref.repo_id} do not fit its config: {shown(name)} {wanted}.",
        "Config and weights do not belong together.",
    )


def _original_state(local: LocalCheckpoint) -> dict[str, torch.Tensor]:
    """Tensors by stored name, memory-mapped from the file."""
    if local.tensors is not None:
        from safetensors.torch import load_file

        files = sorted(local.folder.rglob("*.safetensors"))
        return {key: tensor for file in files for key, tensor in load_file(file).items()}
    path = local.folder / original.PICKLE
    try:
        pickled = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:
        raise BadInputError(
            f"{original.PICKLE} of {local.ref.repo_id} holds more than tensors and was not executed.",
            "Do not trust this checkpoint; take its safetensors revision, often --revision refs/pr/1.",
        ) from None
    except (RuntimeError, EOFError, OSError) as error:
        raise broken_file(path.resolve(), original.PICKLE, error) from None
    if not isinstance(pickled, dict) or not all(isinstance(value, torch.Tensor) for value in pickled.values()):
        raise BadInputError(
            f"{original.PICKLE} of {local.ref.repo_id} holds no table of tensors.", "The file is not a checkpoint."
        )
    return pickled


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if name.rpartition(".")[2] in _OPERATOR_PARAMETERS else tensor.to(dtype)


def _refuse_missing(local: LocalCheckpoint, missing: set[str]) -> None:
    """Raise for missing weights, which transformers would replace by random ones."""
    if missing:
        raise ModelUnavailableError(
            f"{local.ref.repo_id} lacks {len(missing)} weights, such as {min(missing)}.",
            "The checkpoint is incomplete; fetch it again or take another revision.",
        )
