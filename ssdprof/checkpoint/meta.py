"""The model without its weights, as transformers builds it from a config: its mixers, and a place
for each part.
"""

from __future__ import annotations

import errno
import inspect
import json
import re
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ssdprof import operators
from ssdprof.checkpoint import accelerate, transformers
from ssdprof.checkpoint.config import SUPPORTED, quant_method, refuse, refuse_quantization
from ssdprof.checkpoint.hub import CONFIG
from ssdprof.checkpoint.model import Model
from ssdprof.checkpoint.names import shown
from ssdprof.checkpoint.weights import layer_index
from ssdprof.core.base import LONGEST_SEQLEN, grouped
from ssdprof.core.subject import Held
from ssdprof.core.words import words
from ssdprof.errors import (
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
# what no file of a user causes: a full disk, no permission, too many open files
_OF_MACHINE = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.EMFILE,
        errno.ENFILE,
        errno.EIO,
    }
)
# to find the invalid field; building a large model takes a while, even without weights
SEARCH_S = 3.0


class _Headless(BadInputError):
    """No field of the config is wrong."""


def meta_model(
    model: Model, *, deepest_layer: int | None = None, head: bool = False, dtype: str | None = None
) -> PreTrainedModel:
    """What `load.fetch` and `load.load_model` give, on the meta device: shapes and dtypes.
    Downloads nothing.

    dtype: of the weights, named as in torch; None: the checkpoint's own.

    BadInputError for what `fetch` would refuse.
    """
    depth = model.depth(deepest_layer)
    wanted = dtype or (_dtype_by_size(model) if model.weights.pickled else model.dtype)
    model.refuse_codes(deepest_layer, head=head)
    return build(model.load_config(depth, wanted), model.source.label, head=head)


def build(config: Mapping[str, Any], repo_id: str, *, head: bool = False) -> PreTrainedModel:
    """The base model that `config` describes, on the meta device, in eval mode: shapes, and no
    memory.

    head: the model with its language-model head.

    BadInputError if transformers refuses the config or cannot build the model: a float where an
    integer belongs, an unknown activation, sizes that contradict each other.  The hint names the
    field if leaving it out helps.  MissingCapabilityError if it cannot load the quantisation here.
    """
    try:
        with refusals(f"the config of {repo_id}"), quiet_transformers():
            found = _parsed(config)
            model = None if found.get_text_config() is not found else _build(found, head=head)
    except _Headless:
        raise
    except BadInputError as error:
        if field := _refused_field(config, head=head):
            error.hint = f"It accepts the config without {field}.  {error.hint}"
        raise
    # a larger model's config, which transformers would complete with parts of its own choice
    if model is None:
        raise BadInputError(
            (
                f"{CONFIG} of {repo_id} has no text_config, where a {found.model_type} config "
                "describes its layers."
            ),
            "The checkpoint's config is damaged, or not of this model type.",
        )
    if quantization := getattr(found, "quantization_config", None):
        _check_quantization(dict(quantization), repo_id)
    return model.eval()


