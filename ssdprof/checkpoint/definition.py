"""Builds transformers' config object and the model without weights from a config."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssdprof.checkpoint.describe import refuse_quantization
from ssdprof.checkpoint.sizes import shown
from ssdprof.checkpoint.source import CONFIG
from ssdprof.errors import BadInputError, MissingCapabilityError, SsdprofError, library_message

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

SEARCH_S = 3.0  # to find the invalid field; building a large model takes a while, even without weights


def empty_model(folder: Path, repo_id: str, *, head: bool = False) -> PreTrainedModel:
    """The base model that config.json in `folder` describes, on the meta device: shapes, and no memory.

    head: the model with its language-model head.

    BadInputError if transformers refuses the config or cannot build the model: a float where an integer belongs, an
    unknown activation, sizes that contradict each other.  The hint names the field if leaving it out helps.
    What `_check_quantization` raises.
    """
    try:
        with refusals(f"the config of {repo_id}"), quiet_transformers():
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            model = _build(config, head=head)
    except BadInputError as error:
        if field := _refused_field(json.loads((folder / CONFIG).read_bytes())):
            error.hint = f"It accepts the config without {field}.  {error.hint}"
        raise
    if found := getattr(config, "quantization_config", None):
        _check_quantization(dict(found), repo_id)
    return model


def _check_quantization(found: dict[str, Any], repo_id: str) -> None:
    """BadInputError if transformers does not know the quantisation; MissingCapabilityError if it cannot load it here.

    It would say so itself, but only with the weights at hand, and an unknown one it ignores.
    """
    from transformers.quantizers import AutoHfQuantizer

    with quiet_transformers():
        if not AutoHfQuantizer.supports_quant_method(found):
            raise refuse_quantization(found.get("quant_method"), f"The config of {repo_id}")
        with refusals(f"the quantization_config of {repo_id}"):
            quantizer = AutoHfQuantizer.from_config(found, pre_quantized=True)
        try:
            quantizer.validate_environment(device_map=None, weights_only=True)
        except Exception as error:  # of every class: each method has its own
            method = quantizer.quantization_config.quant_method
            raise MissingCapabilityError(
                f"{repo_id} is quantised by {getattr(method, 'value', method)}, and transformers cannot load that "
                f"here: {library_message(error)}.",
                "Install what is missing, or take the unquantised checkpoint.",
            ) from error


def _build(config: PretrainedConfig, *, head: bool = False) -> PreTrainedModel:
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    with torch.device("meta"):
        return (AutoModelForCausalLM if head else AutoModel).from_config(config)


def _refused_field(config: Mapping[str, Any]) -> str | None:
    """A field without which transformers accepts a refused config; None if none is found in time."""
    from transformers import AutoConfig

    deadline = time.monotonic() + SEARCH_S
    for field in sorted(config.keys() - {"model_type"}):
        if time.monotonic() > deadline:
            break
        with quiet_transformers(), suppress(Exception):  # still refused
            _build(AutoConfig.for_model(**{key: value for key, value in config.items() if key != field}))
            return f"{field} = {shown(config[field])}"
    return None


@contextmanager
def refusals(what: str) -> Iterator[None]:
    """Turn all errors of transformers on a user's file into BadInputError with its message.

    what: the file, for the message.  Errors of ssdprof, missing packages and full memory have their own messages.
    """
    import torch

    try:
        yield
    except (SsdprofError, torch.OutOfMemoryError):
        raise
    except ImportError as error:
        raise MissingCapabilityError(
            f"transformers needs a missing package for {what}: {library_message(error)}.", "Install the package."
        ) from error
    except Exception as error:  # the library may raise any class of error on the user's data
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # the second is PyTorch's
            raise MissingCapabilityError(f"Main memory is too small for {what}.", "Take fewer layers.") from error
        raise BadInputError(
            f"transformers cannot use {what}: {library_message(error)}.",
            "The file is damaged, or the checkpoint is newer than the installed transformers.",
        ) from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress its warnings on unused weights of a cut model and on unusual configs.  ssdprof checks both."""
    from transformers.utils import logging

    before: int = logging.get_verbosity()
    set_verbosity: Callable[[int], Any] = logging.set_verbosity
    set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        set_verbosity(before)
