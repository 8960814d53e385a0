"""The properties of a tensor that determine which kernels support it and what Triton compiles for it."""

from collections.abc import Hashable

import torch


def tensor_signature(tensor: torch.Tensor | None) -> Hashable:
    """Equal for tensors that differ only in their values, and in their addresses by a multiple of 16 bytes."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16
