"""Inputs of Kimi Delta Attention: those of the gated delta rule, with a decay for every key
channel.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.gdn.inputs import GDNOutput as GDNOutput
from ssdprof.kernels.inputs import tensor_signature


@dataclass(frozen=True, kw_only=True)
class KDAInputs(GDNInputs):
    """Inputs of one call of Kimi Delta Attention; any strides.

        S~_t  = diag(exp(g_t)) S_{t-1}
        S_t   = S~_t + k_t (beta_t (v_t - S~_t^T k_t))^T
        out_t = S_t^T (scale q_t)

    g: (B, T, HV, K), natural logarithm of the decay of each row of the state.  A g above 0 counts
        as 0, clamped on the device; -inf forgets the row.

    All other fields are those of `GDNInputs`, among them q, k (B, T, H, K), v (B, T, HV, V), beta
    (B, T, HV) and initial_state (sequences, HV, K, V).

    Raises ValueError, which names the argument.  Source: Kimi Team 2025 (arXiv:2510.26692).
    """

    operator: ClassVar[str] = "kda"

    @property
    def gate_shape(self) -> tuple[int, ...]:
        """Shape of g: (B, T, HV, K)."""
        return (*self.v.shape[:3], self.q.shape[3])

    @property
    def raw_gate(self) -> tuple[Tensor | None, Tensor | None, float | None]:
        """A_log, dt_bias and lower_bound of `RawKDAInputs`; here None each: g has log gates."""
        return None, None, None

    def with_log_gates(self) -> KDAInputs:
        """The same inputs with log gates."""
        return self


@dataclass(frozen=True, kw_only=True)
class RawKDAInputs(KDAInputs):
    """Inputs of `kda_fused`, the only function that takes raw gates.  Without A_log, g is that of
    `KDAInputs`.  With it, g (B, T, HV, K) is the output of the model's projection, and the gate is

        lower_bound None:  -exp(A_log) softplus(g + dt_bias)
        otherwise:         lower_bound sigmoid(exp(A_log) (g + dt_bias))

    A_log: (HV).  dt_bias: (HV, K), contiguous as A_log is; only with A_log, and always with it.
    """

    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    lower_bound: float | None = None

    def check(self) -> None:
        """Raises ValueError, naming the argument that does not fit the others."""
        super().check()
        if self.A_log is not None and self.dt_bias is None:
            raise ValueError("A_log needs dt_bias")
        value_heads, key_dim = self.gate_shape[2:]
        self._check("A_log", (value_heads,))
        self._check("dt_bias", (value_heads, key_dim))

    @property
    def raw_gate(self) -> tuple[Tensor | None, Tensor | None, float | None]:
        """A_log, dt_bias and lower_bound."""
        return self.A_log, self.dt_bias, self.lower_bound

    @property
    def signature(self) -> Hashable:
        """As that of `KDAInputs`, to which it is equal without A_log."""
        if self.A_log is None:
            return super().signature
        of_gate = tensor_signature(self.A_log), tensor_signature(self.dt_bias), self.lower_bound
        return super().signature, of_gate

    def with_log_gates(self) -> KDAInputs:
        """The same inputs with log gates, which are computed in fp32, or in fp64 if g is fp64."""
        if self.A_log is None or self.dt_bias is None:
            return self
        dtype = torch.promote_types(self.g.dtype, torch.float32)
        raw = self.g.to(dtype) + self.dt_bias.to(dtype)
        rate = self.A_log.to(dtype).exp()[:, None]
        if self.lower_bound is None:
            g = -rate * F.softplus(raw)
        else:
            g = self.lower_bound * torch.sigmoid(rate * raw)
        values = {field.name: getattr(self, field.name) for field in fields(KDAInputs)}
        return KDAInputs.unchecked(**values | {"g": g})
