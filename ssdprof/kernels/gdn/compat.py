"""`gdn_fused` with the signature of flash-linear-attention's `chunk_gated_delta_rule`, to be used
by changing one import.

Shapes are those of `gdn_fused`.  The result is (out, final_state), with None for the state unless
output_final_state.  An unsupported option raises UnsupportedError, which names it.  A g above 0
counts as 0; in fla it makes the state grow.
"""

from torch import Tensor

from ssdprof.kernels.gdn.fused import gdn_fused
from ssdprof.kernels.registry import UnsupportedError


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule.  cu_seqlens_cpu, chunk_indices and the keyword chunk_size are accepted
    without effect.  An option whose value is None or False counts as not set.

    Returns out, and the final states in fp32, or None without output_final_state.

    Raises TypeError for unknown keywords, UnsupportedError for an option that is set and not
    supported, and what `gdn_fused` raises.
    """
    del cu_seqlens_cpu, chunk_indices
    kwargs.pop("chunk_size", None)
    # keywords of fla that are refused by name, as the options below are
    unsupported = ("head_first", "use_gate_in_kernel", "A_log", "dt_bias")
    keywords = {name: kwargs.pop(name, None) for name in unsupported}
    if kwargs:
        raise TypeError(
            "chunk_gated_delta_rule() got unexpected keyword arguments: "
            f"{', '.join(sorted(kwargs))}"
        )
    refuse(
        keywords,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        cp_context=cp_context,
    )
    out, final_state = gdn_fused(
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


_LOG_GATE_HINT = "pass g as the logarithm of the decay"
# option of fla, for GDN or for KDA -> the end of the message that refuses it: what to do instead,
# or why the option is not supported
_REFUSAL_HINTS = {
    "head_first": "transpose heads and positions",
    "use_beta_sigmoid_in_kernel": "pass beta.sigmoid()",
    "allow_neg_eigval": "pass 2 * beta",
    "use_gate_in_kernel": _LOG_GATE_HINT,
    "A_log": _LOG_GATE_HINT,
    "dt_bias": _LOG_GATE_HINT,
    "cp_context": "a call runs on one GPU",
    "return_intermediate_states": "states between chunks stay inside the kernel",
}


def refuse(keywords: dict[str, object], **options: object) -> None:
    """Raises UnsupportedError if an option is set, that is, if its value is neither None nor False.
    The message names the first such option.  Every option must have a hint in `_REFUSAL_HINTS`.

    keywords: options that the caller took from its `kwargs`, by name.
    """
    for name, value in (keywords | options).items():
        if value is not None and value is not False:
            raise UnsupportedError(f"fused: no {name}; {_REFUSAL_HINTS[name]}")
