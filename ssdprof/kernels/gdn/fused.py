"""The gated delta rule in few launches: the public function, the torch operator and the choice
between kernels.

`gdn_fused(...)` takes tensors, for use without the rest of ssdprof; the registered implementation
takes `GDNInputs`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ssdprof.kernels.choice import Fused, FusedCall, Variant, Work, tensor_function
from ssdprof.kernels.device import capability, sm_count
from ssdprof.kernels.gdn.config import GDNPortableConfig, call_key
from ssdprof.kernels.gdn.hopper import config as hopper_config
from ssdprof.kernels.gdn.hopper import slices as hopper_slices
from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig
from ssdprof.kernels.gdn.hopper.launch import hopper_launch, launch_count, workspace
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.gdn.portable import factor_shapes, portable_launch
from ssdprof.kernels.gdn.recurrent import blocks_of, recurrent_launch
from ssdprof.kernels.inputs import PreparedLaunch
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, override, register

# sequences of up to this many positions are faster token by token than in a chunk
_RECURRENT_LENGTH = 16
# compute capability and multiprocessors of an H200, for tensors that are not on a GPU
_H200 = ((9, 0), 132)


def gdn_fused(
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
) -> GDNOutput:
    """The gated delta rule (Gated DeltaNet), forward only.

        S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T
        out_t = S_t^T (scale q_t)

    q, k: (B, T, H, K)
    v: (B, T, HV, V), HV a multiple of H: value head i uses q and k head i // (HV / H)
    K and V: 1 to 256, independent of each other
    g: (B, T, HV), natural logarithm of the decay.  The host does not check it; a g above 0 counts
        as 0.
    beta: (B, T, HV), any value.  If beta times the squared norm of a key is above 2 or below 0, the
        result may overflow to NaN although the state stays small; `gdn_unfused` and `gdn_recurrent`
        have no such limit.
    scale: K ** -0.5 if None
    initial_state: (sequences, HV, K, V), or (sequences, HV, V, K) if state_v_first
    use_qk_l2norm: q and k are divided by sqrt(sum of their squares + 1e-6) first
    cu_seqlens: (sequences + 1) int32 or int64, non-decreasing, from 0 to T, for sequences packed
        along T; then B = 1.  Empty sequences are allowed.  The host does not read the values, so
        wrong values are not rejected: positions outside all sequences are not written, and for
        sequences that overlap or end past T, memory outside of the tensors may be read and written.
    q, k and v share a dtype: fp32, fp16 or bf16.  g, beta and initial_state may have any of these,
    and fp64.  Any strides are allowed.

    precision: "relaxed" multiplies fp32 inputs in bfloat16, except in the recurrent kernel, which
        runs short sequences.  It changes nothing for others.  States pass from chunk to chunk and
        from segment to segment in fp32, so that state_dtype has no effect.
    state_v_first: initial and final states have V before K
    batch_invariant: a sequence's result is bitwise the same in batches of any size, and bitwise the
        same in all packs.  The two may differ.  Without batch_invariant, the number of sequences
        affects how they are cut, and whether short packed ones run the recurrent kernel.  With it,
        packed sequences are not cut, so that a pack of few long ones takes longer.

    Returns out (B, T, HV, V) in v's dtype and final_states (sequences, HV, K, V), or (sequences,
    HV, V, K) if state_v_first, in fp32.  They are bitwise the same in every call, and do not depend
    on the contents of other sequences in the batch or pack.  The call does not synchronise with the
    host.  It may be captured in a CUDA graph, and called under torch.compile(fullgraph=True).

    Raises ValueError for inputs that do not fit together, and UnsupportedError for unsupported
    ones.
    Source: Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464).
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
    return _fused_function(
        arguments, precision, state_v_first=state_v_first, batch_invariant=batch_invariant
    )


# --- the kernels


def equals_text(call: FusedCall) -> str:
    """The end of a plan's reason, "the same as" the precision that the kernel computes; "" if the
    call asks for that one.

    States stay in fp32, and exact and relaxed intermediates do not differ for 16-bit inputs.
    """
    asked = call.precision
    exact = asked.exact or call.inputs.q.dtype != torch.float32
    if exact == asked.exact and asked.state_dtype == torch.float32:
        return ""
    return f"; the same as {'exact' if exact else 'relaxed'} with fp32 states"


def _recurrent_unsupported(call: FusedCall) -> str:
    """Why the recurrent kernel should not run a call: sequences are too long, or the call is a
    batch-invariant pack; "" if it should.

    The host does not know packed lengths.  So a pack runs this kernel if all its sequences together
    have at most _RECURRENT_LENGTH positions, or at most as many as there are sequences, which then
    probably have one each.  A batch-invariant pack never runs it, because the choice would depend
    on the other sequences of the pack.
    """
    packed = call.inputs.cu_seqlens is not None
    length = call.inputs.length
    if packed and call.batch_invariant:
        return "a pack"
    most = max(_RECURRENT_LENGTH, call.inputs.sequences) if packed else _RECURRENT_LENGTH
    return "" if length <= most else f"more than {most} positions"


def _recurrent_work(call: FusedCall, _blocks: Any) -> Work:
    """One launch without a workspace."""
    return (
        1,
        0,
        f"one launch, token by token: the sequences are short{call.precision.equals_exact_text}",
    )


