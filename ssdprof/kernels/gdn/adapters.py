"""GDN and KDA kernels of other libraries, as installed.  Each `load_...` imports its library, and
raises ImportError if it, or one of its dependencies, is missing.  For fla the caller does this, and
passes the module.

fla         the Triton kernels of https://github.com/fla-org/flash-linear-attention.  It passes some
            calls to other installed libraries; `operators/fla.py` turns this off
model       the torch function of transformers, in fp32.  `model:installed` is the function of the
            package that transformers would call, such as fla, with the arguments that it passes
flash_qla   the TileLang kernels of https://github.com/QwenLM/FlashQLA.  Where it cuts a long
            sequence, it drops the contribution of a state after a decay below exp(-10).  The
            comparison with the oracle shows the effect
flash_kda   the CUTLASS kernels of https://github.com/MoonshotAI/FlashKDA for KDA.  They take gates
            and beta before their activations, in bf16, so that g and beta are rounded once more.
            The comparison with the oracle shows the effect
cudnn       the CUDA kernel of https://github.com/NVIDIA/cudnn-frontend for KDA on Hopper.  Where it
            cuts a long sequence, it drops history once all channels have decayed, although keys
            that mix channels may keep it.  It supports keys of at most length 1 and beta between 0
            and 1
flashinfer  the kernels of https://github.com/flashinfer-ai/flashinfer for GDN.  Those for prompts
            take decays instead of their logarithms, and beta.  Those for steps on a pool,
            flashinfer_mtp, take gates and beta before their activations.  All are in fp32, and
            states have V before K.  The first call prepares these arguments and keeps them as long
            as the inputs live, so that the library's time does not include the preparation
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from math import inf
from typing import Any

import torch

from ssdprof.kernels.adapters import (
    LONGEST_BY_TOKEN,
    SHORT,
    Prepared,
    Tunings,
    bounds_of,
    library_kernel,
    model_function,
    once,
    prepared_kernel,
    too_long,
)
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.pools import Bound, Slots, pool_kernel
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, Reasons, UnsupportedError, first_reason

HEAD_DIM = 128  # the only K and V that some libraries support
CHECKPOINT = 64  # tokens: FlashInfer returns states after multiples of this number
_FLASH_KDA_BOUND = -5.0  # the least g that FlashKDA supports
CUDNN_PLAN = "kda_hopper_cuda"  # the library's name of this kernel
# by operator: the name of the module to pass to `load_fla` and `load_fla_recurrent`, and how its
# functions' names end
FLA = {"gdn": "fla.ops.gated_delta_rule", "kda": "fla.ops.kda"}
_FLA_SUFFIXES = {"gdn": "gated_delta_rule", "kda": "kda"}
# by operator: the model type of transformers, and its function
_MODEL_FUNCTIONS = {
    "gdn": ("qwen3_next", "torch_chunk_gated_delta_rule"),
    "kda": ("kimi_linear", "chunk_kimi_delta_attention"),
}
# prefixes of the names of modules with kernels that the chunked functions of GDN and of KDA launch
_FLA_KERNELS = ("fla.ops.common", "fla.ops.utils", "fla.modules.l2norm")


def _unlike_128(inputs: GDNInputs, precision: Precision) -> Reasons:
    """Reasons against a call, for a kernel that supports only exact intermediates, K = V = 128,
    16-bit inputs and fp32 states.
    """
    yield not precision.exact, "exact intermediates only"
    yield precision.state_dtype != torch.float32, "states stay in fp32"
    dims = inputs.q.shape[3], inputs.v.shape[3]
    yield dims != (HEAD_DIM, HEAD_DIM), f"K and V are {HEAD_DIM}, not {dims[0]} and {dims[1]}"
    yield inputs.q.dtype == torch.float32, "fp16 and bf16 inputs only"


@once
def _range_of_g(inputs: GDNInputs) -> tuple[float, float]:
    """The least and the largest g, NaN if any is NaN.  The host waits for them."""
    low, high = inputs.g.aminmax()
    return float(low), float(high)


@once
def _range_of_beta(inputs: GDNInputs) -> tuple[float, float]:
    """The least and the largest beta, NaN if any is NaN.  The host waits for them."""
    low, high = inputs.beta.aminmax()
    return float(low), float(high)


def plain_gates(inputs: GDNInputs) -> Reasons:
    """Reasons against these inputs, for a kernel that uses g without clamping it.  Inputs with a
    NaN among g are not refused.
    """
    low, high = _range_of_g(inputs)
    yield low == -inf or high > 0, "g is finite and at most 0"


def plain_beta(inputs: GDNInputs) -> Reasons:
    """Reasons against these inputs, for a kernel that supports only a beta between 0 and 1, for
    example because it takes beta before its activation, a sigmoid.
    """
    low, high = _range_of_beta(inputs)
    yield low < 0 or high > 1, "beta between 0 and 1"


# --- arguments in other forms


def flattened(
    inputs: GDNInputs, *names: str, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, ...]:
    """The named tensors with all sequences one after the other, (tokens, ...), contiguous.

    dtype: that of the results; None: unchanged.
    """
    tensors = (getattr(inputs, name).flatten(0, 1) for name in names)
    return tuple(tensor.to(dtype or tensor.dtype).contiguous() for tensor in tensors)


def v_first_states(inputs: GDNInputs) -> torch.Tensor:
    """The initial states, (sequences, HV, V, K) in fp32; zeros if the call has none."""
    states = inputs.initial
    if states is None:
        states = torch.zeros(inputs.states_shape, device=inputs.device)
    return states.float().mT.contiguous()


def raw_gates(inputs: GDNInputs) -> tuple[torch.Tensor, ...]:
    """a, b, A_log and dt_bias, from which a model would compute these gates:

        g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b)

    A_log and dt_bias are zero here, so that a and b follow from g and beta.  a is NaN where g is
    above 0, and b where beta is outside of 0 to 1 (`refused_gates`).

    Returns a (tokens, HV), of KDA (tokens, HV, K); b (tokens, HV); A_log (HV); dt_bias (HV), of KDA
    (HV * K); all in fp32.
    """
    g, beta = flattened(inputs, "g", "beta", dtype=torch.float64)
    a = g.neg().expm1().log().float()
    b = beta.logit().float()
    A_log = torch.zeros_like(b[0])
    dt_bias = torch.zeros_like(a[0]).flatten()
    return a, b, A_log, dt_bias


@first_reason
def refused_gates(inputs: GDNInputs) -> Reasons:
    """The reason against these inputs, for a kernel that takes g and beta before their
    activations; "" if there is none.
    """
    yield from plain_gates(inputs)
    yield from plain_beta(inputs)


# --- the libraries


def load_fla(module: Any, operator: str = "gdn") -> Implementation:
    """The library's chunked kernels.  They take gates after their activation, for KDA too.

    module: the library's, which `FLA` names.  operator: gdn or kda.
    """
    prefixes = (FLA[operator], *_FLA_KERNELS)
    loaded = sorted(sys.modules.items())
    tunings = Tunings(kernels for name, kernels in loaded if name.startswith(prefixes))
    run = _caller_of(getattr(module, f"chunk_{_FLA_SUFFIXES[operator]}"))

    def call(inputs: GDNInputs, precision: Precision) -> GDNOutput:
        short = inputs.v.shape[0] * inputs.length <= SHORT
        tunings.use_for((inputs.q.shape[2:], inputs.v.shape[2:], inputs.q.dtype, short))
        return run(inputs, precision)

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

    return library_kernel(operator, "fla", unsupported, call, plan)


def load_fla_recurrent(module: Any, operator: str = "gdn") -> Implementation:
    """The library's token-by-token kernel.  Arguments are those of `load_fla`."""

    @first_reason
    def unsupported(inputs: GDNInputs, precision: Precision) -> Reasons:
        yield not precision.exact, "exact intermediates only"
        yield too_long(inputs)
        yield from plain_gates(inputs)

    call = _caller_of(getattr(module, f"fused_recurrent_{_FLA_SUFFIXES[operator]}"))
    plan = Plan(variant="triton", launches=1, reason="one launch, token by token")
    return library_kernel(operator, "fla_recurrent", unsupported, call, plan)


