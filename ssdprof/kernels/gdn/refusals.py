"""Inputs that the Triton kernels of the gated delta rule reject."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ssdprof.kernels.device import INTERPRETED, capability
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.registry import UnsupportedError


def refuse_gradient(name: str, tensors: Iterable[torch.Tensor | None]) -> None:
    """Raises UnsupportedError if one of the tensors requires a gradient."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise UnsupportedError(f"{name}: forward only; call it under torch.no_grad() or detach the inputs")


def refuse_unsupported(name: str, inputs: GDNInputs) -> None:
    """Raises UnsupportedError for a device that the kernels do not run on."""
    if inputs.q.is_cuda:
        if capability(inputs.q) < (8, 0):
            raise UnsupportedError(f"{name}: needs a GPU of compute capability 8.0 or newer")
    elif not INTERPRETED:
        raise UnsupportedError(
            f"{name}: without TRITON_INTERPRET=1, tensors must be on the GPU, not on {inputs.q.device}"
        )
