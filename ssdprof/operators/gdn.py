"""The record of the operator "gdn".  torch is imported only when it is first used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ssdprof import kernels
from ssdprof.kernels.registry import Implementation
from ssdprof.operators import fla, generate
from ssdprof.operators.definition import states_in
from ssdprof.operators.gdn_inputs import GENERATOR
from ssdprof.operators.gdn_oracle import ORACLE, SIZE_WORDS
from ssdprof.operators.generate import Library, installed_library
from ssdprof.operators.late import deferred, lazy, packages, torch
from ssdprof.operators.operator import (
    BoundCall,
    CallBinding,
    Operator,
    OutputPair,
    Stages,
    computed,
    from_call,
)
from ssdprof.operators.tensors import exact_fp32, states_as_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from ssdprof.kernels.gdn import adapters
    from ssdprof.operators import gdn_definitions, gdn_tuning
else:
    adapters = lazy("ssdprof.kernels.gdn.adapters")
    gdn_definitions = lazy("ssdprof.operators.gdn_definitions")
    gdn_tuning = lazy("ssdprof.operators.gdn_tuning")

STAGES = Stages.of("gdn")


# --- how a model calls it


def bind(
    _mixer: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    kind: str = "GDNInputs",
    **arguments: Any,
) -> BoundCall:
    """The call of a mixer, for a prompt or a step, as inputs of the type `kind` in
    `ssdprof.kernels`: see `CallBinding.bind`.
    """
    arguments |= {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "use_qk_l2norm": use_qk_l2norm_in_kernel,
    }
    return from_call(getattr(kernels, kind), **arguments), output_final_state, ""


def recorded(
    arguments: dict[str, Any], returned: Sequence[Tensor]
) -> tuple[kernels.GDNInputs, OutputPair | None]:
    """The inputs of a recorded call of FlashInfer's prefill, and its output; None in place of the
    output if the call returned no final states.

    In FlashInfer's call tokens are packed: (tokens, heads, ...).  g is the decay and not its log;
    without g nothing is forgotten, and without beta it is 1.  States are (sequences, HV, V, K), or
    with state_indices a pool, (slots, HV, V, K).

    Raises ValueError if g is no decay, for a slot outside of the pool, and for tensors that do not
    fit each other.
    """
    slots = arguments.get("state_indices")
    decay = arguments.get("g")
    beta = arguments.get("beta")
    initial_state = arguments.get("initial_state")
    if decay is None:
        decay = arguments["v"].new_ones(arguments["v"].shape[:2], dtype=torch.float32)
    if not bool(((decay >= 0) & (decay <= 1.0001)).all()):  # exp may be rounded to above 1
        raise ValueError("g is not a decay between 0 and 1")

    def states_of_sequences(states: Tensor) -> Tensor:
        """(sequences or slots, HV, V, K) -> (sequences, HV, K, V)."""
        return (states if slots is None else states_in(states, slots)).mT

    inputs = kernels.GDNInputs(
        **{name: arguments[name][None] for name in ("q", "k", "v")},
        g=decay.log()[None],
        beta=(torch.ones_like(decay) if beta is None else beta)[None],
        initial_state=None if initial_state is None else states_of_sequences(initial_state),
        scale=arguments.get("scale"),
        use_qk_l2norm=bool(arguments.get("use_qk_l2norm_in_kernel")),
        cu_seqlens=arguments["cu_seqlens"],
    )
    if len(returned) != 2:
        return inputs, None
    out, final_states = returned
    return inputs, (out[None], states_of_sequences(final_states))


def gate_bytes(item: int, _sizes: Mapping[str, int]) -> int:
    """`CallBinding.gate_bytes`: a beta in the model's dtype, and a g in fp32."""
    return item + 4