def load_model(operator: str = "gdn", package: str = "") -> Implementation:
    """The function that transformers calls: its own in torch, or that of an installed package.

    operator: gdn or kda.  package: "" for the torch function.
    """
    model_type, function_name = _MODEL_FUNCTIONS[operator]
    function = model_function(model_type, function_name, package)

    def call(inputs: GDNInputs, _precision: Precision) -> GDNOutput:
        return _call(function, inputs, inputs.q, inputs.k, inputs.v)

    @first_reason
    def unsupported(inputs: GDNInputs, precision: Precision) -> Reasons:
        state_dtype = inputs.q.dtype if package else torch.float32
        yield not precision.exact, "exact intermediates only"
        yield precision.state_dtype != state_dtype, f"states that enter chunks are {state_dtype}"
        yield inputs.cu_seqlens is not None, "no packed sequences"
        yield inputs.scale_or_default != inputs.q.shape[3] ** -0.5, "no scale but K ** -0.5"
        yield from plain_gates(inputs)

    # launches=0: the number is not known
    plan = Plan(variant=package or "torch", launches=0, reason="as transformers calls it")
    name = "model:installed" if package else "model"
    return library_kernel(operator, name, unsupported, call, plan)


def load_flash_qla() -> Implementation:
    """The library's TileLang kernels for GDN."""
    call = _caller_of(import_module("flash_qla").chunk_gated_delta_rule)

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
    """The library's kernels for KDA, for bounded gates.  They normalise q and k, and keep states
    in bf16 between chunks.
    """
    function = import_module("flash_kda").fwd

    def prepare(inputs: GDNInputs) -> Prepared:
        least_beta, largest_beta = _range_of_beta(inputs)
        if inputs.g.min() < _FLASH_KDA_BOUND or least_beta < 0 or largest_beta > 1:
            raise UnsupportedError(
                f"flash_kda: g is at least {_FLASH_KDA_BOUND:.0f}, and beta between 0 and 1"
            )
        v = inputs.v.contiguous()
        bounds = inputs.cu_seqlens
        states = None if inputs.initial is None else v_first_states(inputs)
        # the kernel computes g = bound * sigmoid(raw_g), with A_log and dt_bias 0
        raw_g = (inputs.g.double().clamp(max=0) / _FLASH_KDA_BOUND).logit()
        raw_beta = inputs.beta.double().logit()
        zeros = torch.zeros(v.shape[2:], device=v.device)  # (HV, V), and V = K
        run = partial(
            function,
            inputs.q.contiguous(),
            inputs.k.contiguous(),
            v,
            raw_g.bfloat16().contiguous(),
            raw_beta.bfloat16().contiguous(),
            inputs.scale_or_default,
            A_log=zeros[:, 0].contiguous(),
            dt_bias=zeros,
            lower_bound=_FLASH_KDA_BOUND,
            initial_state=states,
            cu_seqlens=None if bounds is None else bounds.long(),
        )

        def call() -> GDNOutput:
            out = torch.empty_like(v)
            final_states = torch.empty(inputs.states_shape, device=v.device).mT.contiguous()
            run(out=out, final_state=final_states)
            return GDNOutput(out, final_states.mT)

        return call, (v, states)

    @first_reason
    def unsupported(inputs: GDNInputs, precision: Precision) -> Reasons:
        yield precision.state_dtype != torch.bfloat16, "states that enter chunks are bf16"
        yield from _unlike_128(inputs, replace(precision, state_dtype=torch.float32))
        supported = (
            inputs.q.dtype == torch.bfloat16 and inputs.values_per_key == 1 and inputs.use_qk_l2norm
        )
        reason = "bf16 inputs, as many key heads as value heads, and q and k that it normalises"
        yield not supported, reason

    plan = Plan(
        variant="cutlass",
        launches=2,
        reason="gates and beta before their activations are prepared outside of its time",
    )
    return prepared_kernel("kda", "flash_kda", unsupported, prepare, plan)


