"""The weights that the first layers need, their files, and their size in bytes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ssdprof.checkpoint import original
from ssdprof.checkpoint.integrity import check_holds, read_index
from ssdprof.checkpoint.source import Source, StoredTensor
from ssdprof.errors import BadInputError

SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # of torch's dtypes that a model is loaded in
_FLOATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": None, "F8_E5M2": None}
CODES = frozenset(
    {"U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F6_E2M3", "F6_E3M2", "F4"}
)  # no model computes in them
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_HEAD = "lm_head."
# Parts that are never run: image and audio towers, multi-token prediction.
_UNUSED = re.compile(r"^(?:mtp|(?:model\.)?(?:visual|vision_tower|audio_tower|multi_modal_projector))\.")


def is_needed(key: str, depth: int, *, head: bool = False) -> bool:
    """Whether the base model with its first `depth` layers has the weight `key`.  head: include the head."""
    if key.startswith(_HEAD):
        return head
    if _UNUSED.match(key):
        return False
    layer = _LAYER.search(key)
    return layer is None or int(layer[1]) < depth


@dataclass(frozen=True)
class Weights:
    """The weights of one checkpoint.

    shards: the file of each tensor, from the index; None for a single file, whose tensors its own header names.
    single: that file; a pickle only in the original format.
    """

    source: Source
    shards: Mapping[str, str] | None
    single: str | None

    @property
    def pickled(self) -> bool:
        return self.single == original.PICKLE

    def files(self, depth: int, *, head: bool = False) -> tuple[str, ...]:
        """The files of the first `depth` layers and of weights outside of layers, in order.  head: see `is_needed`."""
        if self.shards is None:
            assert self.single is not None
            return (self.single,)
        return tuple(sorted({file for key, file in self.shards.items() if is_needed(key, depth, head=head)}))

    def tensors(self, depth: int, *, head: bool = False) -> dict[str, StoredTensor]:
        """The needed tensors with their shapes, from the files' headers (on the hub: a few requests, no download).

        ModelUnavailableError when a file is truncated, corrupt, or lacks a tensor that the index places in it.
        """
        assert not self.pickled, "a pickle has no header"
        found: dict[str, StoredTensor] = {}
        for file in self.files(depth, head=head):
            header = self._headers(file)
            if self.shards is not None:
                there = [key for key, at in self.shards.items() if at == file and is_needed(key, depth, head=head)]
                check_holds(header, there, file)
            found.update({key: tensor for key, tensor in header.items() if is_needed(key, depth, head=head)})
        return found

    def bytes(self, depth: int, dtype: str | None, *, head: bool = False) -> int:
        """Bytes of the needed weights once loaded in `dtype`.

        For a pickle the size of the whole file.
        """
        if self.pickled:
            return self.source.sizes[original.PICKLE]
        return loaded_bytes(self.tensors(depth, head=head).values(), dtype)

    def _headers(self, file: str) -> Mapping[str, StoredTensor]:
        # A header read on the hub does not check the copy that is downloaded later, whose header is read again.
        key = (file, self.source.cached(file))
        if key not in self._header_cache:
            self._header_cache[key] = self.source.header(file)
        return self._header_cache[key]

    @cached_property
    def _header_cache(self) -> dict[tuple[str, bool], Mapping[str, StoredTensor]]:
        return {}


def find_weights(source: Source, *, is_original: bool) -> Weights:
    """The checkpoint's weights; safetensors wherever there are any.

    BadInputError if ssdprof can read none; ModelUnavailableError if they are unreachable.
    """
    if SINGLE in source.sizes:
        return Weights(source, None, SINGLE)
    if INDEX in source.sizes:
        return Weights(source, read_index(source.path(INDEX), INDEX), None)
    if is_original and original.PICKLE in source.sizes:
        return Weights(source, None, original.PICKLE)
    if not source.complete:
        source.path(INDEX)  # raises: it may be there, but is not in the cache
    found = sorted(name for name in source.sizes if name.endswith((".bin", ".pt", ".pth", ".gguf", ".safetensors")))
    raise BadInputError(
        f"{source.label} has no {SINGLE} and no {INDEX}" + (f", only {', '.join(found[:3])}." if found else "."),
        "Take a revision with safetensors (refs/pr/1 is often one), or save the model again with save_pretrained.",
    )


def loaded_bytes(tensors: Iterable[StoredTensor], dtype: str | None) -> int:
    """Bytes once loaded: floats are cast to `dtype`, those of 8 bit decoded to it; other tensors are as stored."""
    size = SIZES.get(dtype or "")
    return sum(math.prod(t.shape) * size if size and t.dtype in _FLOATS else t.size_bytes for t in tensors)


def usual_dtype(tensors: Iterable[StoredTensor]) -> str | None:
    """That of most elements in floats of 16 bit and more, named as in torch; None without any."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        if (name := _FLOATS.get(tensor.dtype)) is not None:
            counts[name] += math.prod(tensor.shape)
    return max(counts, key=counts.__getitem__, default=None)
