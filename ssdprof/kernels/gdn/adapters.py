"""GDN and KDA kernels of other libraries, as installed.  Each `load_...` imports its library, and
raises ImportError if it, or one of its dependencies, is missing.

fla         the Triton kernels of https://github.com/fla-org/flash-linear-attention.  It passes some
            calls to other installed libraries; `operators/fla.py` turns this off
model       the torch function of transformers, in fp32; model:installed: fla's function, as
            transformers calls it
flash_qla   the TileLang kernels of https://github.com/QwenLM/FlashQLA.  Where it cuts a long
            sequence, it drops the contribution of a state after a decay below exp(-10).  The
            comparison with the oracle shows the effect
flash_kda   the CUTLASS kernels of https://github.com/MoonshotAI/FlashKDA.  It takes gates and beta
            before their activations, in bf16, and so rounds those of our inputs once more.  The
            comparison shows the effect
cudnn       the CUDA kernel of https://github.com/NVIDIA/cudnn-frontend for KDA on Hopper.  Where it
            cuts a long sequence, it drops history after the least decay of any channel, which is a
            bound only for keys that do not mix channels.  It declares keys of at most length 1 and
            beta between 0 and 1
flashinfer  the kernels of https://github.com/flashinfer-ai/flashinfer.  Its operators differ from
            ours: one takes decays instead of their logarithms, the other raw gates; beta is fp32;
            states have V before K.  The first call prepares the library's arguments and keeps them
            as long as the inputs live, so that the library's time does not include the preparation
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from math import inf
from typing import Any

import torch

from ssdprof.kernels.adapters import SHORT, Tunings, library_kernel, model_function, once
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, Reasons, UnsupportedError, first_reason

HEAD_DIM = 128  # the only K and V of some libraries
CHECKPOINT = 64  # tokens, of which FlashInfer's states on the way are multiples
_FLASH_KDA_BOUND = -5.0  # of the gates
CUDNN_PLAN = "kda_hopper_cuda"
MOST_STEPS = 64  # most tokens of a sequence for the token-by-token kernel
# the module to pass to `load_fla...`
FLA = {"gdn": "fla.ops.gated_delta_rule", "kda": "fla.ops.kda"}
_FUNCTION = {"gdn": "gated_delta_rule", "kda": "kda"}
_MODEL = {
    "gdn": ("qwen3_next", "torch_chunk_gated_delta_rule"),
    "kda": ("kimi_linear", "chunk_kimi_delta_attention"),
}
_FLA_KERNELS = ("fla.ops.common", "fla.ops.utils", "fla.modules.l2norm")


def _unlike_128(inputs: GDNInputs, precision: Precision) -> Reasons:
    """For kernels with exact intermediates, K = V = 128, 16-bit inputs and a state in fp32."""
    yield not precision.exact, "exact intermediates only"
    yield precision.state_dtype != torch.float32, "states stay in fp32"
    dims = inputs.q.shape[3], inputs.v.shape[3]
    yield dims != (HEAD_DIM, HEAD_DIM), f"K and V are {HEAD_DIM}, not {dims[0]} and {dims[1]}"
    yield inputs.q.dtype == torch.float32, "fp16 and bf16 inputs only"


@once
def _ranges(inputs: GDNInputs) -> tuple[float, ...]:
    """The least and largest g, and the least and largest beta, for which the host waits."""
    return tuple(float(end) for gate in (inputs.g, inputs.beta) for end in gate.aminmax())


def plain_gates(inputs: GDNInputs) -> Reasons:
    """For kernels that take g as it is."""
    low, high = _ranges(inputs)[:2]
    yield low == -inf or high > 0, "g is finite and at most 0"


def load_fla(operator: Any, name: str = "gdn") -> Implementation:
    """The chunked kernels of the library's operator.  name: ours; of KDA, gates arrive computed."""
    kernels = (FLA[name], *_FLA_KERNELS)
    tunings = Tunings(
        module for file, module in sorted(sys.modules.items()) if file.startswith(kernels)
    )
    function = getattr(operator, f"chunk_{_FUNCTION[name]}")

    def call(inputs: GDNInputs, _precision: Precision) -> GDNOutput:
        short = inputs.v.shape[0] * inputs.v.shape[1] <= SHORT
        tunings.use_for((inputs.q.shape[2:], inputs.v.shape[2:], inputs.q.dtype, short))
        return _call(function, inputs)

    def plan(inputs: GDNInputs, _precision: Precision) -> Plan:
        return Plan(
            variant="triton",
            launches=5 + 2 * int(inputs.use_qk_l2norm),
            config={"chunk_size": 64},
            reason="it tunes itself in each process; calls to other libraries are turned off",
        )

    @first_reason
    def unsupported(inputs: GDNInputs, precision: Precision) -> Reasons:
        yield not precision.exact, "exact intermediates only"
        yield (
            precision.state_dtype != inputs.q.dtype,
            f"states that enter chunks are {inputs.q.dtype}, as q is",
        )
        yield from plain_gates(inputs)

    return library_kernel(name, "fla", unsupported, call, plan)


