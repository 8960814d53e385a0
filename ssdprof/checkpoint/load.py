"""A fetched checkpoint -> the base model (no language-model head), in eval mode."""

from __future__ import annotations

import importlib.util
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch

from ssdprof.checkpoint import original
from ssdprof.checkpoint.fetched import LocalCheckpoint
from ssdprof.checkpoint.integrity import broken_file
from ssdprof.checkpoint.sizes import shown
from ssdprof.checkpoint.weights import SINGLE, is_needed
from ssdprof.errors import BadInputError, MissingCapabilityError, ModelUnavailableError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

DType = torch.dtype | Literal["auto"]
_OPERATOR_PARAMETERS = ("A_log", "D", "dt_bias")  # stay as stored: checkpoints keep them in fp32 beside 16-bit weights


def load_model(local: LocalCheckpoint, *, device: torch.device | str, dtype: DType = "auto") -> PreTrainedModel:
    """The checkpoint's base model with its first `local.depth` decoder layers, on `device`.

    dtype: of the weights; "auto" takes the checkpoint's own.

    BadInputError: a config that transformers refuses or that describes more than the weights hold, a pickle that
    holds more than tensors.  ModelUnavailableError: weights are missing.  MissingCapabilityError: a package that
    decodes the quantisation is not installed.
    """
    device = torch.device(device)
    with _quiet_transformers():
        config = _read_config(local)
        _check_described_size(local, config)
        model = _load_original(local, config, dtype) if local.description.original else _load(local, device, dtype)
    return model.to(device).eval()


def _read_config(local: LocalCheckpoint) -> PretrainedConfig:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(local.folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise BadInputError(
            f"transformers refuses the config of {local.ref.repo_id}: {shown(str(error))}.",
            "The checkpoint may be newer than the installed transformers.",
        ) from None


def _check_described_size(local: LocalCheckpoint, config: PretrainedConfig) -> None:
    """Refuse a config that describes more parameters than the weights hold, before they are allocated."""
    from transformers import AutoModel

    if local.tensors is None or local.ref.quantization not in (None, "fp8"):  # packed codes: fewer elements stored
        return
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    described = sum(parameter.numel() for parameter in model.parameters())
    stored = sum(math.prod(tensor.shape) for tensor in local.tensors.values())
    if described > stored:
        raise BadInputError(
            f"The config of {local.ref.repo_id} describes {described} parameters in {local.depth} layers, "
            f"but the weights hold {stored}.",
            "Config and weights do not belong together, or weights are missing.",
        )


def _load(local: LocalCheckpoint, device: torch.device, dtype: DType) -> PreTrainedModel:
    from transformers import AutoModel

    # With accelerate, weights go to the GPU one by one instead of through a whole copy in host memory.
    direct = device.type != "cpu" and importlib.util.find_spec("accelerate") is not None
    try:
        model, info = AutoModel.from_pretrained(
            local.folder,
            dtype=dtype,
            device_map={"": device} if direct else None,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except ImportError as error:
        raise MissingCapabilityError(
            f"{local.ref.repo_id} ({local.ref.quantization}) needs a package that is missing: {shown(str(error))}.",
            "Install it, or take the unquantised checkpoint.",
        ) from None
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise BadInputError(
            f"The weights of {local.ref.repo_id} do not fit its config: {shown(str(error))}.",
            "Config and weights do not belong together.",
        ) from None
    _refuse_missing(local, info["missing_keys"])
    return model


def _load_original(local: LocalCheckpoint, config: PretrainedConfig, dtype: DType) -> PreTrainedModel:
    from transformers import AutoModel

    stored = _original_state(local)
    wanted = {original.convert_key(key): value for key, value in stored.items() if is_needed(key, local.depth)}
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    expected = model.state_dict()
    _refuse_missing(local, set(expected) - set(wanted))
    for name, tensor in wanted.items():
        if name not in expected or tensor.shape != expected[name].shape:
            raise BadInputError(
                f"The weights of {local.ref.repo_id} do not fit its config: {shown(name)} is {tuple(tensor.shape)}.",
                "Config and weights do not belong together.",
            )
    target = wanted["embeddings.weight"].dtype if dtype == "auto" else dtype
    model.load_state_dict({name: _cast(name, tensor, target) for name, tensor in wanted.items()}, assign=True)
    return model


def _original_state(local: LocalCheckpoint) -> dict[str, torch.Tensor]:
    """Tensors by stored name, mapped from the file rather than read."""
    if local.tensors is not None:
        from safetensors.torch import load_file

        state: dict[str, torch.Tensor] = load_file(local.folder / SINGLE)
        return state
    path = local.folder / original.PICKLE
    try:
        pickled = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:
        raise BadInputError(
            f"{original.PICKLE} of {local.ref.repo_id} holds more than tensors and was not executed.",
            "Do not trust this checkpoint; take its safetensors revision, often --revision refs/pr/1.",
        ) from None
    except (RuntimeError, EOFError, OSError) as error:
        raise broken_file(path.resolve(), original.PICKLE, str(error)) from None
    if not isinstance(pickled, dict) or not all(isinstance(value, torch.Tensor) for value in pickled.values()):
        raise BadInputError(
            f"{original.PICKLE} of {local.ref.repo_id} holds no table of tensors.", "It is no checkpoint."
        )
    return pickled


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if name.rpartition(".")[2] in _OPERATOR_PARAMETERS else tensor.to(dtype)


def _refuse_missing(local: LocalCheckpoint, missing: set[str]) -> None:
    """transformers fills missing weights with random ones and goes on."""
    if missing:
        raise ModelUnavailableError(
            f"{local.ref.repo_id} lacks {len(missing)} weights, such as {min(missing)}.",
            "The checkpoint is incomplete; fetch it again or take another revision.",
        )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hold back its report on weights that a cut model does not use; what matters in it is checked here."""
    from transformers.utils import logging

    before: int = logging.get_verbosity()
    set_verbosity: Callable[[int], Any] = logging.set_verbosity
    set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        set_verbosity(before)