def _on_packs(
    function: Callable[..., Any], inputs: GDNInputs, *arguments: torch.Tensor, **others: Any
) -> Prepared:
    """A prepared call of a library's function that takes all sequences as one pack, and states with
    V before K.

    arguments: those that the function takes by position: q, k and v, then more.
    others: those that it takes by name, besides those that are given here.  With
        `state_checkpoints` among them, the function writes its states there, and they are the
        result instead of the final states.  The next call overwrites them.
    """
    shape = inputs.v.shape
    checkpoints = others.get("state_checkpoints")
    states = None if inputs.initial is None else v_first_states(inputs)
    run = partial(
        function,
        *arguments,
        scale=inputs.scale_or_default,
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=inputs.use_qk_l2norm,
        **others,
    )

    def call() -> GDNOutput:
        out, final_states = run()
        written = final_states if checkpoints is None else checkpoints
        return GDNOutput(out.view(shape), written.mT)

    return call, (arguments[2], states)


def load_cudnn() -> Implementation:
    """The library's CUDA kernel for KDA on Hopper.  The function's argument `plan_name` selects it
    among the library's kernels.
    """
    function = import_module("cudnn.linear_attention.ops").kimi_delta_attention

    def prepare(inputs: GDNInputs) -> Prepared:
        rows = flattened(inputs, "q", "k", "v")
        gates = flattened(inputs, "g", "beta", dtype=torch.float32)
        bounds = bounds_of(inputs).int()
        return _on_packs(function, inputs, *rows, *gates, bounds, plan_name=CUDNN_PLAN)

    @first_reason
    def unsupported(inputs: GDNInputs, precision: Precision) -> Reasons:
        yield from _unlike_128(inputs, precision)
        yield inputs.q.dtype != torch.bfloat16, "bf16 inputs only"
        yield from plain_gates(inputs)
        yield from plain_beta(inputs)
        # a key of length 1 may be longer after its rounding to bf16
        long = not inputs.use_qk_l2norm and _longest_key(inputs) > 1.01
        yield long, "keys of at most length 1, or keys that it normalises"

    reason = "g and beta in fp32 and V-first states are prepared outside of its time"
    plan = Plan(variant=CUDNN_PLAN, launches=1, reason=reason)
    return prepared_kernel("kda", "cudnn", unsupported, prepare, plan)