def load_fla_recurrent(operator: Any, name: str = "gdn") -> Implementation:
    """The library's token-by-token kernel.  name: of our operator."""

    @first_reason
    def unsupported(inputs: GDNInputs, precision: Precision) -> Reasons:
        yield not precision.exact, "exact intermediates only"
        tokens = inputs.length if inputs.cu_seqlens is None else inputs.length / inputs.sequences
        yield tokens > MOST_STEPS, f"token by token, for sequences of at most {MOST_STEPS}"
        yield from plain_gates(inputs)

    call = _function(getattr(operator, f"fused_recurrent_{_FUNCTION[name]}"))
    plan = Plan(variant="triton", launches=1, reason="one launch, token by token")
    return library_kernel(name, "fla_recurrent", unsupported, call, plan)


def load_model(name: str = "gdn", package: str = "") -> Implementation:
    """transformers' torch function; with a package, that package's, as transformers calls it.

    name: of our operator.
    """
    function = model_function(*_MODEL[name], package)

    def call(inputs: GDNInputs, _precision: Precision) -> GDNOutput:
        with torch.cuda.device(inputs.q.get_device()), torch.no_grad():
            out, final_states = function(
                inputs.q,
                inputs.k,
                inputs.v,
                g=inputs.g,
                beta=inputs.beta,
                initial_state=inputs.initial_state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=inputs.use_qk_l2norm,
            )
        return GDNOutput(out, final_states)

    @first_reason
    def unsupported(inputs: GDNInputs, precision: Precision) -> Reasons:
        states = inputs.q.dtype if package else torch.float32
        yield not precision.exact, "exact intermediates only"
        yield precision.state_dtype != states, f"states that enter chunks are {states}"
        yield inputs.cu_seqlens is not None, "no packed sequences"
        yield inputs.scale_or_default != inputs.q.shape[3] ** -0.5, "no scale but K ** -0.5"
        yield from plain_gates(inputs)

    plan = Plan(variant=package or "torch", launches=0, reason="as transformers calls it")
    word = "model:installed" if package else "model"
    return library_kernel(name, word, unsupported, call, plan)


def fla_version() -> str:
    """The library's own version."""
    return str(getattr(import_module("fla"), "__version__", "unknown"))


def load_flash_qla() -> Implementation:
    call = _function(import_module("flash_qla").chunk_gated_delta_rule)

    @first_reason
    def unsupported(inputs: GDNInputs, precision: Precision) -> Reasons:
        yield from _unlike_128(inputs, precision)
        yield from plain_gates(inputs)

    plan = Plan(
        variant="tilelang",
        launches=3,
        config={"chunk_size": 64},
        reason="it cuts sequences by itself",
    )
    return library_kernel("gdn", "flash_qla", unsupported, call, plan)


