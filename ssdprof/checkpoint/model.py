"""Opens the checkpoint that the user named: its files, its config, and its layers with an operator.

Imports no torch until the layers are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ssdprof import operators
from ssdprof.checkpoint import config as configs
from ssdprof.checkpoint.config import ModelConfig
from ssdprof.checkpoint.hub import CONFIG, TOKENIZER_FILES, HubRepo, Source, parse_repo
from ssdprof.checkpoint.names import (
    DEMO_FOLDERS,
    KNOWN,
    Family,
    close_names,
    family_named,
    is_folder,
    shown,
)
from ssdprof.checkpoint.weights import (
    INDEX,
    SINGLE,
    Weights,
    find_weights,
    layer_index,
    usual_dtype,
)
from ssdprof.core.target import DECODED_ON_LOAD, CheckpointRef, LayerRef, PlannedFile
from ssdprof.core.words import words
from ssdprof.errors import BadInputError, SsdprofError
from ssdprof.files import read_object
from ssdprof.operators.late import lazy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ssdprof.checkpoint import meta, mixers
    from ssdprof.checkpoint.mixers import Mixer
else:
    # These modules import torch and transformers.  A wrong name is refused before that.
    meta = lazy("ssdprof.checkpoint.meta")
    mixers = lazy("ssdprof.checkpoint.mixers")

_ADAPTER = "adapter_config.json"
_NAMES = "Name a hub repo (org/name), a folder, demo, demo-gdn or demo-kda."  # a hint


@dataclass(frozen=True, kw_only=True)
class Model:
    """A checkpoint that exists.  Its layers are those of the model that transformers builds from
    its config, without weights.

    requested: the model as the user named it.
    source: the files.
    config: the config of the language model, without that of a larger model around it; converted
        from the original format, if the checkpoint has that.  Its quantization_config may come from
        another file: see `config.describe`.
    model_type: as config.json says, of the larger model if there is one; "mamba2" for the original
        format.
    nested: whether the language model is part of a larger model.
    original: whether the checkpoint has the original format of state-spaces/mamba2-*.
    named_quantization: the quantisation that the config names; None: it names none.
    random_weights: whether the weights are random numbers, as the config says.
    tokenizer: hub id or folder that the user named; None: the user named none.
    siblings: other repos of the family that the user named; empty if the user named no family.
    notes: sentences for the user before the run, such as which repo a family name means.
    adapter: name of a file of an adapter beside the weights; empty: there is none.
    """

    requested: str
    source: Source
    config: ModelConfig
    model_type: str
    nested: bool
    original: bool
    named_quantization: str | None
    random_weights: bool
    tokenizer: str | None = None
    siblings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    adapter: str = ""

    @property
    def caveats(self) -> Iterator[str]:
        """Sentences for the report on files of the checkpoint that are not read."""
        if self.adapter:
            yield (
                f"{self.adapter} of {self.source.label} is not applied: these are the layers of "
                "the model without its adapter."
            )
        if SINGLE in self.weights.outside_index():
            yield (
                f"{SINGLE} of {self.source.label} is not read: {INDEX} places the weights in "
                f"{words(self.part(None).files)}."
            )

    @property
    def where(self) -> str:
        """The config's name in messages: "config.json of org/name"."""
        return f"{CONFIG} of {self.source.label}"

    @cached_property
    def quantization(self) -> str | None:
        """The quantisation of the stored weights.

        None if the config names none, or if the weights were decoded, and only the config still
        names one.
        """
        named = self.named_quantization
        return named if named is not None and self.weights.has_codes else None

    @cached_property
    def on_meta(self) -> PreTrainedModel:
        """The whole base model on the meta device, as if its weights were not quantised.

        Raises what `meta.build` raises, and BadInputError for a model type that transformers does
        not know, and for weights in codes with a quantisation that it does not know.
        """
        meta.check_known(self.config, self.where)
        if self.config.get("quantization_config") and self.weights.has_codes:
            meta.check_known_quantization(self.config, self.source.label)
        return meta.build(self.cut_config(), self.source.label)

    def cut_on_meta(
        self, *, deepest_layer: int | None = None, head: bool = False, dtype: str | None = None
    ) -> PreTrainedModel:
        """The model that `load.fetch` and `load.load_model` would load, on the meta device: with
        its shapes and dtypes, but without weights.  Downloads no weights.

        Parameters of the operator that `load_model` keeps in fp32 have the dtype of the others.
        deepest_layer, head: see `load.fetch`.
        dtype: the dtype of the weights, named as in torch; None: the checkpoint's own.
        """
        wanted = dtype or (self._dtype_by_size if self.weights.pickled else self.dtype)
        config = self.load_config(self.depth(deepest_layer), wanted)
        return meta.build(config, self.source.label, head=head)

    @property
    def _dtype_by_size(self) -> str:
        """The dtype of the weights in a pickle, which has no header: the size of the file shows
        whether a weight takes 4 bytes or 2.
        """
        parameters = sum(parameter.numel() for parameter in self.on_meta.parameters())
        return "float32" if self.weight_bytes() > 3 * parameters else "bfloat16"

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """The modules of `on_meta` that call an operator.  BadInputError if there are none."""
        return mixers.find_mixers(self.on_meta, f"{self.where}, of type {shown(self.model_type)},")

    @cached_property
    def layers(self) -> tuple[LayerRef, ...]:
        """The layers with an operator, named by the path of the mixer in the full model.  In a
        larger model, the path to the language model is the usual one, whatever the stored keys are.
        """
        prefix = "model.language_model" if self.nested else self.on_meta.base_model_prefix
        return tuple(
            LayerRef(
                index=mixer.layer_index, name=f"{prefix}.{mixer.name}", operator=mixer.operator
            )
            for mixer in self.mixers
        )

    @cached_property
    def layer_count(self) -> int:
        """The number of all decoder layers."""
        return 1 + max(layer_index(name) or 0 for name, _ in self.on_meta.named_parameters())

    @property
    def _origin(self) -> Literal["demo", "local", "hub"]:
        """Where the checkpoint comes from."""
        if self.requested in DEMO_FOLDERS:
            return "demo"
        return "local" if self.source.revision is None else "hub"

    @cached_property
    def ref(self) -> CheckpointRef:
        """The checkpoint as reports record it."""
        checkpoint = KNOWN.get(self.source.label.casefold())
        trained_context = checkpoint.trained_context if checkpoint else None
        return CheckpointRef(
            requested=self.requested,
            source=self._origin,
            repo_id=self.source.label,
            revision=self.source.revision,
            model_type=self.model_type,
            layers=self.layers,
            layer_count=self.layer_count,
            siblings=self.siblings,
            quantization=self.quantization,
            trained_context=trained_context or self._number("max_position_embeddings"),
            random_weights=self.random_weights,
        )

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids; None if the config does not state it."""
        return self._number("vocab_size")

    def _number(self, key: str) -> int | None:
        """The positive integer that the config has with this key; None if it has none."""
        value = self.config.get(key)
        return value if isinstance(value, int) and value > 0 else None

    def sizes(self, layer: LayerRef) -> dict[str, int]:
        """The sizes of the operator of a layer, which is one of `layers`, by name."""
        return self.mixers[self.layers.index(layer)].sizes

    def size_words(self, layer: LayerRef) -> str:
        """The sizes of a layer's operator in words: "128x64, N 128, G 1, chunk 256"."""
        return operators.get(layer.operator).words.format(**self.sizes(layer))

    def depth(self, deepest_layer: int | None) -> int:
        """The number of decoder layers to load so that layer `deepest_layer` (None: the last one)
        can run.

        It is larger than deepest_layer + 1 if the model definition needs an attention layer, and
        the first one comes later.  Raises BadInputError if the model has no layer `deepest_layer`.
        """
        if deepest_layer is None:
            return self.layer_count
        if not 0 <= deepest_layer < self.layer_count:
            last = self.layer_count - 1
            indices = ", ".join(str(layer.index) for layer in self.layers)
            raise BadInputError(
                f"There is no layer {deepest_layer}: the model's layers are 0 to {last}.",
                f"Layers with the operator: {indices}.",
            )
        wanted = deepest_layer + 1
        kinds = getattr(self.on_meta.config, "layer_types", None) or []
        if "full_attention" in kinds[wanted:] and not meta.accepts(self.cut_config(wanted)):
            index_of_attention: int = kinds.index("full_attention", wanted)
            return index_of_attention + 1
        return wanted

    def cut_config(self, depth: int | None = None, dtype: str | None = None) -> ModelConfig:
        """The config for transformers with the first `depth` layers (None: all), and this dtype of
        weights (None: the config's).
        """
        config = dict(self.config)
        if depth is not None and not any(config.get(key) for key in configs.PER_LAYER):
            # The model definition may compute the kinds of its layers, as Zamba2's does.
            whole_config = self.on_meta.config.to_dict()
            config |= {key: whole_config[key] for key in configs.PER_LAYER if key in whole_config}
        return configs.cut_config(config, depth, dtype=dtype)

    def load_config(self, depth: int, dtype: str | None) -> ModelConfig:
        """The config of `cut_config`, with the quantisation of the stored weights.

        dtype: None: the config's.
        """
        config = self.cut_config(depth, dtype)
        if self.quantization is not None:
            config["quantization_config"] = dict(self.config["quantization_config"])
            if self.quantization in DECODED_ON_LOAD:
                # With weights in 16 bits, the operator's inputs do not depend on the GPU's products
                # of fp8 matrices.
                config["quantization_config"]["dequantize"] = True
        return config

    @cached_property
    def weights(self) -> Weights:
        """The files of the weights.  Reads the index, if there is one."""
        return find_weights(self.source, is_original=self.original)

    def part(self, deepest_layer: int | None, *, head: bool = False) -> Weights:
        """The weights that layers 0 to `deepest_layer` need (None: all), with the language-model
        head if `head` is set.
        """
        return replace(self.weights, depth=self.depth(deepest_layer), head=head)

    @cached_property
    def dtype(self) -> str | None:
        """The dtype in which the weights are loaded, named as in torch: the one that the config
        names, or else that of most elements of layer 0 and of the weights outside of layers.

        None if neither is known, because a pickle has no header or no weight is a float, and if the
        config names it by no string.
        """
        for key in ("dtype", "torch_dtype"):
            named = self.config.get(key)
            if named is not None:
                # transformers refuses a value that is no string
                return named if isinstance(named, str) else None
        return None if self.weights.pickled else usual_dtype(self.part(0).tensors.values())

    def weight_bytes(
        self, deepest_layer: int | None = None, *, head: bool = False, dtype: str | None = None
    ) -> int:
        """Bytes in memory of the weights of layers 0 to `deepest_layer` (None: all), and of those
        outside of layers.

        head: also of the language-model head, if it is stored.
        dtype: the dtype in which they are loaded, named as in torch; None: the checkpoint's own.

        The headers of safetensors files are read.  For a pickle it is the size of the file, with
        all layers and the head.
        """
        return self.part(deepest_layer, head=head).bytes(dtype or self.dtype)

    @cached_property
    def tokenizer_source(self) -> Source | None:
        """The files among which the tokenizer is; None if the user named none and the checkpoint
        has none.  For the original format it is that of `DEFAULT_TOKENIZER`.

        Raises BadInputError if the named one has an empty name or no vocabulary, and what `Source`
        and `HubRepo` raise if it is not available, or if the hub, which may have the checkpoint's,
        is unreachable and none is cached.
        """
        named = self.tokenizer
        if named is None:
            if self.source.tokenizer_files():
                return self.source
            if not self.original:
                if not self.source.complete:
                    # The hub may have a tokenizer that is not cached: this raises the error.
                    self.source.path(TOKENIZER_FILES[0])
                return None
            named = configs.DEFAULT_TOKENIZER
        if not named.strip():
            raise BadInputError("The tokenizer's name is empty.", _NAMES)
        source = _local(named) or HubRepo(*parse_repo(named, None), first="tokenizer_config.json")
        if not source.tokenizer_files():
            raise BadInputError(
                f"{source.label} holds no tokenizer.", "Name another one with --tokenizer."
            )
        return source

    def files(
        self, deepest_layer: int | None = None, *, head: bool = False
    ) -> tuple[PlannedFile, ...]:
        """Every file that a run of layers 0 to `deepest_layer` (None: all) needs, with those of the
        tokenizer, and of the language-model head if `head` is set; without the small files that
        `open_model` reads beside config.json.

        Names of a tokenizer's files from another repo begin with the name of that repo.
        """
        names = [CONFIG]
        if self.weights.shards is not None:
            names.append(INDEX)
        names += self.part(deepest_layer, head=head).files
        planned = [self.source.planned(name) for name in names]
        tokenizer = self.tokenizer_source
        if tokenizer is not None:
            prefix = "" if tokenizer is self.source else f"{tokenizer.label}/"
            for name in tokenizer.tokenizer_files():
                file = tokenizer.planned(name)
                planned.append(file.model_copy(update={"name": prefix + file.name}))
        return tuple(planned)


