"""The Triton kernels that vLLM and SGLang run for GDN and KDA layers.

The servers' packages patch torch and transformers when they are imported, so that they are not:
only the modules with kernels are.

vllm, sglang             prompts, in chunks.  A server normalises q and k, and computes gates and
                         beta, in kernels of its own.  Here gates and beta arrive computed, but for
                         vLLM's KDA, and q and k are normalised inside of the call.  What a kernel
                         writes over (v, the pool) is copied in its time
vllm_step, sglang_step   a few tokens of each sequence, token by token, on a pool in place, as in
                         decoding and verification.  Gates and beta enter before their activations
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ssdprof.kernels.adapters import MOST_STEPS, Prepared, import_bare, prepared_kernel
from ssdprof.kernels.gdn.adapters import plain_beta, plain_gates
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.pools import Bound, Slots, pool_kernel, with_slot_before
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, Reasons, first_reason

# packages of which their modules with kernels need nothing
_BARE = (
    "vllm",
    "vllm.models",
    "vllm.models.kimi_k3",
    "vllm.models.kimi_k3.nvidia",
    "vllm.models.kimi_k3.nvidia.ops",
    "sglang",
    "sglang.kernels",
    "sglang.kernels.ops",
)
_VLLM = {
    "gdn": "vllm.third_party.flash_linear_attention.ops",
    "kda": "vllm.models.kimi_k3.nvidia.ops.third_party.kda",
}
_SGLANG = "sglang.kernels.ops.attention"
# operator -> the module of the chunked kernels, and their function
_SGLANG_CHUNKS = {"gdn": ("fla.chunk", "chunk_gated_delta_rule"), "kda": ("fla.kda", "chunk_kda")}
_ONE_TOKEN = {
    "gdn": "fused_recurrent_gated_delta_rule_packed_decode",
    "kda": "fused_recurrent_kda_packed_decode",
}
_SOFTPLUS = (1.0, 20.0)  # its factor, and the argument above which it is the identity


def _module(name: str) -> Any:
    return import_bare(name, [package for package in _BARE if name.startswith(f"{package}.")])


# --- arguments


def _packed(inputs: GDNInputs, *names: str) -> dict[str, torch.Tensor]:
    """These tensors of all sequences as one pack, (1, tokens, ...)."""
    return {name: getattr(inputs, name).flatten(0, 1)[None].contiguous() for name in names}


def _options(inputs: GDNInputs) -> dict[str, Any]:
    bounds = inputs.cu_seqlens
    if bounds is None:
        bounds = torch.arange(inputs.sequences + 1, device=inputs.q.device) * inputs.length
    return {
        "scale": inputs.scale_or_default,
        "cu_seqlens": bounds.int(),
        "use_qk_l2norm_in_kernel": inputs.use_qk_l2norm,
    }


def _states(inputs: GDNInputs) -> torch.Tensor:
    """The initial states in fp32, V before K."""
    states = inputs.initial
    if states is None:
        states = torch.zeros(inputs.states_shape, device=inputs.q.device)
    return states.float().mT.contiguous()


@dataclass(frozen=True)
class _Gates:
    """Gates before their activations, of which g = -exp(A_log) softplus(a + dt_bias) and
    beta = sigmoid(b).

    a: (tokens, HV), of KDA (tokens, HV, K); b: (tokens, HV); fp32.  A_log and dt_bias are zeros, of
    a head and of an a.
    """

    a: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor

    @classmethod
    def of(cls, inputs: GDNInputs) -> _Gates:
        g, beta = inputs.g.flatten(0, 1).double(), inputs.beta.flatten(0, 1).double()
        a, b = g.neg().expm1().log().float(), beta.logit().float()
        return cls(a, b, torch.zeros_like(b[0]), torch.zeros_like(a[0]).flatten())


# --- prompts


def load_vllm(operator: str) -> Implementation:
    module = _module(_VLLM[operator])

    def run_gdn(inputs: GDNInputs) -> Callable[..., Any]:
        given = _packed(inputs, "q", "k", "g", "beta")
        return partial(module.chunk_gated_delta_rule, **given)

    def run_kda(inputs: GDNInputs) -> Callable[..., Any]:
        gates, given = _Gates.of(inputs), _packed(inputs, "q", "k")
        raw = {"raw_g": gates.a[None], "raw_beta": gates.b[None]}
        run = partial(module.chunk_kda_with_fused_gate, **given, **raw, A_log=gates.A_log)
        # without `out` it writes over v
        return lambda v, **more: run(v=v, g_bias=None, out=torch.empty_like(v), **more)

    def prepare(inputs: GDNInputs) -> Prepared:
        run = (run_kda if operator == "kda" else run_gdn)(inputs)
        v, states, options = _packed(inputs, "v")["v"], _states(inputs), _options(inputs)
        shape = inputs.v.shape

        def call() -> GDNOutput:
            out, final_states = run(v=v, initial_state=states, output_final_state=True, **options)
            return GDNOutput(out.view(shape), final_states.mT)

        return call, (v, states)

    return _chunked_kernel(operator, "vllm", prepare, raw=operator == "kda")


def load_sglang(operator: str) -> Implementation:
    module, name = _SGLANG_CHUNKS[operator]
    function = getattr(_module(f"{_SGLANG}.{module}"), name)

    def prepare(inputs: GDNInputs) -> Prepared:
        v, states, shape = _packed(inputs, "v")["v"], _states(inputs), inputs.v.shape
        slots = torch.arange(len(states), dtype=torch.int32, device=v.device)
        given = _packed(inputs, "q", "k", "g", "beta") | _options(inputs)
        run = partial(function, **given, initial_state_indices=slots)

        def call() -> GDNOutput:
            pool, values = states.clone(), v.clone() if operator == "kda" else v
            returned = run(v=values, initial_state=pool)
            out = returned[0] if isinstance(returned, tuple) else returned
            return GDNOutput(out.view(shape), pool.mT)

        return call, (v, states)

    return _chunked_kernel(operator, "sglang", prepare)


def _chunked_kernel(
    operator: str, name: str, prepare: Callable[[GDNInputs], Prepared], *, raw: bool = False
) -> Implementation:
    """raw: beta enters before its activation."""

    @first_reason
    def unsupported(inputs: GDNInputs, precision: Precision) -> Reasons:
        yield not precision.exact, "exact intermediates only"
        yield inputs.q.dtype == torch.float32, "fp16 and bf16 inputs only"
        states = f"states that enter chunks are {inputs.q.dtype}, as q is"
        yield precision.state_dtype != inputs.q.dtype, states
        yield operator == "kda" and inputs.values_per_key > 1, "as many key heads as value heads"
        yield from plain_gates(inputs)
        if raw:
            yield from plain_beta(inputs)

    copies = "copies of what its kernels overwrite are inside of its time, other layouts outside"
    plan = Plan(variant="triton", launches=6, config={"chunk_size": 64}, reason=copies)
    return prepared_kernel(operator, name, unsupported, prepare, plan)


# --- steps


@dataclass(frozen=True)
class _Step:
    """What a server has for a kernel of steps.

    mixed: (tokens, 2 H K + HV V), q, k and v of each token behind each other, as they leave the
    convolution.  alone: one token of each sequence, whose state is written back.
    """

    inputs: GDNInputs
    slots: Slots
    mixed: torch.Tensor
    gates: _Gates

    @classmethod
    def of(cls, inputs: GDNInputs, slots: Slots) -> _Step:
        rows = [tensor.flatten(2).flatten(0, 1) for tensor in (inputs.q, inputs.k, inputs.v)]
        return cls(inputs, slots, torch.cat(rows, 1), _Gates.of(inputs))

    @property
    def alone(self) -> bool:
        one = self.inputs.cu_seqlens is None and self.inputs.length == 1
        return one and self.slots.overwrites

    @property
    def views(self) -> dict[str, torch.Tensor]:
        """q, k and v of all tokens, (1, tokens, heads, ...)."""
        of = {"q": self.inputs.q, "k": self.inputs.k, "v": self.inputs.v}
        widths = [tensor.shape[2:].numel() for tensor in of.values()]
        parts = torch.split(self.mixed[None], widths, -1)
        return {
            name: part.view(*part.shape[:2], *tensor.shape[2:])
            for (name, tensor), part in zip(of.items(), parts, strict=True)
        }

    def packed(self, function: Callable[..., Any], pool: torch.Tensor) -> torch.Tensor:
        """out of a kernel for one token of each sequence."""
        inputs, gates = self.inputs, self.gates
        out = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=pool.device)
        given = self.mixed, gates.a.flatten(1), gates.b, gates.A_log, gates.dt_bias
        function(
            *given,
            inputs.scale_or_default,
            pool,
            out,
            self.slots.read.int(),
            use_qk_l2norm_in_kernel=inputs.use_qk_l2norm,
        )
        return out

    def bound(self, run: Callable[[torch.Tensor], torch.Tensor]) -> Bound:
        """run: (pool) -> out in any shape."""
        shape = self.inputs.v.shape
        return lambda pool: run(pool).view(shape), self.views["v"]


def load_vllm_step(operator: str) -> Implementation:
    """Slot 0 is padding.  Several tokens are a verification, with a table of slots: the state after
    token t goes to column t, and the column of the last accepted token is read.
    """
    module = _module(_VLLM[operator])
    one_token, kda = getattr(module, _ONE_TOKEN[operator]), operator == "kda"
    several = module.fused_recurrent_kda if kda else module.fused_sigmoid_gating_delta_rule_update

    def run_one(step: _Step, pool: torch.Tensor) -> torch.Tensor:
        if not kda:
            return step.packed(one_token, pool)
        gates = step.gates
        raw = gates.a[None], gates.b[None], gates.A_log, gates.dt_bias, None
        slots, scale = step.slots.read.int(), step.inputs.scale_or_default
        out: torch.Tensor = one_token(step.mixed, *raw, pool, slots, scale)[0]
        return out

    def run_several(step: _Step, pool: torch.Tensor) -> torch.Tensor:
        slots, gates, options = step.slots, step.gates, _options(step.inputs)
        table = torch.cat([slots.written, slots.read[:, None]], 1).int()
        given = step.views | {"A_log": gates.A_log, "dt_bias": gates.dt_bias}
        given |= {"initial_state": pool, "ssm_state_indices": table}
        given["num_accepted_tokens"] = torch.full_like(table[:, 0], table.shape[1])
        if kda:
            raw = {"raw_g": gates.a[None], "raw_beta": gates.b[None], "lower_bound": None}
            options = {"cu_seqlens": options["cu_seqlens"]}
        else:
            raw = {"a": gates.a, "b": gates.b}
        out: torch.Tensor = several(**given, **raw, **options)[0]
        return out

    def bind(inputs: GDNInputs, slots: Slots) -> Bound:
        shifted = replace(slots, read=slots.read + 1, written=slots.written + 1)
        step = _Step.of(inputs, shifted)
        run = partial(run_one if step.alone else run_several, step)
        return step.bound(lambda pool: run(with_slot_before(pool, "vllm_step")))

    return _step_kernel(operator, "vllm_step", bind, fixed=kda)


def load_sglang_step(operator: str) -> Implementation:
    """A verification leaves the pool alone, and writes all states to a buffer."""
    one_token = getattr(_module(f"{_SGLANG}.fla.fused_recurrent"), _ONE_TOKEN[operator])
    module = _module(f"{_SGLANG}.linear.fused_sigmoid_gating_recurrent")
    several = module.fused_sigmoid_gating_delta_rule_update

    def run_several(step: _Step, pool: torch.Tensor) -> torch.Tensor:
        inputs, slots, gates = step.inputs, step.slots, step.gates
        views, rows = step.views, torch.arange(inputs.sequences, device=pool.device).int()
        buffer: dict[str, Any] = {}
        if slots.buffer is not None:
            states = pool[slots.buffer].view(inputs.sequences, inputs.length, *pool.shape[1:])
            buffer = {
                "disable_state_update": True,
                "intermediate_states_buffer": states,
                "intermediate_state_indices": rows,
                "cache_steps": inputs.length,
            }
        out: torch.Tensor = several(
            gates.A_log,
            gates.a.flatten(1),
            gates.dt_bias,
            *_SOFTPLUS,
            *views.values(),
            gates.b,
            pool,
            slots.read.int(),
            is_kda=operator == "kda",
            **_options(inputs),
            **buffer,
        )
        return out

    def bind(inputs: GDNInputs, slots: Slots) -> Bound:
        slots.refuse_tables("sglang_step")
        step = _Step.of(inputs, slots)
        return step.bound(
            partial(step.packed, one_token) if step.alone else partial(run_several, step)
        )

    return _step_kernel(operator, "sglang_step", bind)


def _step_kernel(
    operator: str, name: str, bind: Callable[[GDNInputs, Slots], Bound], *, fixed: bool = False
) -> Implementation:
    """fixed: it normalises q and k, and has no scale but K^-0.5."""

    @first_reason
    def unsupported(inputs: GDNInputs, precision: Precision) -> Reasons:
        yield precision != Precision(), "exact intermediates and fp32 states only"
        tokens = inputs.length if inputs.cu_seqlens is None else inputs.length / inputs.sequences
        yield tokens > MOST_STEPS, f"token by token, for sequences of at most {MOST_STEPS}"
        yield operator == "kda" and inputs.values_per_key > 1, "as many key heads as value heads"
        usual = inputs.use_qk_l2norm and inputs.scale_or_default == inputs.q.shape[3] ** -0.5
        yield fixed and not usual, "q and k that it normalises, and the scale K ** -0.5"

    @first_reason
    def refused_values(inputs: GDNInputs) -> Reasons:
        yield from plain_gates(inputs)
        yield from plain_beta(inputs)

    reason = "a copy of the states is inside of its time, gates before their activations outside"
    plan = Plan(variant="triton", launches=2, reason=reason)
    return pool_kernel(
        operator, name, unsupported, bind, plan, refused_values=refused_values, turned=True
    )


# name of an implementation -> (operator) -> it
LOADERS: dict[str, Callable[[str], Implementation]] = {
    "vllm": load_vllm,
    "sglang": load_sglang,
    "vllm_step": load_vllm_step,
    "sglang_step": load_sglang_step,
}