def load_flash_kda() -> Implementation:
    """The library's kernels, for bounded gates.  It normalises q and k, and has states in bf16
    between chunks.
    """
    function = import_module("flash_kda").fwd

    def prepare(inputs: GDNInputs) -> Prepared:
        if inputs.g.min() < _FLASH_KDA_BOUND or inputs.beta.max() > 1:
            raise UnsupportedError(
                f"flash_kda: g is at least {_FLASH_KDA_BOUND:.0f}, and beta at most 1"
            )
        v, states, bounds = inputs.v.contiguous(), inputs.initial, inputs.cu_seqlens
        states = None if states is None else states.float().mT.contiguous()
        activated = inputs.g.double().clamp(max=0) / _FLASH_KDA_BOUND, inputs.beta.double()
        before = (one.logit().bfloat16().contiguous() for one in activated)
        # A_log of a head and dt_bias of a channel
        zeros = torch.zeros(v.shape[2:], device=v.device)
        run = partial(
            function,
            inputs.q.contiguous(),
            inputs.k.contiguous(),
            v,
            *before,
            inputs.scale_or_default,
            A_log=zeros[:, 0].contiguous(),
            dt_bias=zeros,
            lower_bound=_FLASH_KDA_BOUND,
            initial_state=states,
            cu_seqlens=None if bounds is None else bounds.long(),
        )

        def call() -> GDNOutput:
            out, final_states = (
                torch.empty_like(v),
                torch.empty(inputs.states_shape, device=v.device).mT.contiguous(),
            )
            run(out=out, final_state=final_states)
            return GDNOutput(out, final_states.mT)

        return call, (v, states)

    @first_reason
    def unsupported(inputs: GDNInputs, precision: Precision) -> Reasons:
        yield precision.state_dtype != torch.bfloat16, "states that enter chunks are bf16"
        yield from _unlike_128(inputs, replace(precision, state_dtype=torch.float32))
        other = (
            inputs.q.dtype != torch.bfloat16
            or inputs.values_per_key > 1
            or not inputs.use_qk_l2norm
        )
        yield other, "bf16 inputs, as many key heads, and q and k that it normalises"

    plan = Plan(
        variant="cutlass",
        launches=2,
        reason="gates and beta before their activations are prepared before",
    )
    return prepared_kernel("kda", "flash_kda", unsupported, prepare, plan)


def load_cudnn() -> Implementation:
    """The library's CUDA kernel for Hopper, by the name of its plan: others are other kernels."""
    function = import_module("cudnn.linear_attention.ops").kimi_delta_attention

    def prepare(inputs: GDNInputs) -> Prepared:
        v, states, shape = inputs.v.flatten(0, 1).contiguous(), inputs.initial, inputs.v.shape
        bounds = inputs.cu_seqlens
        if bounds is None:
            bounds = torch.arange(inputs.sequences + 1, device=v.device) * inputs.length
        states = None if states is None else states.float().mT.contiguous()
        run = partial(
            function,
            inputs.q.flatten(0, 1).contiguous(),
            inputs.k.flatten(0, 1).contiguous(),
            v,
            inputs.g.float().flatten(0, 1).contiguous(),
            inputs.beta.float().flatten(0, 1).contiguous(),
            bounds.int(),
            scale=inputs.scale_or_default,
            initial_state=states,
            output_final_state=True,
            use_qk_l2norm_in_kernel=inputs.use_qk_l2norm,
            plan_name=CUDNN_PLAN,
        )

        def call() -> GDNOutput:
            out, final_states = run()
            return GDNOutput(out.view(shape), final_states.mT)

        return call, (v, states)

    @first_reason
    def unsupported(inputs: GDNInputs, precision: Precision) -> Reasons:
        yield from _unlike_128(inputs, precision)
        yield inputs.q.dtype != torch.bfloat16, "bf16 inputs only"
        yield from plain_gates(inputs)
        low, high = _ranges(inputs)[2:]
        yield low < 0 or high > 1, "beta between 0 and 1"
        long = not inputs.use_qk_l2norm and _longest_key(inputs) > 1.01
        yield long, "keys of at most length 1, or keys that it normalises"

    reason = "g and beta in fp32 and V-first states are prepared outside of its time"
    plan = Plan(variant=CUDNN_PLAN, launches=1, reason=reason)
    return prepared_kernel("kda", "cudnn", unsupported, prepare, plan)


