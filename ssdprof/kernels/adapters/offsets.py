"""The largest offset in a tensor that a kernel must be able to address."""

from __future__ import annotations

import torch

INT32_ELEMENTS = 2**31


def span(tensor: torch.Tensor, *, axes: slice = slice(None)) -> int:
    """Elements from the first to the last one along `axes`, including those that strides skip."""
    sizes, strides = tensor.shape[axes], tensor.stride()[axes]
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
