"""`kda_fused` with the signature of `chunk_kda` in flash-linear-attention (fla), so that a program
needs to change one import only.

Shapes are those of `kda_fused`.  A g above 0 counts as 0; in fla it makes the state grow.

safe_gate, disable_recompute, cu_seqlens_cpu, use_graph, max_num_seqs and chunk_size have no effect,
and lower_bound has none without use_gate_in_kernel.  Not supported are return_intermediate_states,
cp_context, A_log and dt_bias without use_gate_in_kernel, and allow_neg_eigval without
use_beta_sigmoid_in_kernel.
"""

from typing import Any

import torch
from torch import Tensor

from ssdprof.kernels.gdn.compat import refuse
from ssdprof.kernels.kda.fused import kda_fused


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention: (out, final_state), with the state None without output_final_state.

    use_gate_in_kernel: g has raw gates (`RawKDAInputs`) with A_log and dt_bias, HV and HV * K
        elements in any shape, each 0 if absent.  A_log may be absent only with lower_bound.
    use_beta_sigmoid_in_kernel: beta is a logit; allow_neg_eigval: then it is up to 2.

    Raises UnsupportedError, which names an option that is not supported; ValueError for raw gates
    with neither A_log nor lower_bound; and TypeError for other keywords.
    """
    del safe_gate, disable_recompute, cu_seqlens_cpu, use_graph, max_num_seqs
    kwargs.pop("chunk_size", None)
    gate = {name: kwargs.pop(name, None) for name in ("A_log", "dt_bias")}
    if kwargs:
        raise TypeError(f"chunk_kda() got unexpected keyword arguments: {', '.join(kwargs)}")
    refuse(
        {} if use_gate_in_kernel else gate,
        return_intermediate_states=return_intermediate_states,
        cp_context=cp_context,
        allow_neg_eigval=allow_neg_eigval and not use_beta_sigmoid_in_kernel,
    )
    if use_beta_sigmoid_in_kernel:
        beta = beta.float().sigmoid() * (2.0 if allow_neg_eigval else 1.0)
    if use_gate_in_kernel:
        gate = _raw_gate(g, lower_bound=lower_bound, **gate)
    tokens = q, k, v, g, beta
    out, final_state = kda_fused(
        *tokens,
        scale=scale,
        initial_state=initial_state,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        state_v_first=state_v_first,
        **gate,
    )
    return out, final_state if output_final_state else None


def _raw_gate(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> dict[str, Any]:
    """The arguments of `kda_fused` for raw gates, from those of `chunk_kda`."""
    if A_log is None:
        if lower_bound is None:
            raise ValueError("use_gate_in_kernel needs A_log or lower_bound")
        A_log = torch.zeros(g.shape[2:3], device=g.device)
    if dt_bias is not None and dt_bias.numel() == g.shape[2:].numel():
        dt_bias = dt_bias.reshape(g.shape[2:])
    return dict(A_log=A_log.flatten(), dt_bias=dt_bias, lower_bound=lower_bound)
