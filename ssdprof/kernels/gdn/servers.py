"""The chunked Triton kernels that vLLM runs for prompts of GDN layers, and SGLang also for KDA.

A server normalises q and k, and computes gates and beta, in kernels of its own.  Here gates and
beta arrive computed, and q and k are normalised inside of the call.  The servers' packages patch
torch and transformers when they are imported, so that they are not: only the modules with kernels
are.

vllm     GDN; states are read from one tensor and written to another
sglang   states are updated in a pool, and KDA's output is written over v: each call begins with
         copies, in its time
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ssdprof.kernels.adapters import import_bare
from ssdprof.kernels.gdn.adapters import Prepared, plain_gates, prepared_kernel
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, Reasons, first_reason

_SGLANG = ("sglang", "sglang.kernels", "sglang.kernels.ops")
# operator -> the module, and its function
_SGLANG_KERNELS = {
    "gdn": ("sglang.kernels.ops.attention.fla.chunk", "chunk_gated_delta_rule"),
    "kda": ("sglang.kernels.ops.attention.fla.kda", "chunk_kda"),
}


def load_vllm() -> Implementation:
    """Its kernels for GDN.  Those for KDA need a later Triton than 3.6."""
    ops = import_bare("vllm.third_party.flash_linear_attention.ops", ["vllm"])

    def prepare(inputs: GDNInputs) -> Prepared:
        (v, states, given), shape = _packed(inputs), inputs.v.shape
        run = partial(ops.chunk_gated_delta_rule, **given, output_final_state=True)

        def call() -> GDNOutput:
            out, final_states = run(v=v, initial_state=states)
            return GDNOutput(out.view(shape), final_states.mT)

        return call, (v, states)

    return _server_kernel("gdn", "vllm", prepare)


def load_sglang(operator: str) -> Implementation:
    module, name = _SGLANG_KERNELS[operator]
    function = getattr(import_bare(module, _SGLANG), name)

    def prepare(inputs: GDNInputs) -> Prepared:
        (v, states, given), shape = _packed(inputs), inputs.v.shape
        slots = torch.arange(len(states), dtype=torch.int32, device=v.device)
        run = partial(function, **given, initial_state_indices=slots)

        def call() -> GDNOutput:
            pool, values = states.clone(), v.clone() if operator == "kda" else v
            found = run(v=values, initial_state=pool)
            out = found[0] if isinstance(found, tuple) else found
            return GDNOutput(out.view(shape), pool.mT)

        return call, (v, states)

    return _server_kernel(operator, "sglang", prepare)


def _packed(inputs: GDNInputs) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """v and V-first states in fp32, and the other arguments: all sequences as one pack."""
    bounds, states = inputs.cu_seqlens, inputs.initial
    if bounds is None:
        bounds = torch.arange(inputs.sequences + 1, device=inputs.q.device) * inputs.length
    if states is None:
        states = torch.zeros(inputs.states_shape, device=inputs.q.device)
    given = {
        name: getattr(inputs, name).flatten(0, 1)[None].contiguous()
        for name in ("q", "k", "v", "g", "beta")
    }
    values = given.pop("v")
    given |= {"scale": inputs.scale_or_default, "cu_seqlens": bounds.int()}
    given["use_qk_l2norm_in_kernel"] = inputs.use_qk_l2norm
    return values, states.float().mT.contiguous(), given


def _server_kernel(
    operator: str, name: str, prepare: Callable[[GDNInputs], Prepared]
) -> Implementation:
    @first_reason
    def unsupported(inputs: GDNInputs, precision: Precision) -> Reasons:
        yield not precision.exact, "exact intermediates only"
        yield inputs.q.dtype == torch.float32, "fp16 and bf16 inputs only"
        states = f"states that enter chunks are {inputs.q.dtype}, as q is"
        yield precision.state_dtype != inputs.q.dtype, states
        yield operator == "kda" and inputs.values_per_key > 1, "as many key heads as value heads"
        yield from plain_gates(inputs)

    copies = "copies of what its kernels overwrite are inside of its time, other layouts outside"
    plan = Plan(variant="triton", launches=6, config={"chunk_size": 64}, reason=copies)
    return prepared_kernel(operator, name, unsupported, prepare, plan)
