"""The gated delta rule in few launches: the public function and the torch operator.

`gdn_fused(...)` takes tensors, for use without the rest of ssdprof; the registered implementation takes `GDNInputs`.
`variants.py` chooses the kernel.
"""

from __future__ import annotations

import torch

from ssdprof.kernels.gdn import tuned, variants
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.gdn.refusals import refuse_gradient, refuse_unsupported
from ssdprof.kernels.gdn.variants import Call, Launch
from ssdprof.kernels.launch import LaunchCache
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, register

_launches: LaunchCache[Launch] = LaunchCache()


def gdn_fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    use_qk_l2norm: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    precision: Precision = Precision(),  # noqa: B008
    state_v_first: bool = False,
    batch_invariant: bool = False,
) -> GDNOutput:
    """The gated delta rule (Gated DeltaNet), forward only.

        S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T
        out_t = S_t^T (scale q_t)

    q, k: (B, T, H, K)    v: (B, T, HV, V), HV a multiple of H: value head i uses q and k head i // (HV / H)
    K and V: 1 to 256, independent of each other
    g: (B, T, HV), natural logarithm of the decay.  The host does not check it; a g above 0 counts as 0.
    beta: (B, T, HV), any value.  If beta times the squared norm of a key is above 2, the result may overflow to NaN
        although the state stays small; `gdn_unfused` and `gdn_recurrent` have no such limit.
    scale: K ** -0.5 if None
    initial_state: (sequences, HV, K, V), or (sequences, HV, V, K) if state_v_first
    use_qk_l2norm: q and k are divided by sqrt(sum of their squares + 1e-6) first
    cu_seqlens: (sequences + 1) int32 or int64, non-decreasing, from 0 to T, for sequences packed along T; then B = 1.
        Empty sequences are allowed.  The host does not read the values, so wrong values are not rejected: positions
        outside all sequences are not written, and for sequences that overlap or end past T, memory outside of the
        tensors may be read and written.
    q, k and v share a dtype: fp32, fp16 or bf16.  g, beta and initial_state may have any of these, and fp64.  Any
    strides are allowed.

    precision: "relaxed" multiplies fp32 inputs in bfloat16 and changes nothing for others.  States stay in fp32
        registers for a whole sequence, so that state_dtype has no effect.
    state_v_first: initial and final states have V before K
    batch_invariant: a sequence's result is bitwise the same in a batch of any size, and in any pack.  Without it, the
        number of sequences affects how they are cut, and whether short packed ones run the recurrent kernel.  With it,
        packed sequences are not cut, so that a pack of few long ones takes longer.

    Returns out (B, T, HV, V) in v's dtype and final_states (sequences, HV, K, V), or (sequences, HV, V, K) if
    state_v_first, in fp32.  They are bitwise the same in every call, and do not depend on the contents of other
    sequences in the batch or pack.  The call does not synchronise with the host.  It may be captured in a CUDA graph,
    and called under torch.compile(fullgraph=True).

    Raises ValueError for inputs that do not fit together, and UnsupportedError for unsupported ones.
    Source: Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464).
    """
    if torch.compiler.is_compiling():
        refuse_gradient("fused", (q, k, v, g, beta, initial_state))
        return GDNOutput(
            *torch.ops.ssdprof.gdn_fused(
                q, k, v, g, beta, scale, initial_state, use_qk_l2norm, cu_seqlens,
                precision.intermediates, precision.state_dtype, state_v_first, batch_invariant,
            )
        )  # fmt: skip
    if state_v_first and initial_state is not None and initial_state.ndim == 4:
        initial_state = initial_state.mT
    inputs = GDNInputs.unchecked(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, scale=scale, use_qk_l2norm=use_qk_l2norm,
        chunk_size=64, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    output = run(inputs, precision, state_v_first=state_v_first, batch_invariant=batch_invariant)
    return GDNOutput(output.out, output.final_states.mT) if state_v_first else output


@torch.library.custom_op("ssdprof::gdn_fused", mutates_args=())
def _operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None,
    initial_state: torch.Tensor | None,
    use_qk_l2norm: bool,
    cu_seqlens: torch.Tensor | None,
    intermediates: str,
    state_dtype: torch.dtype,
    state_v_first: bool = False,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gdn_fused` with a schema that the dispatcher understands."""
    with torch.no_grad():
        return gdn_fused(
            q, k, v, g, beta, scale=scale, initial_state=initial_state, use_qk_l2norm=use_qk_l2norm,
            cu_seqlens=cu_seqlens,
            precision=Precision(intermediates=intermediates, state_dtype=state_dtype),  # type: ignore[arg-type]
            state_v_first=state_v_first, batch_invariant=batch_invariant,
        )  # fmt: skip


@_operator.register_fake
def _fake(
    q: torch.Tensor,
    _k: torch.Tensor,
    v: torch.Tensor,
    _g: torch.Tensor,
    _beta: torch.Tensor,
    _scale: float | None,
    _initial_state: torch.Tensor | None,
    _use_qk_l2norm: bool,
    cu_seqlens: torch.Tensor | None,
    _intermediates: str,
    _state_dtype: torch.dtype,
    state_v_first: bool = False,
    _batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes and dtypes of the results of `_operator`."""
    sequences = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = (v.shape[3], q.shape[3]) if state_v_first else (q.shape[3], v.shape[3])
    return v.new_empty(v.shape), v.new_empty(sequences, v.shape[2], *state, dtype=torch.float32)


def run(
    inputs: GDNInputs,
    precision: Precision = Precision(),  # noqa: B008
    *,
    batch_invariant: bool = False,
    state_v_first: bool = False,
) -> GDNOutput:
    """Output in v's dtype, final states (sequences, HV, K, V) in fp32, with V before K in memory if state_v_first.

    Raises UnsupportedError for inputs that no variant supports.
    """
    refuse_gradient("fused", (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.initial_state))
    signature = (inputs.signature, precision.intermediates, precision.state_dtype, batch_invariant, state_v_first)
    return _launches.get(signature, _prepare, inputs, precision, batch_invariant, state_v_first)(inputs)


def forget_launches() -> None:
    """Forget prepared launches.  The next call of each signature chooses its kernel and configuration again."""
    _launches.forget()


tuned.when_changed(forget_launches)


def _prepare(inputs: GDNInputs, precision: Precision, batch_invariant: bool, state_v_first: bool) -> Launch:
    inputs.check(state_v_first=state_v_first)
    refuse_unsupported("fused", inputs)
    call = Call(inputs=inputs, precision=precision, batch_invariant=batch_invariant, state_v_first=state_v_first)
    return variants.choose(call).prepare(call)


def plan(
    inputs: GDNInputs,
    precision: Precision = Precision(),  # noqa: B008
    *,
    batch_invariant: bool = False,
) -> Plan:
    """The kernel that would run, with its configuration and reason.  Allocates and launches nothing."""
    refuse_unsupported("fused", inputs)
    call = Call(inputs=inputs, precision=precision, batch_invariant=batch_invariant)
    return variants.choose(call).plan(call)


register(Implementation(operator="gdn", name="fused", run=run, plan=plan))
