"""Checks weights before they are read: complete safetensors files, and an index that stays inside its folder."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath

from ssdprof.checkpoint.sizes import shown
from ssdprof.checkpoint.source import StoredTensor
from ssdprof.errors import BadInputError, ModelUnavailableError, library_message

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def stored_tensor(dtype: str, shape: Collection[int]) -> StoredTensor:
    """A header's entry; an unknown dtype counts 2 bytes per element."""
    return StoredTensor(dtype, tuple(shape), math.prod(shape) * _BITS.get(dtype, 16) // 8)


def read_header(path: Path, name: str) -> dict[str, StoredTensor]:
    """The header of the safetensors file at `path`: name -> tensor.

    ModelUnavailableError when the file is truncated or corrupt: its header and its length must agree.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  # safe_open is no mapping
            return {key: stored_tensor(part.get_dtype(), part.get_shape()) for key, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise broken_file(path, name, error) from None


def broken_file(path: Path, name: str, error: Exception) -> ModelUnavailableError:
    """The error for a weights file that cannot be read; names the two usual reasons."""
    with path.open("rb") as file:
        is_pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
    if is_pointer:
        return ModelUnavailableError(
            f"{name} is a Git LFS pointer, not the weights.", "Run `git lfs pull` in the folder."
        )
    return ModelUnavailableError(
        f"{name} is truncated or corrupt ({path.stat().st_size} bytes): {library_message(error)}.",
        f"Delete it and fetch it again: {path}",
    )


def read_index(path: Path, name: str) -> dict[str, str]:
    """The weight map of a safetensors index: tensor name -> file name.

    BadInputError when it names a file outside the folder or one that holds no safetensors;
    ModelUnavailableError when the index cannot be read.
    """
    try:
        index = json.loads(path.read_bytes())
        weight_map = index["weight_map"]
        pairs = [(key, file) for key, file in weight_map.items() if isinstance(file, str)]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelUnavailableError(
            f"{name} is truncated or corrupt: {library_message(error)}.", f"Delete it and fetch it again: {path}"
        ) from None
    if not pairs or len(pairs) != len(weight_map):
        raise BadInputError(f"{name} does not say which file holds each weight.", "Fetch the index again.")
    for file in sorted({file for _, file in pairs}):
        if not stays_inside(file):
            raise BadInputError(
                f"{name} names {shown(file)}, which lies outside the checkpoint's folder.",
                "Do not trust this checkpoint: no honest tool writes such an index.",
            )
        if not file.endswith(".safetensors"):
            raise BadInputError(
                f"{name} names {shown(file)}, which is not a safetensors file.", "Fetch the index again."
            )
    return dict(pairs)


def stays_inside(name: str) -> bool:
    """Whether a relative file name cannot leave its folder, on any system."""
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    return not (posix.is_absolute() or windows.anchor or ".." in windows.parts or "\0" in name or not posix.parts)


def check_holds(header: Mapping[str, StoredTensor], wanted: Collection[str], name: str) -> None:
    """ModelUnavailableError unless the file `name`, which holds `header`, has every tensor of `wanted`."""
    if missing := sorted(set(wanted) - set(header)):
        raise ModelUnavailableError(
            f"{name} lacks {len(missing)} of the weights that the index places in it, such as {shown(missing[0])}.",
            "The file and the index are of different revisions; fetch both again.",
        )