@once
def _longest_key(inputs: GDNInputs) -> float:
    """For which the host waits."""
    return float(inputs.k.float().norm(dim=-1).max())


def _call(function: Callable[..., Any], inputs: GDNInputs) -> GDNOutput:
    with torch.cuda.device(inputs.q.get_device()), torch.no_grad():
        out, final_states = function(
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            g=inputs.g,
            beta=inputs.beta,
            scale=inputs.scale_or_default,
            initial_state=inputs.initial_state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=inputs.use_qk_l2norm,
            cu_seqlens=inputs.cu_seqlens,
        )
    return GDNOutput(out, final_states)


def _function(function: Callable[..., Any]) -> Callable[[GDNInputs, Precision], GDNOutput]:
    return lambda inputs, _precision: _call(function, inputs)


def load_flashinfer() -> Implementation:
    """The library's chunked kernels.  It normalises q and k in a launch of its own."""
    import_module("flashinfer.gdn_kernels.qk_l2norm")  # without it the library ignores the request
    function = import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule

    def prepare(inputs: GDNInputs) -> Prepared:
        cu_seqlens, states, shape = inputs.cu_seqlens, inputs.initial, inputs.v.shape
        if cu_seqlens is None:
            cu_seqlens = torch.arange(inputs.sequences + 1, device=inputs.q.device) * inputs.length
        v = inputs.v.flatten(0, 1).contiguous()
        states = None if states is None else states.float().mT.contiguous()
        kept, every, more = None, inputs.state_every, dict[str, Any]()
        if every:
            count, (heads, key_dim, value_dim) = inputs.length // every, inputs.states_shape[1:]
            kept = torch.empty(inputs.sequences * count, heads, value_dim, key_dim, device=v.device)
            starts = torch.arange(inputs.sequences + 1, device=v.device) * count
            more = dict(
                state_checkpoints=kept, checkpoint_cu_starts=starts, checkpoint_every_n_tokens=every
            )
        run = partial(
            function,
            inputs.q.flatten(0, 1).contiguous(),
            inputs.k.flatten(0, 1).contiguous(),
            v,
            inputs.g.float().clamp(max=0).exp().flatten(0, 1).contiguous(),
            inputs.beta.float().flatten(0, 1).contiguous(),
            initial_state=states,
            scale=inputs.scale_or_default,
            output_final_state=True,
            cu_seqlens=cu_seqlens.long(),
            use_qk_l2norm_in_kernel=inputs.use_qk_l2norm,
            backend="flashinfer",
            **more,
        )

        def call() -> GDNOutput:
            out, final_states = run()
            return GDNOutput(out.view(shape), (final_states if kept is None else kept).mT)

        return call, (v, states)

    def plan(inputs: GDNInputs, _precision: Precision) -> Plan:
        reason = "the decays, beta in fp32 and V-first states are prepared outside of its time"
        return Plan(variant="cute", launches=1 + int(inputs.use_qk_l2norm), reason=reason)

    @first_reason
    def unsupported(inputs: GDNInputs, precision: Precision) -> Reasons:
        yield from _unlike_128(inputs, precision)
        every = inputs.state_every
        other = (
            bool(every)
            and (inputs.cu_seqlens is not None or every % CHECKPOINT or inputs.length % every) > 0
        )
        yield other, f"states after multiples of {CHECKPOINT} tokens that divide the sequences"

    return replace(
        prepared_kernel("gdn", "flashinfer", unsupported, prepare, plan),
        keeps=lambda _: True,
        pools=True,
    )


