"""Builds the model without weights, as transformers does from a config, and finds out to which
parameters transformers assigns stored weights.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ssdprof.checkpoint import transformers
from ssdprof.checkpoint.config import SUPPORTED, ModelConfig, quant_method, refuse_quantization
from ssdprof.checkpoint.hub import CONFIG
from ssdprof.checkpoint.names import shown
from ssdprof.core.base import grouped
from ssdprof.errors import (
    MACHINE_ERRNOS,
    BadInputError,
    MissingCapabilityError,
    SsdprofError,
    failed_import,
    library_message,
)
from ssdprof.operators.late import lazy

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

conversion_mapping, core_model_loading = (
    lazy(f"transformers.{name}") for name in ("conversion_mapping", "core_model_loading")
)
# Stored key -> names of the parameters or buffers to which it contributes, and whether it becomes a
# single one as it is, without a conversion.
Destinations = dict[str, tuple[tuple[str, ...], bool]]
# Seconds to search for the invalid field of a config.  Building a large model takes a while, even
# without weights.
SEARCH_S = 3.0


def build(config: ModelConfig, repo_id: str, *, head: bool = False) -> PreTrainedModel:
    """The base model that `config` describes, in eval mode, on the meta device, where tensors have
    shapes but no memory.

    head: with its language-model head.

    Raises BadInputError if transformers refuses the config or cannot build the model: for a float
    in place of an integer, an unknown activation, or sizes that contradict each other.  The hint
    names a field without which the config is accepted, if there is one: see `_refused_field`.
    Raises BadInputError, too, for a larger model's config without that of its language model, and
    for a head that transformers does not have.
    Raises MissingCapabilityError if transformers cannot load the quantisation on this machine, or
    if a package, memory or room for a temporary file is missing.
    """
    try:
        with refusals(f"the config of {repo_id}"), quiet_transformers():
            parsed = _parsed(config)
            is_text = parsed.get_text_config() is parsed
            has_class = not head or type(parsed) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
            model = _build(parsed, head=head) if is_text and has_class else None
    except BadInputError as error:
        if field := _refused_field(config, head=head):
            error.hint = f"It accepts the config without {field}.  {error.hint}"
        raise
    # The config is a larger model's, which transformers would complete with default parts.
    if not is_text:
        raise BadInputError(
            f"{CONFIG} of {repo_id} has no text_config, where a {parsed.model_type} config "
            "describes its layers.",
            "The checkpoint's config is damaged, or not of this model type.",
        )
    if model is None:
        raise BadInputError(
            f"transformers has no causal language model for {parsed.model_type}, only its layers.",
            "`ssdprof run` without --decode compares its operators; answers need a head.",
        )
    if quantization := getattr(parsed, "quantization_config", None):
        _check_quantization(dict(quantization), repo_id)
    return model.eval()


def _parsed(config: ModelConfig) -> PretrainedConfig:
    """The config as transformers reads it from a file.  Raises what transformers raises."""
    with tempfile.TemporaryDirectory(prefix="ssdprof-") as folder:
        (Path(folder) / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        parsed: PretrainedConfig = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    return parsed


def check_known(config: ModelConfig, where: str) -> None:
    """BadInputError for a model type that the installed transformers does not have."""
    name = config["model_type"]
    if name not in transformers.CONFIG_MAPPING:
        reason = "which the installed transformers does not know"
        if config.get("auto_map"):
            reason = "whose code is in the repo itself; ssdprof runs no remote code"
        raise BadInputError(f"{where} is of type {shown(name)}, {reason}.", SUPPORTED)


def check_known_quantization(config: ModelConfig, label: str) -> None:
    """BadInputError for a quantisation that transformers does not know, and would ignore with a
    warning.

    config: with a quantization_config, of any type.  label: names the checkpoint.
    """
    quantization = config["quantization_config"]
    with quiet_transformers():
        if quant_method(config) in (None, "mlx", "modelopt") or not (
            transformers.quantizers.AutoHfQuantizer.supports_quant_method(quantization)
        ):
            raise refuse_quantization(quantization, label)


def _check_quantization(quantization: ModelConfig, repo_id: str) -> None:
    """MissingCapabilityError if transformers cannot load the quantisation on this machine, which
    it would say only when it loads the weights; BadInputError if it cannot read its description.

    quantization: the quantization_config.
    """
    with quiet_transformers():
        with refusals(f"the quantization_config of {repo_id}"):
            quantizer = transformers.quantizers.AutoHfQuantizer.from_config(
                quantization, pre_quantized=True
            )
        try:
            quantizer.validate_environment(device_map=None, weights_only=True)
        except Exception as error:  # each quantisation raises errors of other classes
            method = quantizer.quantization_config.quant_method
            raise MissingCapabilityError(
                f"{repo_id} is quantised by {getattr(method, 'value', method)}, and transformers "
                f"cannot load that here: {library_message(error)}.",
                "Install what is missing, or take the unquantised checkpoint.",
            ) from error


def _build(config: PretrainedConfig, *, head: bool = False) -> PreTrainedModel:
    """The model on the meta device; head: with its language-model head.  Raises what transformers
    raises.
    """
    auto_class = transformers.AutoModelForCausalLM if head else transformers.AutoModel
    with torch.device("meta"):
        return auto_class.from_config(config)


def _refused_field(config: ModelConfig, *, head: bool) -> str | None:
    """The first field, in alphabetical order, without which transformers accepts a refused config:
    "hidden_act = 'none'"; None if there is none, or it is not found within `SEARCH_S`.
    """
    deadline = time.monotonic() + SEARCH_S
    for field in sorted(config.keys() - {"model_type"}):
        if time.monotonic() > deadline:
            break
        others = {key: value for key, value in config.items() if key != field}
        with quiet_transformers(), suppress(Exception):  # refused without this field, too
            _build(transformers.AutoConfig.for_model(**others), head=head)
            return f"{field} = {shown(config[field])}"
    return None


def destinations(
    model: PreTrainedModel,
    keys: Iterable[str],
    key_mapping: Mapping[str, str],
    *,
    decoded: bool = False,
) -> Destinations:
    """The parameters and buffers to which transformers assigns each stored weight; keys that it
    ignores are left out.

    keys: stored keys.
    key_mapping: renamings that come first, as `from_pretrained` takes them.
    decoded: with the conversions that decode quantised weights, so that scales have the
        destinations of the weights that they decode.  The model's config must then have a
        quantization_config.
    """
    quantizer = None
    if decoded:
        quantizer = transformers.quantizers.AutoHfQuantizer.from_config(
            dict(model.config.quantization_config), pre_quantized=True
        )
    conversions = conversion_mapping.get_model_conversion_mapping(
        model, dict(key_mapping) or None, quantizer
    )
    renamings = [
        step for step in conversions if isinstance(step, core_model_loading.WeightRenaming)
    ]
    converters = [
        step for step in conversions if isinstance(step, core_model_loading.WeightConverter)
    ]
    # pattern of a converted key -> patterns of the parameters that the conversion makes of it
    targets: dict[str, list[str]] = {}
    for converter in converters:
        targets |= dict.fromkeys(converter.source_patterns, converter.target_patterns)
    state = model.state_dict()
    prefix = model.base_model_prefix
    places = {}
    for key in sorted(keys):
        rename = partial(core_model_loading.rename_source_key, key)
        name, pattern = rename(renamings, converters, prefix, state)
        if name not in state and key in state:  # the key is a parameter's name already
            name, pattern = rename([], [], prefix, state)
        if name not in state:
            continue
        names = [name]
        if pattern:
            first, *others = targets[pattern]
            names += [name.replace(first, other) for other in others]
        places[key] = tuple(names), pattern is None
    return places


def missing(model: PreTrainedModel, places: Destinations) -> set[str]:
    """Parameters to which no stored weight contributes, without those that the model's class
    declares as optional.  Buffers are not among them.

    places: the destinations of the stored weights.  If several names share one parameter, a stored
    weight for one of them is enough; if there is none, the first name is returned.
    """
    present = set[str]().union(*(names for names, _ in places.values()))
    shared = grouped(model.named_parameters(remove_duplicate=False), lambda pair: id(pair[1]))
    optional = model._keys_to_ignore_on_load_missing or ()
    lost = set()
    for pairs in shared.values():
        names_of_parameter = [name for name, _ in pairs]
        is_optional = any(re.search(pattern, names_of_parameter[0]) for pattern in optional)
        if present.isdisjoint(names_of_parameter) and not is_optional:
            lost.add(names_of_parameter[0])
    return lost


def accepts(config: ModelConfig) -> bool:
    """Whether transformers reads a config without an error.  Whether it can build the model from
    the config is not tried.
    """
    with quiet_transformers(), suppress(Exception):  # transformers raises errors of any class
        return bool(_parsed(config))
    return False


@contextmanager
def refusals(what: str, hint: str = "") -> Iterator[None]:
    """Turn all errors of transformers in the block into BadInputError, with transformers' message.

    Errors of ssdprof and torch.OutOfMemoryError are passed on.  A missing package, full main memory
    and the `MACHINE_ERRNOS`, such as that of a full disk, become MissingCapabilityError.  So does
    the failed import of a library.

    what: the user's file that transformers reads, for messages.  hint: of the BadInputError, in
    place of the usual one.
    """
    try:
        yield
    except (SsdprofError, torch.OutOfMemoryError):
        raise
    except ImportError as error:
        raise MissingCapabilityError(
            f"transformers needs a missing package for {what}: {library_message(error)}.",
            "Install the package.",
        ) from error
    except Exception as error:  # the library may raise any class of error on the user's data
        if isinstance(error, OSError) and error.errno in MACHINE_ERRNOS:
            raise MissingCapabilityError(
                f"A temporary file for {what} cannot be written: {error.strerror}.",
                "Make room there or set TMPDIR to another folder.",
            ) from error
        # torch raises a RuntimeError with this message
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise MissingCapabilityError(
                f"Main memory is too small for {what}.", "Take fewer layers."
            ) from error
        raise failed_import(error) or BadInputError(
            f"transformers cannot use {what}: {library_message(error)}.",
            hint
            or "The file is damaged, or the checkpoint is newer than the installed transformers.",
        ) from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress transformers' progress bars and warnings in the block.

    It would warn about the unused weights of a cut model, and about unusual configs, which ssdprof
    checks itself.
    """
    logging: Any = transformers.logging
    verbosity = logging.get_verbosity()
    shows_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.ERROR)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_bars:
            logging.enable_progress_bar()
