"""mamba_ssm's kernels for Mamba-2 on the same scan: heads of one channel, a group of B and C for each head.

Its selective scan (Mamba-1) is a compiled extension.  Its Triton kernels are the chunked scan of Mamba-2, and the
study's source compares with these.
"""

from __future__ import annotations

from importlib import import_module

import torch

from selective_scan.inputs import Layer
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.adapters import load_mamba_ssm
from ssdprof.kernels.ssd.inputs import SSDInputs

NAME = "mamba_ssm"
CHUNK_SIZE = 256  # mamba_ssm's default
MOST_RMS_ERROR = 0.02  # five roundings to bf16: its products take bf16 operands


class MambaSsm:
    """Raises ImportError if the library, or a package that it needs, is missing."""

    def __init__(self) -> None:
        self._forward = load_mamba_ssm()
        self._combined = import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined

    def forward(self, layer: Layer) -> torch.Tensor:
        """y (b, l, h)."""
        inputs = SSDInputs(x=layer.x[..., None], dt=layer.dt, A=layer.A, B=layer.B, C=layer.C, chunk_size=CHUNK_SIZE)
        out: torch.Tensor = self._forward.run(inputs, Precision(state_dtype=layer.C.dtype)).out
        return out[..., 0]

    def forward_and_backward(self, layer: Layer, dy: torch.Tensor) -> dict[str, torch.Tensor]:
        """y, dB and dC; the gradients of x and dt are computed too."""
        leaves = [tensor.detach().requires_grad_() for tensor in (layer.x, layer.dt, layer.B, layer.C)]
        x, dt, B, C = leaves
        y = self._combined(x[..., None], dt, layer.A, B, C, CHUNK_SIZE)[..., 0]
        _, _, dB, dC = torch.autograd.grad(y, leaves, dy)
        return {"y": y.detach(), "dB": dB, "dC": dC}