def load_flashinfer_mtp() -> Implementation:
    """The library's kernel for a few tokens of each sequence, token by token, as in speculative
    decoding.
    """
    function = import_module("flashinfer.gdn_decode").gated_delta_rule_mtp

    def prepare(inputs: GDNInputs) -> Prepared:
        assert inputs.initial_state is not None
        if inputs.beta.max() > 1:
            raise UnsupportedError("flashinfer_mtp: beta is at most 1")
        n, device = inputs.sequences, inputs.q.device
        (length, heads), (key_dim, value_dim) = inputs.v.shape[1:3], inputs.states_shape[2:]
        count, slots = len(inputs.initial_state), inputs.state_indices
        slots = torch.arange(n, device=device) if slots is None else slots
        slots, new = slots.int(), torch.arange(count, count + n, dtype=torch.int32, device=device)
        # without states to keep it writes to slots of its own, behind those that it reads
        pool = torch.cat(
            [inputs.initial_state.float().mT] * (1 if inputs.state_every else 1 + -(-n // count))
        )
        zeros, v = torch.zeros(heads, device=device), inputs.v.contiguous()
        # it computes g = -exp(A_log) softplus(a + dt_bias), and beta = sigmoid(b)
        a, b = inputs.g.double().neg().expm1().log().float(), inputs.beta.double().logit().float()
        run = partial(
            function,
            inputs.q.contiguous(),
            inputs.k.contiguous(),
            v,
            pool,
            slots,
            zeros,
            a,
            zeros,
            b,
            scale=inputs.scale_or_default,
            disable_state_update=bool(inputs.state_every),
            use_qk_l2norm=inputs.use_qk_l2norm,
        )
        kept = (
            torch.empty(n, length, heads, value_dim, key_dim, device=device)
            if inputs.state_every
            else None
        )

        def call() -> GDNOutput:
            out = torch.empty_like(v)
            if kept is not None:
                run(output=out, intermediate_states_buffer=kept)
                return GDNOutput(out, kept.flatten(0, 1).mT)
            out, states = run(output=out, output_state_indices=new)
            return GDNOutput(out, states[count : count + n].mT)

        return call, (v, pool[:count])

    @first_reason
    def unsupported(inputs: GDNInputs, precision: Precision) -> Reasons:
        yield from _unlike_128(inputs, precision)
        other = (
            inputs.cu_seqlens is not None
            or inputs.initial_state is None
            or not 1 < inputs.length <= MOST_STEPS
        )
        yield other, f"2 to {MOST_STEPS} tokens of each sequence, with initial states"
        yield inputs.state_every > 1, "the state after every token, or only at the end"

    reason = "raw gates in fp32 and a pool of V-first states are prepared outside of its time"
    plan = Plan(variant="cute", launches=1, reason=reason)
    return replace(
        prepared_kernel("gdn", "flashinfer_mtp", unsupported, prepare, plan),
        keeps=lambda inputs: inputs.state_every == 1,
        pools=True,
    )


# v and the states as the call reads them
Prepared = tuple[Callable[[], GDNOutput], tuple[torch.Tensor | None, ...]]


def prepared_kernel(
    operator: str,
    name: str,
    unsupported: Callable[[GDNInputs, Precision], str],
    prepare: Callable[[GDNInputs], Prepared],
    plan: Callable[[GDNInputs, Precision], Plan] | Plan,
) -> Implementation:
    """A library's kernel whose arguments are prepared once for inputs, and kept as long as these
    live.
    """
    prepared = once(prepare)

    def call(inputs: GDNInputs, _precision: Precision) -> GDNOutput:
        with torch.cuda.device(inputs.q.get_device()), torch.no_grad():
            return prepared(inputs)[0]()

    def copies(inputs: GDNInputs) -> list[torch.Tensor]:
        given = {
            tensor.data_ptr() for tensor in (inputs.v, inputs.initial_state) if tensor is not None
        }
        return [
            one for one in prepared(inputs)[1] if one is not None and one.data_ptr() not in given
        ]

    return replace(library_kernel(operator, name, unsupported, call, plan), copies=copies)