@once
def _longest_key(inputs: GDNInputs) -> float:
    """The length of the longest key.  The host waits for it."""
    return float(inputs.k.float().norm(dim=-1).max())


def _call(
    function: Callable[..., Any], inputs: GDNInputs, *rows: torch.Tensor, **others: object
) -> GDNOutput:
    """Call a library's function with these inputs, on their GPU.

    rows: q, k and v, if the function takes them by position.
    others: further arguments, by name; q, k and v among them, if it takes them by name.
    """
    with torch.cuda.device(inputs.q.get_device()), torch.no_grad():
        out, final_states = function(
            *rows,
            g=inputs.g,
            beta=inputs.beta,
            initial_state=inputs.initial_state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=inputs.use_qk_l2norm,
            **others,
        )
    return GDNOutput(out, final_states)


def _caller_of(function: Callable[..., Any]) -> Callable[[GDNInputs, Precision], GDNOutput]:
    """A function of inputs and precision that calls fla's `function`, or one with the same
    arguments.
    """

    def call(inputs: GDNInputs, _precision: Precision) -> GDNOutput:
        return _call(
            function,
            inputs,
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            scale=inputs.scale_or_default,
            cu_seqlens=inputs.cu_seqlens,
        )

    return call


def _checkpoints(inputs: GDNInputs) -> dict[str, Any]:
    """FlashInfer's arguments for the states after every `state_every` tokens, a number that divides
    the length of the sequences; empty if the call asks for none.
    """
    every, device = inputs.state_every, inputs.device
    if not every:
        return {}
    per_sequence = inputs.length // every
    sequences, heads, key_dim, value_dim = inputs.states_shape
    shape = sequences * per_sequence, heads, value_dim, key_dim
    return {
        "state_checkpoints": torch.empty(shape, device=device),
        "checkpoint_cu_starts": torch.arange(sequences + 1, device=device) * per_sequence,
        "checkpoint_every_n_tokens": every,
    }


