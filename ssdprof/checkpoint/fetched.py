"""Downloads and checks a located checkpoint's files, and makes the folders from which it is loaded."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ssdprof.checkpoint.definition import empty_model
from ssdprof.checkpoint.describe import Description
from ssdprof.checkpoint.located import Located
from ssdprof.checkpoint.sizes import shown
from ssdprof.checkpoint.source import CONFIG, StoredTensor, tokenizer_files
from ssdprof.checkpoint.view import cut_config, link_all, link_weights, write_json
from ssdprof.checkpoint.weights import CODES
from ssdprof.core.words import size_words
from ssdprof.errors import BadInputError, MissingCapabilityError
from ssdprof.schema import CheckpointRef

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class LocalCheckpoint:
    """A checkpoint on this machine, cut to its first `depth` decoder layers.

    folder: loads with stock transformers, except for the original format, which `load_model` reads.  It is temporary
    and goes when this object does.
    tensors: the needed weights as stored, by name; None for a pickle, which has no header.
    head: whether the language-model head is part of it.
    """

    ref: CheckpointRef
    description: Description
    folder: Path
    depth: int
    tensors: dict[str, StoredTensor] | None
    head: bool = False


@dataclass(frozen=True, eq=False)
class LocalTokenizer:
    """A checkpoint's tokenizer on this machine.

    folder: for AutoTokenizer.  It is temporary and is removed with this object.
    name: hub id or folder name.
    """

    folder: Path
    name: str


def fetch_tokenizer(located: Located) -> LocalTokenizer | None:
    """Download the tokenizer, which is small, so that an invalid prompt is found before the weights are downloaded.

    None if there is none.  Raises what `fetch` raises.
    """
    source = located.tokenizer_source
    if source is None:
        return None
    paths = {name: source.path(name) for name in tokenizer_files(source)}
    with ExitStack() as undo:
        with _temporary_folder_errors(located.ref.repo_id):
            folder = _temporary_folder(undo)
            link_all(folder, paths.items())
            if source is located.source:  # AutoTokenizer's source of the class if the tokenizer's own config names none
                write_json(folder / CONFIG, cut_config(located.description, located.description.layer_count))
        undo.pop_all()
    local = LocalTokenizer(folder, source.label)
    weakref.finalize(local, shutil.rmtree, folder, ignore_errors=True)
    return local


def fetch(
    located: Located,
    *,
    deepest_layer: int | None = None,
    head: bool = False,
    progress: Callable[[str], None] | None = None,
) -> LocalCheckpoint:
    """Download and check the files that layers 0 to `deepest_layer` need (all layers for None).

    head: with the language-model head.
    `progress` is called with one line before a download; the hub's client draws its bars on stderr.

    BadInputError: transformers cannot use the config, which is raised before any large download; or the weights are
    codes, and the config names no quantisation.
    ModelUnavailableError: a file is not available, is truncated or corrupt, or lacks weights that it should hold.
    MissingCapabilityError: no room for it on the disk, or no permission.
    """
    description, depth = located.description, located.description.depth(deepest_layer)
    repo_id = located.ref.repo_id
    with ExitStack() as undo:
        with _temporary_folder_errors(repo_id):
            folder = _temporary_folder(undo)
            write_json(folder / CONFIG, cut_config(description, depth, located.dtype))
        empty_model(folder, repo_id)  # refuse an unusable config before the download
        files, size = check_space(located, deepest_layer, head=head)
        if files and progress is not None:
            progress(f"Downloading {files} files, {size_words(size)}, of {repo_id}")

        weights = located.weights
        paths = {name: located.source.path(name) for name in weights.files(depth, head=head)}
        tensors = None if weights.pickled else weights.tensors(depth, head=head)
        _refuse_codes(located, deepest_layer, head)

        with _temporary_folder_errors(repo_id):
            link_weights(folder, depth, paths, weights.shards, head=head)
        undo.pop_all()
    local = LocalCheckpoint(located.ref, description, folder, depth, tensors, head)
    weakref.finalize(local, shutil.rmtree, folder, ignore_errors=True)
    return local


def meta_model(
    located: Located, *, deepest_layer: int | None = None, head: bool = False, dtype: str | None = None
) -> PreTrainedModel:
    """The model of `fetch` and `load_model` on the meta device: shapes and dtypes.  Downloads nothing.

    dtype: of the weights, named as in torch; None: the checkpoint's own.

    BadInputError for what `fetch` would refuse.
    """
    description, repo_id = located.description, located.ref.repo_id
    with ExitStack() as undo:
        with _temporary_folder_errors(repo_id):
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="ssdprof-")))
            wanted = dtype or (_dtype_by_size(located) if located.weights.pickled else located.dtype)
            write_json(folder / CONFIG, cut_config(description, description.depth(deepest_layer), wanted))
        _refuse_codes(located, deepest_layer, head)
        return empty_model(folder, repo_id, head=head).eval()


def _refuse_codes(located: Located, deepest_layer: int | None, head: bool) -> None:
    """BadInputError for weights of 8 bit and less whose config names no quantisation: codes would load as values."""
    if located.weights.pickled or located.ref.quantization is not None:
        return
    tensors = located.weights.tensors(located.description.depth(deepest_layer), head=head)
    for name, tensor in tensors.items():
        if tensor.dtype in CODES:
            raise BadInputError(
                f"{located.ref.repo_id} stores codes, such as {shown(name)} in {tensor.dtype}, and its config names no "
                "quantisation.",
                "Take the config.json that came with these weights, or the unquantised checkpoint.",
            )


def _dtype_by_size(located: Located) -> str:
    """The dtype of a pickle, which has no header: its size shows whether a weight takes 4 bytes or 2."""
    parameters = meta_model(located, dtype="float32").parameters()
    return "float32" if located.weight_bytes() > 3 * sum(one.numel() for one in parameters) else "bfloat16"


def check_space(located: Located, deepest_layer: int | None = None, *, head: bool = False) -> tuple[int, int]:
    """The number of files that `fetch` would download, and their bytes.

    MissingCapabilityError unless the hub's cache has room for them.
    """
    from ssdprof.checkpoint.hub import HubRepo

    missing = [info for info in located.files(deepest_layer, head=head) if not info.cached]
    need = sum(info.size_bytes for info in missing)
    if missing and isinstance(located.source, HubRepo):
        located.source.check_space(need)
    return len(missing), need


def _temporary_folder(undo: ExitStack) -> Path:
    """A new temporary folder, which `undo` removes."""
    folder = Path(tempfile.mkdtemp(prefix="ssdprof-"))
    undo.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextmanager
def _temporary_folder_errors(repo_id: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MissingCapabilityError(
            f"The temporary folder for {repo_id} cannot be written: {error.strerror or error}.",
            "Make room there or set TMPDIR to another folder.",
        ) from None