def _parsed(config: Mapping[str, Any]) -> PretrainedConfig:
    """As transformers reads it from a file; raises what that raises."""
    with tempfile.TemporaryDirectory(prefix="ssdprof-") as folder:
        (Path(folder) / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        found: PretrainedConfig = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    return found


def check_known(config: Mapping[str, Any], where: str) -> None:
    """BadInputError for a model type that the installed transformers does not have."""
    name = config["model_type"]
    if name not in transformers.CONFIG_MAPPING:
        why = "which the installed transformers does not know"
        if config.get("auto_map"):
            why = "whose code is in the repo itself; ssdprof runs no remote code"
        raise BadInputError(f"{where} is of type {shown(name)}, {why}.", SUPPORTED)


def check_known_quantization(config: Mapping[str, Any], label: str) -> None:
    """BadInputError for a quantisation that transformers would ignore with a warning."""
    codes = config["quantization_config"]
    with quiet_transformers():
        if quant_method(config) in (None, "mlx", "modelopt") or not (
            transformers.quantizers.AutoHfQuantizer.supports_quant_method(codes)
        ):
            raise refuse_quantization(codes, label)


def _check_quantization(found: dict[str, Any], repo_id: str) -> None:
    """MissingCapabilityError if transformers cannot load the quantisation here, which it says only
    with the weights.
    """
    with quiet_transformers():
        with refusals(f"the quantization_config of {repo_id}"):
            quantizer = transformers.quantizers.AutoHfQuantizer.from_config(
                found, pre_quantized=True
            )
        try:
            quantizer.validate_environment(device_map=None, weights_only=True)
        except Exception as error:  # of every class: each method has its own
            method = quantizer.quantization_config.quant_method
            raise MissingCapabilityError(
                f"{repo_id} is quantised by {getattr(method, 'value', method)}, and transformers "
                "cannot load that "
                f"here: {library_message(error)}.",
                "Install what is missing, or take the unquantised checkpoint.",
            ) from error


def _build(config: PretrainedConfig, *, head: bool = False) -> PreTrainedModel:
    if head and type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _Headless(
            f"transformers has no causal language model for {config.model_type}, only its layers.",
            "`ssdprof run` without --decode compares its operators; answers need a head.",
        )
    with torch.device("meta"):
        return (transformers.AutoModelForCausalLM if head else transformers.AutoModel).from_config(
            config
        )


def _refused_field(config: Mapping[str, Any], *, head: bool) -> str | None:
    """A field without which transformers accepts a refused config; None if none is found in
    time.
    """
    deadline = time.monotonic() + SEARCH_S
    for field in sorted(config.keys() - {"model_type"}):
        if time.monotonic() > deadline:
            break
        with quiet_transformers(), suppress(Exception):  # still refused
            _build(
                transformers.AutoConfig.for_model(
                    **{key: value for key, value in config.items() if key != field}
                ),
                head=head,
            )
            return f"{field} = {shown(config[field])}"
    return None


class Destination(NamedTuple):
    """Where transformers puts a stored weight.

    names: of the parameters.  whole: it becomes the one parameter as it is, without a conversion.
    """

    names: tuple[str, ...]
    whole: bool


def destinations(
    model: PreTrainedModel, keys: Iterable[str], key_mapping: Mapping[str, str]
) -> dict[str, Destination]:
    """Stored key -> its parameters of `model`, by transformers' own conversions; without keys that
    it leaves aside.

    key_mapping: renamings that come first, as `from_pretrained` takes them.
    """
    conversions = conversion_mapping.get_model_conversion_mapping(model, dict(key_mapping) or None)
    renamings = [one for one in conversions if isinstance(one, core_model_loading.WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, core_model_loading.WeightConverter)]
    targets = {source: one.target_patterns for one in converters for source in one.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    found = {}
    for key in sorted(keys):
        rename = partial(core_model_loading.rename_source_key, key)
        name, source = rename(renamings, converters, prefix, state)
        if name not in state and key in state:
            name, source = rename([], [], prefix, state)
        if name in state:
            first, *rest = targets[source] if source else [""]
            names = (name, *(name.replace(first, other) for other in rest))
            found[key] = Destination(names, source is None)
    return found


def missing(model: PreTrainedModel, found: Mapping[str, Destination]) -> set[str]:
    """Parameters that no stored weight becomes.  One of those that share their weights is
    enough.
    """
    there = {name for to in found.values() for name in to.names}
    shared = grouped(model.named_parameters(remove_duplicate=False), lambda pair: id(pair[1]))
    optional = model._keys_to_ignore_on_load_missing or ()
    lost = set()
    for pairs in shared.values():
        names = [name for name, _ in pairs]
        is_optional = any(re.search(pattern, names[0]) for pattern in optional)
        if there.isdisjoint(names) and not is_optional:
            lost.add(names[0])
    return lost


def accepts(config: Mapping[str, Any]) -> bool:
    """Whether transformers accepts a config as such."""
    with quiet_transformers(), suppress(Exception):  # of any class
        return bool(_parsed(config))
    return False


def _dtype_by_size(model: Model) -> str:
    """The dtype of a pickle, which has no header: its size shows whether a weight takes 4 bytes or
    2.
    """
    parameters = sum(one.numel() for one in model.on_meta.parameters())
    return "float32" if model.weight_bytes() > 3 * parameters else "bfloat16"


@contextmanager
def refusals(what: str) -> Iterator[None]:
    """Turn all errors of transformers on a user's file into BadInputError with its message.

    what: the file, for the message.  Errors of ssdprof, missing packages and full memory have their
    own messages.
    """
    try:
        yield
    except (SsdprofError, torch.OutOfMemoryError):
        raise
    except OSError as error:
        if error.errno not in _OF_MACHINE:
            raise failed_import(error) or _unusable(what, error) from error
        raise MissingCapabilityError(
            f"A temporary file for {what} cannot be written: {error.strerror}.",
            "Make room there or set TMPDIR to another folder.",
        ) from error
    except ImportError as error:
        raise MissingCapabilityError(
            f"transformers needs a missing package for {what}: {library_message(error)}.",
            "Install the package.",
        ) from error
    except Exception as error:  # the library may raise any class of error on the user's data
        # the second is PyTorch's
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise MissingCapabilityError(
                f"Main memory is too small for {what}.", "Take fewer layers."
            ) from error
        raise failed_import(error) or _unusable(what, error) from error


def _unusable(what: str, error: Exception) -> BadInputError:
    return BadInputError(
        f"transformers cannot use {what}: {library_message(error)}.",
        "The file is damaged, or the checkpoint is newer than the installed transformers.",
    )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress its bars, and warnings on unused weights of a cut model and unusual configs, which
    ssdprof checks.
    """
    logging: Any = transformers.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.ERROR)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


# --- mixers


@dataclass(frozen=True, eq=False)
class Mixer:
    """A module that calls an operator, and the function that it calls.

    From 5.15, every Mamba-2 and gated-delta-rule model of transformers calls its scan as a global
    function of the
    modeling file: a mixer is a module whose forward names that function in its bytecode.
    """

    name: str  # path in the model that was searched
    layer_index: int  # decoder layer
    operator: str
    module: nn.Module
    function: str  # name of the global
    namespace: dict[str, Any]  # globals of the modeling file

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the operator by name.  BadInputError if the module does not have them as
        attributes.
        """
        wanted = operators.get(self.operator).mixer_sizes
        found = {name: getattr(self.module, attribute, None) for name, attribute in wanted.items()}
        for name, size in found.items():
            if not isinstance(size, int) or not 1 <= size <= LONGEST_SEQLEN:
                raise refuse(
                    f"{self.name} ({type(self.module).__name__})", f"has {name} = {shown(size)}"
                )
        return found  # type: ignore[return-value]  # checked


def find_mixers(model: nn.Module, what: str = "") -> tuple[Mixer, ...]:
    """Every mixer of `model`, in the order of its decoder layers.  what: names the model in
    messages.

    Raises BadInputError if there is none, or if two share a decoder layer.
    """
    # The variants for a single token are other functions, which are not replaced.
    functions = {operators.get(name).binding.function: name for name in operators.names()}
    mixers: dict[int, Mixer] = {}
    for name, module in model.named_modules():
        forward = _forward(module)
        if forward is None:
            continue
        for function in functions.keys() & set(forward.__code__.co_names):
            index = layer_index(f"{name}.")
            if index is None:
                raise BadInputError(f"The mixer {name!r} is in no numbered decoder layer.")
            if index in mixers:
                raise BadInputError(
                    f"Decoder layer {index} has two mixers: {mixers[index].name} and {name}."
                )
            mixers[index] = Mixer(
                name, index, functions[function], module, function, forward.__globals__
            )
    if not mixers:
        parts = (
            part
            for name, part in model.named_modules()
            if re.fullmatch(r"[^\d]*\.\d+\.[^.]+", name)
        )
        kinds = dict.fromkeys(
            type(one).__name__ for one in parts if any(own.ndim > 1 for own in one.parameters())
        )
        raise BadInputError(
            f"{what or type(model).__name__} has no SSD or gated-delta-rule layer: its layers "
            "are of "
            f"{words(kinds or ['nothing with weights'])}.",
            SUPPORTED,
        )
    return tuple(mixers[index] for index in sorted(mixers))


def is_attention(module: nn.Module) -> bool:
    """Whether `module` computes attention by one of transformers' functions: its class's forward
    names their table.
    """
    forward = _forward(module)
    return forward is not None and "ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names


def _forward(module: nn.Module) -> FunctionType | None:
    """The forward that the model's author wrote: transformers wraps some in decorators.  None if it
    is not Python.
    """
    forward = inspect.unwrap(type(module).forward)
    return forward if isinstance(forward, FunctionType) else None


# --- places

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
        found: dict[str, Place] = accelerate.infer_auto_device_map(
            model, max_memory={"cpu": 0} | most, no_split_module_classes=kept_whole
        )
    if "disk" in found.values() and "disk" not in room:
        return None
    embedding = next(
        name for name, one in model.named_modules() if one is model.get_input_embeddings()
    )
    return found if place_of(f"{embedding}.weight", found) == next(iter(room)) else None


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
