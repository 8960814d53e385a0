"""The files and tensors of a checkpoint's weights, checked before they are read, and those of them
that the first layers need.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from ssdprof.checkpoint.config import PICKLE
from ssdprof.checkpoint.hub import Source, TensorInfo, fetch_again
from ssdprof.checkpoint.names import shown
from ssdprof.errors import BadInputError, ModelUnavailableError, library_message, unreadable
from ssdprof.files import read_json

# bytes of an element, by dtype, of the dtypes in which a model is loaded
SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# Dtypes of safetensors, and their names in torch.  Tensors of other dtypes are codes or indices.
FLOATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# dtypes that are cast, or decoded, to that of the model when it is loaded
_CAST = FLOATS.keys() | {"F8_E4M3", "F8_E5M2"}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

MOST_LAYERS = 1 << 16  # more than any model has
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# key of the language-model head, also in a larger model: "language_model.lm_head.weight"
_HEAD = re.compile(r"(?:^|\.)lm_head\.")
# keys of weights that are never computed with: prediction of several tokens, images and audio
_UNUSED = re.compile(
    r"^(?:mtp|(?:model\.)?(?:visual|vision_tower|audio_tower|multi_modal_projector))\."
)


def layer_index(name: str) -> int | None:
    """The index of the decoder layer to which a parameter or module belongs: 3 for
    "model.layers.3.mamba.norm"; None if it belongs to none.
    """
    match = _LAYER.search(name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class Weights:
    """The weights of one checkpoint that its first decoder layers need.

    shards: the file of each tensor, from the index; None: there is a single file.
    single: the single file, which is a pickle only in the original format; None: there is an index.
    depth: number of the first layers; weights outside of layers are needed, too.
    head: whether the language-model head is needed.
    """

    source: Source
    shards: Mapping[str, str] | None
    single: str | None
    depth: int = MOST_LAYERS
    head: bool = False

    @property
    def pickled(self) -> bool:
        """Whether the weights are in a pickle."""
        return self.single == PICKLE

    def needs(self, key: str) -> bool:
        """Whether the weight `key` is needed."""
        if _UNUSED.match(key):
            return False
        if _HEAD.search(key):
            return self.head
        layer = layer_index(key)
        return layer is None or layer < self.depth

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the needed files, sorted."""
        if self.single is not None:
            return (self.single,)
        return tuple(sorted(set(self.needed_shards.values())))

    @property
    def needed_shards(self) -> dict[str, str]:
        """The file of each needed tensor, from the index; empty if there is no index."""
        return {key: file for key, file in (self.shards or {}).items() if self.needs(key)}

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """The needed tensors by key, with their dtypes and shapes, from the headers of the files.

        On the hub this takes a few requests for each file, and no download.  If several files have
        a tensor, the one counts in which the index places it.  Not for a pickle, which has no
        header.

        Raises ModelUnavailableError if a file lacks a needed tensor that the index places in it,
        and BadInputError if two files have a needed tensor that is not in the index; and what
        `Source.header` raises, for a file that is missing or damaged.
        """
        assert not self.pickled, "a pickle has no header"
        tensors: dict[str, TensorInfo] = {}
        needed = self.needed_shards
        holder: dict[str, str] = {}  # key -> the file that has the tensor
        for file in self.files:
            header = self.source.header(file)
            missing = sorted(key for key in needed if needed[key] == file and key not in header)
            if missing:
                raise ModelUnavailableError(
                    f"{file} lacks {len(missing)} of the weights that the index places in it, such "
                    f"as {shown(missing[0])}.",
                    "The file and the index are of different revisions; fetch both again.",
                )
            for key in header:
                if not self.needs(key) or needed.get(key, file) != file:
                    continue
                if key in holder:
                    raise BadInputError(
                        f"{holder[key]} and {file} both hold {shown(key)}, and {INDEX} does not "
                        "say which one counts.",
                        "Add it to the index, or fetch the checkpoint again.",
                    )
                holder[key] = file
                tensors[key] = header[key]
        return tensors

    def misplaced(self, file: str) -> set[str]:
        """The keys of tensors in `file` that the index places in another file: older copies.  Empty
        without an index.
        """
        if self.shards is None:
            return set()
        return {key for key in self.source.header(file) if self.shards.get(key, file) != file}

    def outside_index(self) -> tuple[str, ...]:
        """The names of safetensors files that the index does not name, which are not read.  Empty
        without an index.
        """
        if self.shards is None:
            return ()
        unused = self.source.sizes.keys() - set(self.shards.values())
        return tuple(sorted(name for name in unused if name.endswith(".safetensors")))

    @property
    def has_codes(self) -> bool:
        """Whether any tensor of the checkpoint, needed or not, is stored as codes: in integers or
        in 8 bits and less.  True for a pickle, which has no header to tell.

        Reads the headers of all files, up to the first such tensor.
        """
        if self.pickled:
            return True
        files = {self.single} if self.single else set((self.shards or {}).values())
        headers = map(self.source.header, sorted(files))
        return any(tensor.dtype not in FLOATS for header in headers for tensor in header.values())

    def bytes(self, dtype: str | None) -> int:
        """Bytes of the needed weights in memory.

        dtype: floats are cast, and 8-bit floats are decoded, to it, if it is one of `SIZES`.
            Otherwise, and for None, they stay as stored, as other tensors do.

        The few that `load_model` keeps in fp32 count as if they were cast, and scales as if they
        were kept.  For a pickle it is the size of the file.
        """
        if self.pickled:
            return self.source.sizes[PICKLE]
        size = SIZES.get(dtype or "")
        total = 0
        for tensor in self.tensors.values():
            start, end = tensor.data_offsets
            if size and tensor.dtype in _CAST:
                total += tensor.parameter_count * size
            else:
                total += end - start
        return total