def load_flashinfer() -> Implementation:
    """The library's chunked kernels for GDN.  A separate launch normalises q and k if the call asks
    for it.
    """
    # without this module the library does not normalise, and does not say so
    import_module("flashinfer.gdn_kernels.qk_l2norm")
    function = import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule

    def prepare(inputs: GDNInputs) -> Prepared:
        rows = flattened(inputs, "q", "k", "v")
        g, beta = flattened(inputs, "g", "beta", dtype=torch.float32)
        return _on_packs(
            function,
            inputs,
            *rows,
            g.clamp(max=0).exp(),
            beta,
            cu_seqlens=bounds_of(inputs).long(),
            backend="flashinfer",
            **_checkpoints(inputs),
        )

    def plan(inputs: GDNInputs, _precision: Precision) -> Plan:
        reason = "the decays, beta in fp32 and V-first states are prepared outside of its time"
        return Plan(variant="cute", launches=1 + int(inputs.use_qk_l2norm), reason=reason)

    @first_reason
    def unsupported(inputs: GDNInputs, precision: Precision) -> Reasons:
        yield from _unlike_128(inputs, precision)
        every = inputs.state_every
        if every:
            divides = every % CHECKPOINT == 0 and inputs.length % every == 0
            reason = f"states after multiples of {CHECKPOINT} tokens that divide the sequences"
            yield inputs.cu_seqlens is not None or not divides, reason

    return replace(
        prepared_kernel("gdn", "flashinfer", unsupported, prepare, plan),
        keeps=lambda _: True,
        pools=True,
    )


def _bind_flashinfer(module: Any, inputs: GDNInputs, slots: Slots) -> Bound:
    """A call of `load_flashinfer_mtp` with everything but the pool.

    module: `flashinfer.gdn_decode`

    Raises UnsupportedError if the call keeps states after several tokens, but not after each of
    them.  While a CUDA graph is captured, this is not checked.
    """
    q, k, v = (tensor.contiguous() for tensor in (inputs.q, inputs.k, inputs.v))
    a, b, A_log, dt_bias = raw_gates(inputs)
    raw = A_log, a.view(v.shape[:3]), dt_bias, b.view(v.shape[:3])
    read = slots.read.int().contiguous()
    # the slots of the final states; None if the call keeps states after several tokens
    final = slots.written[:, 0] if inputs.length == 1 else slots.final
    options = {"scale": inputs.scale_or_default, "use_qk_l2norm": inputs.use_qk_l2norm}
    if final is None and slots.buffer is None:
        slots.refuse_holes("flashinfer_mtp")

    def every_state(pool: torch.Tensor) -> dict[str, Any]:
        """The arguments of `gated_delta_rule_mtp` that say where the state after each token goes:
        to slots of the pool, or, if the pool was made for this call, to a part of it.
        """
        if slots.buffer is None:
            written = slots.written.int().contiguous()
            return {"ssm_state_indices": written, "disable_state_update": False}
        buffer = slots.verification(inputs, pool)["intermediate_states_buffer"]
        return {"intermediate_states_buffer": buffer, "disable_state_update": True}

    def run(pool: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(v)
        if final is None:
            destinations = every_state(pool)
            module.gated_delta_rule_mtp(
                q, k, v, pool, read, *raw, output=out, **options, **destinations
            )
        else:
            state = {
                "initial_state": pool,
                "initial_state_indices": read,
                "output_state_indices": final.int().contiguous(),
            }
            module.gated_delta_rule_decode_pretranspose(
                q, k, v, None, *raw, output=out, **state, **options
            )
        return out

    return run, v


def load_flashinfer_mtp() -> Implementation:
    """The library's functions for GDN on a pool of states: `gated_delta_rule_decode_pretranspose`
    for calls of one token and those that keep only the final state of each sequence, and
    `gated_delta_rule_mtp` (multi-token prediction) for those that keep the state after each token.
    """
    module = import_module("flashinfer.gdn_decode")

    @first_reason
    def unsupported(inputs: GDNInputs, precision: Precision) -> Reasons:
        yield from _unlike_128(inputs, precision)
        yield inputs.q.dtype != torch.bfloat16 and inputs.length == 1, "one token in bf16 only"
        yield inputs.cu_seqlens is not None, "no packed sequences"
        is_long = inputs.length > LONGEST_BY_TOKEN
        yield is_long, f"at most {LONGEST_BY_TOKEN} tokens of each sequence"

    reason = "raw gates in fp32 and a pool of V-first states are prepared outside of its time"
    return pool_kernel(
        "gdn",
        "flashinfer_mtp",
        unsupported,
        partial(_bind_flashinfer, module),
        Plan(variant="cute", launches=1, reason=reason),
        refused_values=refused_gates,
        turned=True,
        apart=True,
    )