def open_model(named: str, *, revision: str | None = None, tokenizer: str | None = None) -> Model:
    """The checkpoint that `named` means: a demo, a local folder, a family name or a hub id, in this
    order.

    Downloads config.json, and if they exist a description of the quantisation and, for an error,
    an adapter's config.  Imports no torch.

    revision: branch, tag, commit or refs/pr/N on the hub; None: the main branch.
    tokenizer: hub id or folder of the tokenizer; None: the checkpoint's own.

    Raises what `_find` raises if the checkpoint is not available, and BadInputError if it is an
    adapter alone, if it has no config.json, or if its config shows that ssdprof cannot measure it.
    """
    source, family = _find(named, revision)
    adapter = next((name for name in source.sizes if name.startswith("adapter_model.")), "")
    if adapter and not any(
        name.startswith(("model.", "model-", "pytorch_model")) for name in source.sizes
    ):
        raise BadInputError(
            f"{source.label} is a LoRA adapter for {_base_of(source)}.",
            "Merge it into its base model first.",
        )
    if CONFIG not in source.sizes:
        raise BadInputError(
            f"{source.label} has no {CONFIG}.",
            source.inner_checkpoints()
            or "Name a folder that holds a checkpoint in transformers' format.",
        )
    modelopt = None
    if configs.MODELOPT_CONFIG in source.sizes:
        modelopt = source.path(configs.MODELOPT_CONFIG)
    siblings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    if family:
        siblings = tuple(
            checkpoint.repo for checkpoint in family.checkpoints if checkpoint.repo != source.label
        )
        notes = (
            f"{named} is a family of models, not a repo: taking {source.label}. Others: "
            f"{', '.join(siblings)}.",
        )
    return Model(
        requested=named,
        source=source,
        tokenizer=tokenizer,
        siblings=siblings,
        notes=notes,
        adapter=adapter,
        **configs.describe(source.path(CONFIG), f"{CONFIG} of {source.label}", modelopt),
    )


