"""The operator's inputs and outputs, checked once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

INPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class GDNOutput(NamedTuple):
    """o: as v.  final_state: (B, HV, K, V) fp32."""

    o: torch.Tensor
    final_state: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class GDNInputs:
    """Inputs of one gated-delta-rule call; any strides.

        S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T
        o_t = S_t^T (scale q_t)

    q, k: (B, T, H, K)    v: (B, T, HV, V), HV a multiple of H: value head i uses q and k head i // (HV / H)
    g: (B, T, HV), natural logarithm of the decay, <= 0    beta: (B, T, HV)
    initial_state: (B, HV, K, V)
    scale: K ** -0.5 if None
    use_qk_l2norm: q and k are divided by sqrt(sum of their squares + 1e-6) first
    chunk_size: positions per chunk of the chunked algorithm; a power of two, at least 16
    q, k and v share a dtype (fp32, fp16 or bf16).

    Raises ValueError that names the argument.  Source: Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor | None = None
    scale: float | None = None
    use_qk_l2norm: bool = False
    chunk_size: int = 64

    def __post_init__(self) -> None:
        if self.q.ndim != 4:
            raise ValueError(f"q must be (B, T, H, K), not {tuple(self.q.shape)}")
        if self.v.ndim != 4:
            raise ValueError(f"v must be (B, T, HV, V), not {tuple(self.v.shape)}")
        batch, length, heads, key_dim = self.q.shape
        value_heads, value_dim = self.v.shape[2:]
        if self.q.dtype not in INPUT_DTYPES:
            raise ValueError(f"q must be float32, float16 or bfloat16, not {self.q.dtype}")
        if batch == 0 or length == 0:
            raise ValueError(f"q is empty: {tuple(self.q.shape)}")
        if heads == 0 or value_heads % heads:
            raise ValueError(f"v's heads ({value_heads}) must be a multiple of q's ({heads})")
        if self.chunk_size < 16 or self.chunk_size & (self.chunk_size - 1):
            raise ValueError(f"chunk_size must be a power of two of at least 16, not {self.chunk_size}")
        self._check("k", (batch, length, heads, key_dim), self.q.dtype)
        self._check("v", (batch, length, value_heads, value_dim), self.q.dtype)
        self._check("g", (batch, length, value_heads))
        self._check("beta", (batch, length, value_heads))
        self._check("initial_state", (batch, value_heads, key_dim, value_dim))
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor) and value.device != self.q.device:
                raise ValueError(f"{field.name} is on {value.device}, q on {self.q.device}")

    def _check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
        tensor = getattr(self, name)
        if tensor is None:
            return
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, not {tuple(tensor.shape)}")
        if dtype is not None and tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} as q is, not {tensor.dtype}")

    @property
    def values_per_key(self) -> int:
        """Value heads that share one q and k head."""
        return self.v.shape[2] // self.q.shape[2]
