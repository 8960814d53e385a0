"""The table of places.  Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssdprof.record.place import FunctionCall, Place

# arguments with which a call is another operator than that of its inputs
_UNKNOWN = ("cp_context", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")


def _chunked(names: tuple[str, str, str], arguments: Mapping[str, Any]) -> FunctionCall | None:
    """A call with gates after their activations.  names: the library's, of q, k and v."""
    if any(arguments.get(name) for name in _UNKNOWN) or not arguments["output_final_state"]:
        return None
    v_first, states = arguments.get("state_v_first"), arguments["initial_state"]
    q, k, v = (arguments[name] for name in names)
    inputs = {
        "q": q,
        "k": k,
        "v": v,
        "g": arguments["g"],
        "beta": arguments["beta"],
        "scale": arguments.get("scale"),
        "initial_state": states.mT if v_first and states is not None else states,
        "use_qk_l2norm": arguments["use_qk_l2norm_in_kernel"],
        "cu_seqlens": arguments.get("cu_seqlens"),
    }

    def result(returned: Any) -> tuple[Any, Any]:
        out, final_states = returned
        return out, final_states.mT if v_first else final_states

    return FunctionCall(inputs=inputs, result=result)


def fla_chunked(arguments: Mapping[str, Any]) -> FunctionCall | None:
    return _chunked(("q", "k", "v"), arguments)


def transformers_chunked(arguments: Mapping[str, Any]) -> FunctionCall | None:
    return _chunked(("query", "key", "value"), arguments)


PLACES: tuple[Place, ...] = (
    Place(
        library="flash-linear-attention",
        module="fla.ops.gated_delta_rule.chunk",
        function="chunk_gated_delta_rule",
        operator="gdn",
        phase="prompt",
        parameters=(
            *("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state"),
            *("use_qk_l2norm_in_kernel", "cu_seqlens"),
        ),
        bind=fla_chunked,
    ),
    Place(
        library="transformers",
        module="transformers.models.qwen3_next.modeling_qwen3_next",
        function="torch_chunk_gated_delta_rule",
        operator="gdn",
        phase="prompt",
        parameters=(
            *("query", "key", "value", "g", "beta", "initial_state", "output_final_state"),
            "use_qk_l2norm_in_kernel",
        ),
        bind=transformers_chunked,
    ),
)