def _find(named: str, revision: str | None) -> tuple[Source, Family | None]:
    """The files of the checkpoint, and the family if `named` is a family's name.

    Raises BadInputError for an empty name or revision, for a revision of a demo or a local folder,
    for a demo in other capitals, and what `Source`, `parse_repo` and `HubRepo` raise.
    """
    if not named.strip():
        raise BadInputError("The model's name is empty.", _NAMES)
    if revision is not None and not revision.strip():
        raise BadInputError(
            "The revision is empty.", "Name a branch, a tag or a commit, or leave out --revision."
        )
    if source := _local(named):
        if revision is not None:
            raise BadInputError(
                f"{named} is local and has no revisions.",
                "Leave out --revision, or name a hub repo.",
            )
        return source, None
    repo_id, revision = parse_repo(named, revision)
    demo = repo_id.casefold()
    if demo in DEMO_FOLDERS:  # with other capitals, or with a revision
        raise BadInputError(
            f"There is no model {named}; a model that ships with ssdprof is {demo}.",
            f"Name {demo}.",
        )
    family = family_named(repo_id)
    if family and family.flagship:
        repo_id = family.flagship
    return _open_repo(repo_id, revision), family


def _base_of(source: Source) -> str:
    """The name of the model to which an adapter belongs, from the adapter's config."""
    with suppress(SsdprofError):  # the config is missing or damaged
        if base := read_object(source.path(_ADAPTER), _ADAPTER, "").get("base_model_name_or_path"):
            return f"{shown(base)} ({_ADAPTER})"
    return "another model"


def _local(name: str) -> Source | None:
    """The files of a demo model or of a local folder; None for a name on the hub."""
    if name in DEMO_FOLDERS:
        return Source(DEMO_FOLDERS[name], name)
    return Source(Path(name).expanduser()) if is_folder(name) else None


def _open_repo(repo_id: str, revision: str | None) -> Source:
    """The files of a repo on the hub.  If that fails for a repo that is not in `KNOWN`, the hint
    lists similar names.
    """
    try:
        return HubRepo(repo_id, revision)
    except SsdprofError as error:
        similar = [] if repo_id.casefold() in KNOWN else close_names(repo_id)
        if similar:
            error.hint = f"Similar names: {', '.join(similar)}.  {error.hint}"
        raise