def find_weights(source: Source, *, is_original: bool) -> Weights:
    """The checkpoint's weights: those that an index names, or else a single file of safetensors, or
    else the pickle of the original format.

    If there is an index and a single file, and all files of the checkpoint are known, the single
    file is taken if the checkpoint lacks files that the index names.
    is_original: whether the checkpoint has the original format, in which a pickle is read.

    Raises BadInputError if ssdprof can read none of the files, what `_read_index` raises, and
    ModelUnavailableError if the hub, which may have an index, is unreachable and neither an index
    nor a single file is cached.
    """
    if INDEX in source.sizes:
        shards = _read_index(source.path(INDEX))
        # A file in a subfolder of a local folder is not in `sizes`.  If the hub was not reached, it
        # may have those that are not cached, and other weights must not be taken for them.
        if (
            SINGLE not in source.sizes
            or not source.complete
            or all(file in source.sizes or source.cached(file) for file in shards.values())
        ):
            return Weights(source, shards, None)
    if SINGLE in source.sizes:
        return Weights(source, None, SINGLE)
    if is_original and PICKLE in source.sizes:
        return Weights(source, None, PICKLE)
    if not source.complete:
        source.path(INDEX)  # raises the error: the hub may have an index that is not cached
    others = sorted(
        name
        for name in source.sizes
        if name.endswith((".bin", ".pt", ".pth", ".gguf", ".safetensors"))
    )
    only = f", only {', '.join(others[:3])}" if others else ""
    hint = "Take a revision with safetensors (refs/pr/1 is often one)"
    if source.revision is None:
        hint = "Copy the missing file into the folder"
    raise BadInputError(
        f"{source.label} has no {SINGLE} and no {INDEX}{only}.",
        source.inner_checkpoints() or f"{hint}, or save the model again with save_pretrained.",
    )


def usual_dtype(tensors: Iterable[TensorInfo]) -> str | None:
    """The float dtype of most elements, named as in torch.

    Only floats of 16 bits and more count; None if there are none.
    """
    counts: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in FLOATS:
            counts[FLOATS[tensor.dtype]] += tensor.parameter_count
    return max(counts, key=counts.__getitem__, default=None)


def _read_index(path: Path) -> dict[str, str]:
    """The index of the weights: key of a tensor -> file name.

    Raises ModelUnavailableError if the file is damaged or has no weight_map, and BadInputError if
    an entry of that is not the name of a safetensors file inside the checkpoint's folder, or if it
    is empty.  Raises what `unreadable` returns if the file cannot be read.
    """
    try:
        content = read_json(path)
        if not isinstance(content, dict) or not isinstance(content.get("weight_map"), dict):
            raise ValueError("it has no weight_map")
    except OSError as error:
        raise unreadable(INDEX, error, fetch_again(path)) from None
    except ValueError as error:
        raise ModelUnavailableError(
            f"{INDEX} is truncated or corrupt: {library_message(error)}.", fetch_again(path)
        ) from None
    shards = content["weight_map"]
    if not shards or not all(isinstance(file, str) for file in shards.values()):
        raise BadInputError(
            f"{INDEX} does not say which file holds each weight.", "Fetch the index again."
        )
    for file in sorted(set(shards.values())):
        if not (stays_inside(file) and file.endswith(".safetensors")):
            raise BadInputError(
                f"{INDEX} names {shown(file)}, which is no safetensors file inside the "
                "checkpoint's folder.",
                "Do not trust this checkpoint: save_pretrained writes no such index.",
            )
    # without "./" at the start
    return {key: str(PurePosixPath(file)) for key, file in shards.items()}


def stays_inside(name: str) -> bool:
    """Whether a file name means a file inside of the folder that it is relative to, on any system:
    it is neither absolute nor empty, and has no "..".
    """
    posix = PurePosixPath(name)
    windows = PureWindowsPath(name)
    return not (
        posix.is_absolute()
        or windows.anchor
        or ".." in windows.parts
        or "\0" in name
        or not posix.parts
    )
