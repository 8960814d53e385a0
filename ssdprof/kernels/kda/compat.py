"""`kda_fused` with the signature of `chunk_kda` in flash-linear-attention (fla), so that a program
needs to change one import only.

Shapes are those of `kda_fused`.  A g above 0 counts as 0; in fla it makes the state grow.
"""

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
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention with the arguments and the result of fla's `chunk_kda`: (out,
    final_state), where the state is None unless output_final_state is set.

    safe_gate, lower_bound, disable_recompute, cu_seqlens_cpu, use_graph, max_num_seqs and the
    keyword chunk_size have no effect: every gate is safe, and the call can run in a CUDA graph.
    Raises UnsupportedError, which names the option, if use_gate_in_kernel, its keywords A_log and
    dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval, return_intermediate_states or cp_context
    are set, and TypeError for unknown keywords.
    """
    del safe_gate, lower_bound, disable_recompute, cu_seqlens_cpu, use_graph, max_num_seqs
    kwargs.pop("chunk_size", None)
    gate = {name: kwargs.pop(name, None) for name in ("A_log", "dt_bias")}
    if kwargs:
        raise TypeError(f"chunk_kda() got unexpected keyword arguments: {', '.join(kwargs)}")
    refuse(
        gate,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        return_intermediate_states=return_intermediate_states,
        cp_context=cp_context,
    )
    out, final_state = kda_fused(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        state_v_first=state_v_first,
    )
    return out, final_state if output_final_state else None
