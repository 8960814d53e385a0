"""Finds the checkpoint that the user named, and reads its config and layers.  Downloads small files only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ssdprof.checkpoint import original
from ssdprof.checkpoint.describe import Description, describe, read_config, refuse_quantization
from ssdprof.checkpoint.families import FamilyRow, family_named, known
from ssdprof.checkpoint.layer_dims import LayerDims
from ssdprof.checkpoint.local import LocalFolder
from ssdprof.checkpoint.names import DEMOS, close_names, expanded, is_folder, parse_repo
from ssdprof.checkpoint.source import CONFIG, TOKENIZER_FILES, FileInfo, Source, tokenizer_files
from ssdprof.checkpoint.weights import INDEX, Weights, find_weights, usual_dtype
from ssdprof.core.subject import CheckpointRef, LayerRef
from ssdprof.errors import BadInputError, ModelUnavailableError

DEMO_FOLDERS = {name: Path(__file__).parent / name for name in DEMOS}
MODELOPT_CONFIG = "hf_quant_config.json"  # NVIDIA's tool writes it; config.json may not mention the quantisation


@dataclass(frozen=True)
class Located:
    """A checkpoint that is available.

    config: the raw config.json.  tokenizer: hub id or folder that the user named.
    notes: sentences for the user before the run, such as which repo a family name stands for.
    """

    ref: CheckpointRef
    config: Mapping[str, Any]
    description: Description
    source: Source
    tokenizer: str | None = None
    notes: tuple[str, ...] = ()

    def dims(self, layer: LayerRef) -> LayerDims:
        """Sizes of `layer`'s operator; BadInputError when the model has no such layer."""
        if layer not in self.ref.layers:
            raise BadInputError(
                f"{self.ref.repo_id} has no SSD or gated-delta-rule layer {layer.name}.",
                f"Layers with the operator: {', '.join(str(there.index) for there in self.ref.layers)}.",
            )
        return self.description.dims  # every supported model type has one size for all layers

    @cached_property
    def weights(self) -> Weights:
        """The files of the weights.  Reads the index, if there is one."""
        return find_weights(self.source, is_original=self.description.original)

    @cached_property
    def tokenizer_source(self) -> Source | None:
        """The source of the tokenizer; None if the user named none and the checkpoint has none.

        ModelUnavailableError or BadInputError when the named one is not available.
        """
        named = self.tokenizer
        if named is None:
            if tokenizer_files(self.source):
                return self.source
            if not self.description.original:
                if not self.source.complete:
                    self.source.path(TOKENIZER_FILES[0])  # raises: the hub may have it, but the cache does not
                return None
            named = original.DEFAULT_TOKENIZER
        if not named.strip():
            raise BadInputError(
                "The tokenizer's name is empty.", "Name a hub repo (org/name), a folder, demo or demo-gdn."
            )
        found = _local(named) or _open_tokenizer(named)
        if not tokenizer_files(found):
            raise BadInputError(f"{found.label} holds no tokenizer.", "Name another one with --tokenizer.")
        return found

    def files(self, deepest_layer: int | None = None, *, head: bool = False) -> tuple[FileInfo, ...]:
        """Every file that running layers 0 to `deepest_layer` needs (all layers for None), tokenizer included.

        head: include the language-model head.

        Files of a tokenizer from another repo are prefixed with that repo's name.
        """
        names = [CONFIG]
        if self.weights.shards is not None:
            names.append(INDEX)
        names += self.weights.files(self.description.depth(deepest_layer), head=head)
        infos = [_file_info(self.source, name) for name in names]
        if self.tokenizer_source is not None:
            prefix = "" if self.tokenizer_source is self.source else f"{self.tokenizer_source.label}/"
            for name in tokenizer_files(self.tokenizer_source):
                info = _file_info(self.tokenizer_source, name)
                infos.append(info._replace(name=prefix + name))
        return tuple(infos)

    @cached_property
    def dtype(self) -> str | None:
        """The dtype in which the weights are loaded, named as in torch: that of the config, or else of most weights.

        None if neither is known: a pickle has no header.
        """
        for key in ("dtype", "torch_dtype"):
            if (named := self.description.config.get(key)) is not None:
                return named if isinstance(named, str) else None  # transformers will say what is wrong with it
        return None if self.weights.pickled else usual_dtype(self.weights.tensors(self.description.depth(0)).values())

    def weight_bytes(self, deepest_layer: int | None = None, *, head: bool = False, dtype: str | None = None) -> int:
        """Bytes, once loaded, of the weights of layers 0 to `deepest_layer` and of those outside of layers.

        head: also of the language-model head, where it has weights of its own.
        dtype: in which they are loaded; None: their own.

        Read from the headers of safetensors; for a pickle the size of the whole file.
        """
        return self.weights.bytes(self.description.depth(deepest_layer), dtype or self.dtype, head=head)


