"""Inputs that several of the libraries do not support."""

from __future__ import annotations

import torch

from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import UnsupportedError

HEAD_DIM = 128


def refuse_relaxed(name: str, precision: Precision) -> None:
    """Raises UnsupportedError for relaxed intermediates, for which no library has a setting."""
    if not precision.exact:
        raise UnsupportedError(f"{name}: exact intermediates only")


def refuse_unlike_128(name: str, inputs: GDNInputs, precision: Precision) -> None:
    """Check for kernels that require exact intermediates, K = V = 128, 16-bit inputs and a state in fp32."""
    refuse_relaxed(name, precision)
    if precision.state_dtype != torch.float32:
        raise UnsupportedError(f"{name}: states stay in fp32")
    key_dim, value_dim = inputs.q.shape[3], inputs.v.shape[3]
    if (key_dim, value_dim) != (HEAD_DIM, HEAD_DIM):
        raise UnsupportedError(f"{name}: K and V are {HEAD_DIM}, not {key_dim} and {value_dim}")
    if inputs.q.dtype == torch.float32:
        raise UnsupportedError(f"{name}: fp16 and bf16 inputs only")
