"""The largest offset in a tensor that a kernel computes."""

from __future__ import annotations

import torch

INT32_ELEMENTS = 2**31


def span(tensor: torch.Tensor, *, axes: slice = slice(None)) -> int:
    """Elements from the first to the last one that `axes` reach, those between strides counted."""
    sizes, strides = tensor.shape[axes], tensor.stride()[axes]
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