def _prepare(launch: Callable[..., PreparedLaunch], call: FusedCall, config: Any) -> PreparedLaunch:
    """The launch of a kernel that computes the same at every precision."""
    return launch(call.inputs, config, state_v_first=call.state_v_first)


def hopper_cut(call: FusedCall) -> GDNHopperConfig:
    """The division of the call into programs on a Hopper GPU."""
    return GDNHopperConfig.choose(
        call.inputs, sm_count(call.inputs.q), batch_invariant=call.batch_invariant
    )


def _hopper_work(call: FusedCall, config: GDNHopperConfig) -> Work:
    """Two launches, or four where slow heads may have parts (`hopper/parts.py`)."""
    slow = "; two more launches for heads that forget slowly" if config.transition_parts else ""
    reason = (
        f"two launches: inverses of all chunks, then the states{slow}; "
        f"{config.reason}{equals_text(call)}"
    )
    workspace_bytes, _ = workspace(call.inputs, config)
    return launch_count(call.inputs, config), workspace_bytes, reason


def _by_slice(call: FusedCall) -> FusedCall:
    """The call with each slice of V as a head."""
    return replace(call, inputs=hopper_slices.by_slice(call.inputs))


def _slices_work(call: FusedCall, config: GDNHopperConfig) -> Work:
    """The launches of the Hopper kernels, and those that copy gates and states.

    config: for the slices (`_by_slice`).
    """
    count = hopper_slices.slice_count(call.inputs)
    launches, _, hopper_reason = _hopper_work(_by_slice(call), config)
    copies, copied = 1, "states"  # one copy of the final states
    if count > 1:
        copies += 2  # of g and beta, for each slice
        copied = "gates and states"
    if call.inputs.initial_state is not None:
        copies += 2  # zeros, and the initial states among them
    padding = f"K and slices of V ({count}) padded to 128, copies of {copied}"
    workspace_bytes = hopper_slices.workspace_bytes(call.inputs, config)
    return launches + copies, workspace_bytes, f"{padding}; {hopper_reason}"


def configured(committed: Callable[..., Any], kernel: str, call: FusedCall) -> Any:
    """The tuned configuration of a call, or the committed one; packed sequences always have the
    committed one.

    committed: (inputs, batch_invariant) -> the committed configuration
    kernel: its name in `call_key`
    """
    tuned = None
    if call.inputs.cu_seqlens is None:
        tuned = override(
            call_key(call.inputs, call.precision, kernel, batch_invariant=call.batch_invariant)
        )
    return tuned or committed(call.inputs, batch_invariant=call.batch_invariant)


def committed_portable(inputs: GDNInputs, *, batch_invariant: bool = False) -> GDNPortableConfig:
    """The configuration of the portable kernel without tuning, for the inputs' GPU.  Without a GPU
    it is that of an H200.
    """
    gpu = (capability(inputs.q), sm_count(inputs.q)) if inputs.q.is_cuda else _H200
    return GDNPortableConfig.choose(inputs, *gpu, batch_invariant=batch_invariant)


def portable_work(
    call: FusedCall, config: Any, shapes_of: Callable[..., Any] = factor_shapes
) -> Work:
    """Two launches, and the bytes of the tensors that the first one writes for the second.

    shapes_of: a function of inputs, precision and configuration that returns the shapes and dtypes
        of these tensors
    """
    factors = shapes_of(call.inputs, call.precision, config)
    workspace_bytes = sum(prod(shape) * dtype.itemsize for shape, dtype in factors)
    reason = (
        f"two launches: factors of all chunks, then the states; {config.reason}{equals_text(call)}"
    )
    return 2, workspace_bytes, reason


RECURRENT = Variant(
    name="recurrent",
    unsupported=_recurrent_unsupported,
    configure=lambda call: blocks_of(call.inputs),
    prepare=partial(_prepare, recurrent_launch),
    work=_recurrent_work,
)
HOPPER = Variant(
    name="hopper",
    unsupported=lambda call: hopper_config.unsupported(call.inputs),
    configure=hopper_cut,
    prepare=partial(_prepare, hopper_launch),
    work=_hopper_work,
)
SLICES = Variant(
    name="hopper, slices",
    unsupported=lambda call: hopper_slices.unsupported(call.inputs),
    configure=lambda call: hopper_cut(_by_slice(call)),
    work=_slices_work,
    prepare=partial(_prepare, hopper_slices.sliced_launch),
)
PORTABLE = Variant(
    name="portable",
    configure=partial(configured, committed_portable, "portable"),
    prepare=lambda call, config: portable_launch(
        call.inputs, call.precision, config, state_v_first=call.state_v_first
    ),
    work=portable_work,
)


FUSED: Fused = Fused("fused", (RECURRENT, HOPPER, SLICES, PORTABLE), rows=("q", "k", "v"))
# The portable kernel for every call, also where `fused` would choose another one.  A bench times it
# only by request.
FUSED_PORTABLE: Fused = Fused("fused_portable", (PORTABLE,))
_fused_function = tensor_function(FUSED, GDNInputs)
run, plan = FUSED.run, FUSED.plan
for _fused in (FUSED, FUSED_PORTABLE):
    register(
        Implementation(
            operator="gdn", name=_fused.name, run=_fused.run, plan=_fused.plan, neglects=2.0**-24
        )
    )
