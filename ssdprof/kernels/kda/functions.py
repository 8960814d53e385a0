"""Kimi Delta Attention as functions of tensors, for use without the rest of ssdprof.

The registered implementations, which take `KDAInputs`, are in `fused.py` and `unfused.py`.
"""

from __future__ import annotations

from torch import Tensor

from ssdprof.kernels.choice import tensor_function
from ssdprof.kernels.inputs import Output
from ssdprof.kernels.kda import fused, unfused
from ssdprof.kernels.kda.inputs import KDAInputs
from ssdprof.kernels.precision import Precision

_function = tensor_function(fused.FUSED, KDAInputs)


def kda_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm: bool = False,
    cu_seqlens: Tensor | None = None,
    precision: Precision = Precision(),  # noqa: B008
    state_v_first: bool = False,
    batch_invariant: bool = False,
) -> Output:
    """Kimi Delta Attention, forward only.

        S~_t  = diag(exp(g_t)) S_{t-1}
        S_t   = S~_t + k_t (beta_t (v_t - S~_t^T k_t))^T
        out_t = S_t^T (scale q_t)

    q, k: (B, T, H, K)    v: (B, T, HV, V), HV a multiple of H    beta: (B, T, HV)
    g: (B, T, HV, K), natural logarithm of the decay of each channel.  A g above 0 counts as 0.
    initial_state: (sequences, HV, K, V), or (sequences, HV, V, K) if state_v_first
    All other arguments, the result, its reproducibility and the errors are those of `gdn_fused`.

    Source: Kimi Team 2025 (arXiv:2510.26692).
    """
    arguments = dict(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        use_qk_l2norm=use_qk_l2norm,
        cu_seqlens=cu_seqlens,
    )
    return _function(
        arguments, precision, state_v_first=state_v_first, batch_invariant=batch_invariant
    )


def kda_unfused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm: bool = False,
    chunk_size: int = 64,
    cu_seqlens: Tensor | None = None,
    precision: Precision = Precision(),  # noqa: B008
) -> Output:
    """Kimi Delta Attention in six launches, forward only.  Arguments and result are those of
    `KDAInputs`.

    Raises ValueError for inputs that do not fit together, and UnsupportedError for unsupported
    ones.
    """
    inputs = KDAInputs(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=initial_state,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
        chunk_size=chunk_size,
        cu_seqlens=cu_seqlens,
    )
    return unfused.run(inputs, precision)
