"""The files and tensors of the weights, checked before they are read, and those that the first
layers need.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath, PureWindowsPath

from ssdprof.checkpoint.config import PICKLE
from ssdprof.checkpoint.hub import Source, TensorInfo
from ssdprof.checkpoint.names import shown
from ssdprof.errors import BadInputError, ModelUnavailableError, library_message
from ssdprof.files import read_json

# of torch's dtypes that a model is loaded in
SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# of safetensors; what is stored otherwise is no weight to compute with: codes, and indexes
FLOATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_CAST = FLOATS.keys() | {"F8_E4M3", "F8_E5M2"}  # on load
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

MOST_LAYERS = 1 << 16  # more than any model has
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_HEAD = "lm_head."
_UNUSED = re.compile(
    r"^(?:mtp|(?:model\.)?(?:visual|vision_tower|audio_tower|multi_modal_projector))\."
)


def layer_index(name: str) -> int | None:
    """The decoder layer that a parameter or module belongs to ("model.layers.3.mamba.norm": 3);
    None: to none.
    """
    match = _LAYER.search(name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class Weights:
    """The weights of one checkpoint, or those that its first decoder layers need.

    shards: the file of each tensor, from the index; None for a single file, whose tensors its own
    header names.
    single: that file; a pickle only in the original format.
    depth: number of the layers; the weights outside of layers are needed too.  head: so is the
    language-model head.
    """

    source: Source
    shards: Mapping[str, str] | None
    single: str | None
    depth: int = MOST_LAYERS
    head: bool = False

    @property
    def pickled(self) -> bool:
        return self.single == PICKLE

    def needs(self, key: str) -> bool:
        """Whether the weight `key` is one of them: image and audio towers, which are never run, and
        prediction of several tokens are not.
        """
        if key.startswith(_HEAD):
            return self.head
        if _UNUSED.match(key):
            return False
        layer = layer_index(key)
        return layer is None or layer < self.depth

    @property
    def files(self) -> tuple[str, ...]:
        """The needed files, in order."""
        if self.shards is None:
            assert self.single is not None
            return (self.single,)
        return tuple(sorted(set(self.needed_shards.values())))

    @property
    def needed_shards(self) -> dict[str, str]:
        """The needed part of the index."""
        return {key: file for key, file in (self.shards or {}).items() if self.needs(key)}

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """The needed tensors with their shapes, from the files' headers (on the hub: a few
        requests, no download).  A tensor is that of the file in which the index places it.

        ModelUnavailableError when a file is truncated, corrupt, or lacks a tensor that the index
        places in it.  BadInputError when two files hold a tensor and the index names neither.
        """
        assert not self.pickled, "a pickle has no header"
        tensors: dict[str, TensorInfo] = {}
        needed = self.needed_shards
        holder: dict[str, str] = {}
        for file in self.files:
            header = self.source.header(file)
            if missing := sorted({key for key, at in needed.items() if at == file} - set(header)):
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
        """The tensors in `file` that the index places in another one: older copies."""
        shards = self.shards or {}
        return {key for key in self.source.header(file) if shards.get(key, file) != file}

    def outside_index(self) -> tuple[str, ...]:
        """Files of weights beside those that the checkpoint uses."""
        used = {self.single, *(self.shards or {}).values()}
        return tuple(
            name
            for name in sorted(self.source.sizes)
            if name.endswith(".safetensors") and name not in used
        )

    @property
    def has_codes(self) -> bool:
        """Whether any tensor is stored in integers or in 8 bit and less, or cannot be looked at."""
        if self.pickled:
            return True
        files = [self.single] if self.single else sorted(set((self.shards or {}).values()))
        headers = (self.source.header(file).values() for file in files)
        return any(tensor.dtype not in FLOATS for tensor in chain.from_iterable(headers))

    def bytes(self, dtype: str | None) -> int:
        """Bytes of the needed weights once loaded: floats are cast to `dtype`, those of 8 bit
        decoded to it; other tensors are as stored.  For a pickle the size of the whole file.
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
    """The checkpoint's weights; safetensors wherever there are any.  An index whose files are all
    there counts before a single file.

    BadInputError if ssdprof can read none; ModelUnavailableError if they are unreachable.
    """
    if INDEX in source.sizes:
        shards = _read_index(source.path(INDEX))
        if SINGLE not in source.sizes or source.sizes.keys() >= set(shards.values()):
            return Weights(source, shards, None)
    if SINGLE in source.sizes:
        return Weights(source, None, SINGLE)
    if is_original and PICKLE in source.sizes:
        return Weights(source, None, PICKLE)
    if not source.complete:
        source.path(INDEX)  # raises: it may be there, but is not in the cache
    others = sorted(
        name
        for name in source.sizes
        if name.endswith((".bin", ".pt", ".pth", ".gguf", ".safetensors"))
    )
    raise BadInputError(
        f"{source.label} has no {SINGLE} and no {INDEX}"
        + (f", only {', '.join(others[:3])}." if others else "."),
        source.inner_checkpoints()
        or "Take a revision with safetensors (refs/pr/1 is often one), or save the model again "
        "with save_pretrained.",
    )


def usual_dtype(tensors: Iterable[TensorInfo]) -> str | None:
    """That of most elements in floats of 16 bit and more, named as in torch; None without any."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        if (name := FLOATS.get(tensor.dtype)) is not None:
            counts[name] += tensor.parameter_count
    return max(counts, key=counts.__getitem__, default=None)


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name.  BadInputError for a file outside the folder, ModelUnavailableError
    if unreadable.
    """
    try:
        content = read_json(path)
        if not isinstance(content, dict) or not isinstance(content.get("weight_map"), dict):
            raise ValueError("it has no weight_map")
    except (ValueError, OSError) as error:
        raise ModelUnavailableError(
            f"{INDEX} is truncated or corrupt: {library_message(error)}.",
            f"Delete it and fetch it again: {path}",
        ) from None
    pairs = [(key, file) for key, file in content["weight_map"].items() if isinstance(file, str)]
    if not pairs or len(pairs) != len(content["weight_map"]):
        raise BadInputError(
            f"{INDEX} does not say which file holds each weight.", "Fetch the index again."
        )
    for file in sorted({file for _, file in pairs}):
        if not (stays_inside(file) and file.endswith(".safetensors")):
            raise BadInputError(
                f"{INDEX} names {shown(file)}, which is no safetensors file inside the "
                "checkpoint's folder.",
                "Do not trust this checkpoint: no honest tool writes such an index.",
            )
    return {key: str(PurePosixPath(file)) for key, file in pairs}  # "./x" is x


def stays_inside(name: str) -> bool:
    """Whether a relative file name cannot leave its folder, on any system."""
    posix = PurePosixPath(name)
    windows = PureWindowsPath(name)
    return not (
        posix.is_absolute()
        or windows.anchor
        or ".." in windows.parts
        or "\0" in name
        or not posix.parts
    )
