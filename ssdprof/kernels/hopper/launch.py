"""Tensors that the Hopper kernels read through TMA, the Tensor Memory Accelerator."""

from __future__ import annotations

import torch

from ssdprof.kernels.tensors import row_stride


def unreadable(**tensors: torch.Tensor) -> str:
    """Why TMA cannot read one of these tensors (b, l, heads, columns); empty if it can read all."""
    for name, tensor in tensors.items():
        row = row_stride(tensor)
        if tensor.stride(3) != 1 or row % 8 or tensor.stride(2) % 8 or tensor.data_ptr() % 16 or row <= 0:
            return f"strides or alignment of {name}, which TMA cannot read"
        if tensor.shape[0] > 1 and (tensor.stride(0) % 8 or tensor.stride(0) <= 0):
            return f"batch stride of {name}, which TMA cannot read"
    return ""
