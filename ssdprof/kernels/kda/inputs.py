"""Inputs of Kimi Delta Attention: those of the gated delta rule, with a decay for every key
channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.gdn.inputs import GDNOutput as GDNOutput


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
