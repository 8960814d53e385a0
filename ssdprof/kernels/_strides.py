"""Strides as arguments of kernels."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import triton.language as tl

from ssdprof.kernels._triton import INTERPRETED


def strides_of(tensor: torch.Tensor | None) -> tuple[int, ...]:
    return () if tensor is None else tensor.stride()


def is_expanded(tensor: torch.Tensor | None) -> bool:
    """Whether several indices share an element, as after `expand`.  Such a tensor must not be written to."""
    return tensor is not None and any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def strides_unit(*tensors: torch.Tensor) -> int:
    """The largest power of two up to 16 that divides all strides except the last ones; for `in_units`.

    For example, rows of 100 numbers can be read four at a time, although 100 is not a multiple of 16.
    """
    return gcd(16, *(stride for tensor in tensors for stride in tensor.stride()[:-1]))


def tile_strides(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    """Strides of a (batch, position, head, dimension) tensor that is read in tiles of positions and dimensions.

    If rows are contiguous, the strides inside a tile are compile-time constants.  They then depend on the model and not
    on the call, and a constant offset costs no register.
    """
    if tensor is None or tensor.stride(3) != 1 or INTERPRETED:
        return strides_of(tensor)
    batch, position, head, dimension = tensor.stride()
    return batch, tl.constexpr(position), head, tl.constexpr(dimension)