BINDING: CallBinding[kernels.GDNInputs] = CallBinding(
    function="torch_chunk_gated_delta_rule",
    step="torch_recurrent_gated_delta_rule",
    bind=bind,
    bind_step=bind,
    recorded={"chunk_gated_delta_rule": recorded},
    refused=(
        "cp_context",
        "head_first",
        "use_gate_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval",
        "transpose_state_layout",
        "state_v_first",
    ),
    always_a_pair=True,
    views=("q", "k", "v"),
    per_position=("g", "beta"),
    always_fp32=("g",),
    gate_bytes=gate_bytes,
    replacement=partial(computed, deferred("gdn.reference:gdn_chunked")),
)


# --- other libraries


def fla_libraries(operator: str) -> dict[str, Library]:
    """fla's two implementations of an operator: one in chunks for prompts, and one that goes token
    by token.
    """

    def load() -> Implementation:
        return adapters.load_fla(fla.imported(adapters.FLA[operator]), operator)

    def load_recurrent() -> Implementation:
        return adapters.load_fla_recurrent(fla.imported(adapters.FLA[operator]), operator)

    return {
        "fla": installed_library(fla.PACKAGE, load, states_as_inputs),
        "fla_recurrent": installed_library(fla.PACKAGE, load_recurrent, exact_fp32),
    }


def of_servers(operator: str) -> dict[str, Library]:
    """The kernels of vLLM and SGLang for the operator."""
    return generate.of_servers("gdn.servers:load", states_as_inputs, operator)


def of_transformers(operator: str) -> dict[str, Library]:
    """The functions that models of transformers call: "model" in torch, and "model:installed" in
    fla, which they call if it is installed.
    """

    def version_with_fla() -> str:
        transformers_version = packages.package_version("transformers")
        fla_version = packages.package_version(fla.PACKAGE)
        return f"transformers {transformers_version} with {fla.PACKAGE} {fla_version}"

    load = "gdn.adapters:load_model"
    load_with_fla = deferred(load, operator, "fla")
    return {
        "model": generate.model(load, operator),
        "model:installed": installed_library(
            fla.PACKAGE, load_with_fla, states_as_inputs, version=version_with_fla
        ),
    }


_FLASHINFER = "flashinfer-python"
LIBRARIES = {
    **fla_libraries("gdn"),
    "flash_qla": installed_library(
        "flash-qla", deferred("gdn.adapters:load_flash_qla"), exact_fp32
    ),
    "flashinfer": installed_library(
        _FLASHINFER, deferred("gdn.adapters:load_flashinfer"), exact_fp32
    ),
    "flashinfer_mtp": installed_library(
        _FLASHINFER, deferred("gdn.adapters:load_flashinfer_mtp"), exact_fp32
    ),
    **of_servers("gdn"),
    **of_transformers("gdn"),
}


# --- tensor-parallel ranks


def refusal(sizes: Mapping[str, int], ranks: int) -> str:
    """`Operator.refusal`: every rank takes the same number of key heads, with their value heads."""
    heads = sizes["key_heads"]
    return f"its {heads} key heads cannot be divided by {ranks}" if heads % ranks else ""


OPERATOR: Operator = Operator(
    name="gdn",
    title="GDN",
    layers="Gated-DeltaNet",
    served="prompts: flashinfer, where K = V = 128, else vllm, sglang; "
    "steps: vllm_step, sglang_step",
    load_inputs=lambda: kernels.GDNInputs,
    mixer_sizes={
        "key_heads": "num_k_heads",
        "value_heads": "num_v_heads",
        "key_dim": "head_k_dim",
        "value_dim": "head_v_dim",
    },
    words=SIZE_WORDS,
    stages=STAGES,
    binding=BINDING,
    oracle=ORACLE,
    generated=GENERATOR,
    load_tuning=lambda: gdn_tuning.TUNING,
    load_definitions=lambda: gdn_definitions.DEFINITIONS,
    refusal=refusal,
    libraries=LIBRARIES,
    divided={"q": 2, "k": 2, "v": 2, "g": 2, "beta": 2, "initial_state": 1},
)