RANDOM_WEIGHTS = "ssdprof_random_weights"  # a config's key, as benchmarks/make_random_checkpoint.py writes it


def locate(model: str, *, revision: str | None = None, tokenizer: str | None = None) -> Located:
    """Find the checkpoint that `model` names: a demo, a local folder, a family name or a hub id, in this order.

    revision: branch, tag, commit or refs/pr/N on the hub; resolved to a commit once.
    tokenizer: hub id or folder to take the tokenizer from; by default the checkpoint's own.

    ModelUnavailableError when it is not available; BadInputError if ssdprof cannot measure it.
    """
    if not model.strip():
        raise BadInputError("The model's name is empty.", "Name a hub repo (org/name), a folder, demo or demo-gdn.")
    family = None
    notes: tuple[str, ...] = ()
    source: Source | None = _local(model)
    if source is not None:
        if revision is not None:
            raise BadInputError(f"{model} is local and has no revisions.", "Leave out --revision, or name a hub repo.")
    else:
        name = parse_repo(model, revision)
        if (demo := name.repo_id.casefold()) in DEMOS:
            raise BadInputError(
                f"There is no model {model}; a model that ships with ssdprof is {demo}.", f"Name {demo}."
            )
        family = family_named(name.repo_id)
        source = _open_repo(family.flagship if family and family.flagship else name.repo_id, name.revision)
        if family:
            notes = (_family_note(model, source.label, family),)
    config, description = _describe(source)
    ref = CheckpointRef(
        requested=model,
        source="demo" if model in DEMOS else "local" if source.revision is None else "hub",
        repo_id=source.label,
        revision=source.revision,
        model_type=description.model_type,
        layers=description.layers,
        layer_count=description.layer_count,
        siblings=tuple(c.repo for c in family.checkpoints if c.repo != source.label) if family else (),
        quantization=description.quantization,
        trained_context=_trained_context(source.label, description),
        random_weights=config.get(RANDOM_WEIGHTS) is True,
    )
    return Located(ref, config, description, source, tokenizer, notes)


def _local(name: str) -> Source | None:
    """A demo model or a local folder; None for a name on the hub."""
    if name in DEMOS:
        return LocalFolder(DEMO_FOLDERS[name], name)
    return LocalFolder(expanded(name)) if is_folder(name) else None


def _open_tokenizer(typed: str) -> Source:
    from ssdprof.checkpoint.hub import HubRepo

    name = parse_repo(typed, None)
    return HubRepo(name.repo_id, name.revision, first="tokenizer_config.json")


def _open_repo(repo_id: str, revision: str | None) -> Source:
    from ssdprof.checkpoint.hub import HubRepo
    from ssdprof.checkpoint.hub_errors import NotCachedError, RepoNotFoundError
    from ssdprof.checkpoint.suggest import similar_repos

    try:
        return HubRepo(repo_id, revision)
    except RepoNotFoundError as error:
        if similar := list(dict.fromkeys([*close_names(repo_id), *similar_repos(repo_id)])):
            hint = f"Repos with SSD or GDN layers and a name like it: {', '.join(similar)}."
            raise ModelUnavailableError(error.message, hint) from None
        raise
    except (NotCachedError, BadInputError) as error:
        if (similar := close_names(repo_id)) and repo_id not in similar:
            error.hint = f"Similar names: {', '.join(similar)}.  {error.hint}"
        raise


def _describe(source: Source) -> tuple[dict[str, Any], Description]:
    if CONFIG not in source.sizes:
        raise BadInputError(
            f"{source.label} has no {CONFIG}.", "Name a folder that holds a checkpoint in transformers' format."
        )
    where = f"{CONFIG} of {source.label}"
    config = read_config(source.path(CONFIG), where)
    description = describe(config, where)
    if MODELOPT_CONFIG in source.sizes and description.quantization is None:
        raise refuse_quantization("modelopt", source.label)
    return config, description


def _trained_context(repo_id: str, description: Description) -> int | None:
    checkpoint = known(repo_id)
    return (checkpoint and checkpoint.trained_context) or description.max_positions


def _family_note(typed: str, taken: str, family: FamilyRow) -> str:
    others = ", ".join(c.repo for c in family.checkpoints if c.repo != taken)
    return f"{typed} is a family of models, not a repo: taking {taken}. Others: {others}."


def _file_info(source: Source, name: str) -> FileInfo:
    size = source.sizes.get(name)
    if size is None:
        size = source.path(name).stat().st_size  # not listed: a request for it raises the reason
    return FileInfo(name, size, source.cached(name))
