"""Strides as kernels take them."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import triton.language as tl

from ssdprof.kernels._triton import INTERPRETED


def strides_of(tensor: torch.Tensor | None) -> tuple[int, ...]:
    return () if tensor is None else tensor.stride()


def is_expanded(tensor: torch.Tensor | None) -> bool:
    """Whether indices share an element, as after `expand`: such a tensor can be read, but not written to."""
    return tensor is not None and any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def strides_unit(*tensors: torch.Tensor) -> int:
    """The largest power of two up to 16 of which all strides but the last ones are multiples, for `in_units`.

    Rows of 100 numbers can be read four at a time, though 100 is no multiple of 16.
    """
    return gcd(16, *(stride for tensor in tensors for stride in tensor.stride()[:-1]))


def tile_strides(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    """Strides of a (batch, position, head, dimension) tensor that is read in tiles of positions and dimensions.

    Those inside a tile are compile-time constants where rows are contiguous: they then belong to the model and not to
    the call, and a constant offset costs no register.
    """
    if tensor is None or tensor.stride(3) != 1 or INTERPRETED:
        return strides_of(tensor)
    batch, position, head, dimension = tensor.stride()
    return batch, tl.constexpr(position), head, tl.constexpr(dimension)
