"""The Triton kernels that vLLM and SGLang run for GDN and KDA layers.

The import of a server's package patches torch and transformers.  So only its modules with kernels
are imported.

vllm, sglang             prompts, in chunks.  A server normalises q and k, and computes gates and
                         beta, in separate kernels.  Here the call normalises q and k if the inputs
                         ask for it, and receives gates and beta after their activations; vLLM's KDA
                         receives them before.  A tensor that SGLang's kernels overwrite (KDA's v,
                         the pool) is copied first, and the copy counts in the kernel's time
vllm_step, sglang_step   a few tokens of each sequence, token by token, on a pool in place, as in
                         decoding and verification.  Gates and beta enter before their activations
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ssdprof.kernels.adapters import Prepared, bounds_of, import_kernels, prepared_kernel, too_long
from ssdprof.kernels.gdn.adapters import (
    flattened,
    plain_beta,
    plain_gates,
    raw_gates,
    refused_gates,
    v_first_states,
)
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.pools import Bound, Slots, pool_kernel, with_slot_before
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, Reasons, first_reason

# operator -> the module with all of vLLM's kernels for it
_VLLM = {
    "gdn": "vllm.third_party.flash_linear_attention.ops",
    "kda": "vllm.models.kimi_k3.nvidia.ops.third_party.kda",
}
_SGLANG = "sglang.kernels.ops.attention"  # the package of the modules below
# operator -> the module of SGLang's chunked kernels, and their function
_SGLANG_CHUNKS = {"gdn": ("fla.chunk", "chunk_gated_delta_rule"), "kda": ("fla.kda", "chunk_kda")}
# operator -> SGLang's function for one token of each sequence
_ONE_TOKEN = {
    "gdn": "fused_recurrent_gated_delta_rule_packed_decode",
    "kda": "fused_recurrent_kda_packed_decode",
}
# SGLang's module for several tokens of each sequence
_SIGMOID_GATING = "linear.fused_sigmoid_gating_recurrent"
# torch's defaults of softplus: its beta, and the threshold above which it is the identity
_SOFTPLUS = (1.0, 20.0)


def _options(inputs: GDNInputs) -> dict[str, Any]:
    """Arguments that have the same name in the functions of both servers."""
    return {
        "scale": inputs.scale_or_default,
        "cu_seqlens": bounds_of(inputs).int(),
        "use_qk_l2norm_in_kernel": inputs.use_qk_l2norm,
    }


def _tokens(inputs: GDNInputs, *names: str) -> dict[str, torch.Tensor]:
    """The named tensors with all sequences as one pack, (1, tokens, ...), by name."""
    return {name: flattened(inputs, name)[0][None] for name in names}


# --- prompts


def load_vllm(operator: str) -> Implementation:
    """vLLM's chunked kernels.  KDA's takes gates and beta before their activations."""
    module = import_kernels(_VLLM[operator])

    def bind_gdn(inputs: GDNInputs) -> Callable[..., Any]:
        """The function with all arguments but v, the states and options."""
        return partial(module.chunk_gated_delta_rule, **_tokens(inputs, "q", "k", "g", "beta"))

    def bind_kda(inputs: GDNInputs) -> Callable[..., Any]:
        """As `bind_gdn`, for KDA."""
        a, b, A_log, _ = raw_gates(inputs)
        gates = {"raw_g": a[None], "raw_beta": b[None], "A_log": A_log, "g_bias": None}
        function = partial(module.chunk_kda_with_fused_gate, **_tokens(inputs, "q", "k"), **gates)

        def run(v: torch.Tensor, **others: Any) -> Any:
            # without `out` the kernel overwrites v
            return function(v=v, out=torch.empty_like(v), **others)

        return run

    def prepare(inputs: GDNInputs) -> Prepared:
        run = bind_kda(inputs) if operator == "kda" else bind_gdn(inputs)
        v = _tokens(inputs, "v")["v"]
        states = v_first_states(inputs)
        options = _options(inputs)
        shape = inputs.v.shape

        def call() -> GDNOutput:
            out, final_states = run(v=v, initial_state=states, output_final_state=True, **options)
            return GDNOutput(out.view(shape), final_states.mT)

        return call, (v, states)

    return _chunked_kernel(operator, "vllm", prepare, raw_beta=operator == "kda")


def load_sglang(operator: str) -> Implementation:
    """SGLang's chunked kernels, which update a pool of states in place.  Here the pool is a copy of
    the initial states, with one slot for each sequence.
    """
    module, function_name = _SGLANG_CHUNKS[operator]
    function = getattr(import_kernels(f"{_SGLANG}.{module}"), function_name)

    def prepare(inputs: GDNInputs) -> Prepared:
        v = _tokens(inputs, "v")["v"]
        states = v_first_states(inputs)
        shape = inputs.v.shape
        slots = torch.arange(len(states), dtype=torch.int32, device=v.device)
        arguments = _tokens(inputs, "q", "k", "g", "beta") | _options(inputs)
        run = partial(function, **arguments, initial_state_indices=slots)

        def call() -> GDNOutput:
            pool = states.clone()
            values = v.clone() if operator == "kda" else v  # KDA's kernel overwrites it
            returned = run(v=values, initial_state=pool)
            # GDN's function returns states as well
            out = returned[0] if isinstance(returned, tuple) else returned
            return GDNOutput(out.view(shape), pool.mT)

        return call, (v, states)

    return _chunked_kernel(operator, "sglang", prepare)


def _chunked_kernel(
    operator: str, name: str, prepare: Callable[[GDNInputs], Prepared], *, raw_beta: bool = False
) -> Implementation:
    """A server's kernel for prompts.

    raw_beta: whether beta enters before its activation, so that it must be between 0 and 1.
    """

    @first_reason
    def unsupported(inputs: GDNInputs, precision: Precision) -> Reasons:
        yield not precision.exact, "exact intermediates only"
        yield inputs.q.dtype == torch.float32, "fp16 and bf16 inputs only"
        reason = f"states that enter chunks are {inputs.q.dtype}, as q is"
        yield precision.state_dtype != inputs.q.dtype, reason
        yield operator == "kda" and inputs.values_per_key > 1, "as many key heads as value heads"
        yield from plain_gates(inputs)
        if raw_beta:
            yield from plain_beta(inputs)

    copies = "copies of what its kernels overwrite are inside of its time, other layouts outside"
    plan = Plan(variant="triton", launches=6, config={"chunk_size": 64}, reason=copies)
    return prepared_kernel(operator, name, unsupported, prepare, plan)


# --- steps


@dataclass(frozen=True)
class _Step:
    """The tensors of a call in the form in which a server passes them to a kernel for steps.

    slots: numbered as the kernel numbers them, which is from 1 on for vLLM's
    mixed: (tokens, 2 H K + HV V), q, k and v of each token one after the other, as they leave the
        convolution
    gates: see `raw_gates`
    """

    inputs: GDNInputs
    slots: Slots
    mixed: torch.Tensor
    gates: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, inputs: GDNInputs, slots: Slots) -> _Step:
        rows = [tensor.flatten(2).flatten(0, 1) for tensor in (inputs.q, inputs.k, inputs.v)]
        return cls(inputs, slots, torch.cat(rows, 1), raw_gates(inputs))

    @property
    def is_decode(self) -> bool:
        """Whether each row of the batch is a sequence of one token, whose state goes back to the
        slot that was read.  Packed sequences are not counted, even of one token each.
        """
        single = self.inputs.cu_seqlens is None and self.inputs.length == 1
        return single and self.slots.overwrites

    @property
    def views(self) -> list[torch.Tensor]:
        """q, k and v of all tokens, (1, tokens, heads, K or V), as views of `mixed`."""
        shapes = [tensor.shape[2:] for tensor in (self.inputs.q, self.inputs.k, self.inputs.v)]
        columns = torch.split(self.mixed[None], [shape.numel() for shape in shapes], -1)
        return [
            tensor.view(*tensor.shape[:2], *shape)
            for tensor, shape in zip(columns, shapes, strict=True)
        ]

    def bound(self, call: Callable[[_Step, torch.Tensor], Any]) -> Bound:
        """The step bound to a kernel.

        call: (step, pool) -> out, with its elements in the order of (B, T, HV, V).  It updates the
            pool.
        """

        def run(pool: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = call(self, pool)
            return out.view(self.inputs.v.shape)

        return run, self.views[2]

    def decode(self, function: Callable[..., Any], pool: torch.Tensor) -> torch.Tensor:
        """Call a kernel for one token of each sequence.  It updates the pool; returns out."""
        inputs = self.inputs
        a, b, A_log, dt_bias = self.gates
        out = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=pool.device)
        function(
            self.mixed,
            a.flatten(1),
            b,
            A_log,
            dt_bias,
            inputs.scale_or_default,
            pool,
            out,
            self.slots.read.int(),
            use_qk_l2norm_in_kernel=inputs.use_qk_l2norm,
        )
        return out


def _vllm_gdn(module: Any, step: _Step, pool: torch.Tensor) -> Any:
    """Call vLLM's GDN kernel for one token of each sequence, or the one for several tokens, which
    writes to a table of slots.  Returns out.
    """
    if step.is_decode:
        return step.decode(module.fused_recurrent_gated_delta_rule_packed_decode, pool)
    a, b, A_log, dt_bias = step.gates
    return module.fused_sigmoid_gating_delta_rule_update(
        A_log,
        a,
        b,
        dt_bias,
        *step.views,
        initial_state=pool,
        **_table(step.slots),
        **_options(step.inputs),
    )[0]


def _vllm_kda(module: Any, step: _Step, pool: torch.Tensor) -> Any:
    """As `_vllm_gdn`, for KDA."""
    inputs = step.inputs
    a, b, A_log, dt_bias = step.gates
    gates = a[None], b[None], A_log, dt_bias, None  # None: no lower bound of g
    if step.is_decode:
        slots = step.slots.read.int()
        return module.fused_recurrent_kda_packed_decode(
            step.mixed, *gates, pool, slots, inputs.scale_or_default
        )[0]
    bounds = bounds_of(inputs).int()
    table = _table(step.slots)
    return module.fused_recurrent_kda(*step.views, *gates, pool, bounds, **table)[0]


def _table(slots: Slots) -> dict[str, torch.Tensor]:
    """vLLM's arguments for several tokens: a table (sequences, tokens + 1) of slots.

    The kernel writes the state after token t to the slot in column t, and begins with the slot in
    column `num_accepted_tokens` - 1.  Here that is always the last column, which has the slots to
    read.
    """
    table = torch.cat([slots.written, slots.read[:, None]], 1).int()
    accepted = torch.full_like(table[:, 0], table.shape[1])
    return {"ssm_state_indices": table, "num_accepted_tokens": accepted}


def _sglang(one_token: Any, several_tokens: Any, step: _Step, pool: torch.Tensor) -> Any:
    """Call SGLang's kernel for one token of each sequence, or the one for several tokens.  That one
    writes the final states to the slots that were read, or, if the pool has a buffer
    (`Slots.buffer`), the state after each token to the buffer instead.  Returns out.

    one_token, several_tokens: the modules of the two kernels.
    """
    operator = step.inputs.operator
    a, b, A_log, dt_bias = step.gates
    if step.is_decode:
        return step.decode(getattr(one_token, _ONE_TOKEN[operator]), pool)
    return several_tokens.fused_sigmoid_gating_delta_rule_update(
        A_log,
        a.flatten(1),
        dt_bias,
        *_SOFTPLUS,
        *step.views,
        b,
        pool,
        step.slots.read.int(),
        is_kda=operator == "kda",
        **_options(step.inputs),
        **step.slots.verification(step.inputs, pool),
    )


def load_vllm_step(operator: str) -> Implementation:
    """vLLM's kernels for steps on a pool.  They take slot 0 as padding.  So they get the pool with
    one more slot before its first, and numbers of slots that are larger by one.
    """
    module = import_kernels(_VLLM[operator])
    is_kda = operator == "kda"
    call_kernel = partial(_vllm_kda if is_kda else _vllm_gdn, module)

    def call(step: _Step, pool: torch.Tensor) -> Any:
        return call_kernel(step, with_slot_before(pool, "vllm_step"))

    def bind(inputs: GDNInputs, slots: Slots) -> Bound:
        shifted = replace(slots, read=slots.read + 1, written=slots.written + 1)
        return _Step.of(inputs, shifted).bound(call)

    return _step_kernel(operator, "vllm_step", bind, fixed_options=is_kda)


def load_sglang_step(operator: str) -> Implementation:
    """SGLang's kernels for steps on a pool: one for one token of each sequence, one for several.
    They do not write the states of a call in place to other slots than it reads.
    """
    one_token = import_kernels(f"{_SGLANG}.fla.fused_recurrent")
    several_tokens = import_kernels(f"{_SGLANG}.{_SIGMOID_GATING}")
    call = partial(_sglang, one_token, several_tokens)

    def bind(inputs: GDNInputs, slots: Slots) -> Bound:
        slots.refuse_tables("sglang_step")
        return _Step.of(inputs, slots).bound(call)

    return _step_kernel(operator, "sglang_step", bind)


def _step_kernel(
    operator: str,
    name: str,
    bind: Callable[[GDNInputs, Slots], Bound],
    *,
    fixed_options: bool = False,
) -> Implementation:
    """A server's kernel for steps on a pool.

    fixed_options: whether it always normalises q and k, with the scale K ** -0.5.
    """

    @first_reason
    def unsupported(inputs: GDNInputs, precision: Precision) -> Reasons:
        yield precision != Precision(), "exact intermediates and fp32 states only"
        yield too_long(inputs)
        yield operator == "kda" and inputs.values_per_key > 1, "as many key heads as value heads"
        if fixed_options:
            fits = inputs.use_qk_l2norm and inputs.scale_or_default == inputs.q.shape[3] ** -0.5
            yield not fits, "q and k that it normalises, and the scale K ** -0.5"

    reason = "a copy of the states is inside of its time, gates before their activations outside"
    plan = Plan(variant="triton", launches=2, reason=reason)
    return pool_kernel(
        operator, name, unsupported, bind, plan, refused_values=refused_gates, turned=True
    )


_LOADERS: dict[str, Callable[[str], Implementation]] = {
    "vllm": load_vllm,
    "sglang": load_sglang,
    "vllm_step": load_vllm_step,
    "sglang_step": load_sglang_step,
}


def load(name: str, operator: str) -> Implementation:
    """A server's kernel by its name in `_LOADERS`.  Raises ImportError if the server is not
    installed.
    """
    return _LOADERS[name](operator)
