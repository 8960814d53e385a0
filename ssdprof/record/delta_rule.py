"""Functions that compute the gated delta rule: GDN and KDA.  Imports torch at first use.

Shapes: batch B, positions T, H heads of q and k, HV heads of v, dimensions K and V.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ssdprof.operators.late import torch
from ssdprof.record.place import Activate, Arguments, FunctionCall, unchanged
from ssdprof.record.states import CallStates

if TYPE_CHECKING:
    from torch import Tensor

    from ssdprof.kernels.inputs import Inputs

# the bound of a bounded gate if the call names none: the default of cuDNN's `gate_lower_bound`
_LOWER_BOUND = -5.0


def bind(per_channel: bool, step: bool, arguments: Arguments) -> FunctionCall | None:
    """A call in the operator's terms.  None if it is a call of the other one of GDN and KDA.

    per_channel: whether the operator is KDA, whose g has a number for each channel of K.
    step: whether the function is for a few tokens of each sequence.
    arguments: by our names, which `places.py` explains.

    Raises ValueError if the operator's inputs cannot express the call.
    """
    if bool(arguments.get("is_kda", per_channel)) != per_channel:
        return None
    if arguments.get("softplus", 1.0) != 1.0 or arguments.get("second_pool") is not None:
        raise ValueError("a call with a factor in softplus, or with two pools, is not recorded")
    state = arguments.get("other_pool")
    if state is None:
        state = arguments.get("state")
    q, k, v = _queries_keys_values(arguments, state)
    gate_shape = tuple(v.shape[:3])
    if per_channel:
        gate_shape += (q.shape[3],)
    states = CallStates.of(v, {**arguments, "state": state, "step": step})
    inputs: dict[str, object] = {
        "q": q,
        "k": k,
        "v": v,
        "g": _gates("g", arguments, gate_shape, v, default=0),
        "beta": _gates("beta", arguments, v.shape[:3], v, default=1),
        "initial_state": states.initial(),
        "scale": arguments.get("scale"),
        "use_qk_l2norm": bool(arguments.get("norm")),
        "cu_seqlens": states.cu_seqlens,
        "state_every": int(states.after_each_token),
    }
    return FunctionCall(
        inputs=inputs,
        result=partial(states.result, arguments, v),
        slots=states.slots_read,
        copied=states.copied,
        weights={
            name: arguments[name]
            for name in ("A_log", "dt_bias")
            if arguments.get(name) is not None
        },
        activate=_activation(arguments, per_channel),
    )


def _queries_keys_values(
    arguments: Arguments, pool: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k (B, T, H, K), and v (B, T, HV, V), as views.  Those of a call without a batch get a
    batch of 1; those in `mixed` (B, channels) have a T of 1.

    pool: (slots, HV, V, K), whose shape says how q, k and v are cut from `mixed`.  Used only if the
        call has that.
    """
    mixed = arguments.get("mixed")
    if mixed is None:
        q, k, v = arguments["q"], arguments["k"], arguments["v"]
        return (q, k, v) if q.ndim == 4 else (q[None], k[None], v[None])
    assert pool is not None
    value_heads, value_dim, key_dim = pool.shape[1:]
    value_width = value_heads * value_dim
    key_width = (mixed.shape[1] - value_width) // 2
    q, k, v = mixed[:, None].split((key_width, key_width, value_width), -1)
    return (
        q.unflatten(-1, (-1, key_dim)),
        k.unflatten(-1, (-1, key_dim)),
        v.unflatten(-1, (value_heads, value_dim)),
    )


def _gates(
    name: str, arguments: Arguments, shape: tuple[int, ...], v: Tensor, *, default: float
) -> Tensor:
    """g or beta of v's tokens, in this shape, (B, T, ...), as a view where that is possible.

    Gates of positions behind T are padding, and are left out if the gate has B as its first
    dimension.
    default: the value of all gates if the call has none.

    Raises ValueError if the call has another number of gates.
    """
    gate: Tensor | None = arguments.get(name)
    if gate is None:
        return v.new_full(shape, default)
    if gate.ndim == len(shape) and len(gate) == shape[0]:
        gate = gate[:, : shape[1]]
    if gate.numel() != math.prod(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, not {tuple(gate.shape)}")
    return gate.reshape(shape)


def _activation(arguments: Arguments, per_channel: bool) -> Activate:
    """`FunctionCall.activate` of a call: computes g and beta from the gates that the call has.
    Those that are raw become fp32; the logarithm of a linear gate keeps its dtype.
    """
    is_raw = bool(arguments.get("raw_gate", arguments.get("A_log") is not None))
    is_linear = arguments.get("domain") == "linear" and arguments.get("g") is not None
    is_raw_beta = bool(arguments.get("raw_beta"))
    if not (is_raw or is_linear or is_raw_beta):
        return unchanged
    lower_bound = _lower_bound(arguments) if per_channel else None
    largest_beta = 2 if arguments.get("doubled") else 1

    def activate(inputs: Inputs, weights: Mapping[str, Tensor]) -> Inputs:
        """See `place.Activate`."""
        g, beta = inputs.tensors["g"], inputs.tensors["beta"]
        if is_raw:
            g = _activated_gate(g, weights, lower_bound)
        elif is_linear:
            g = g.log()
        if is_raw_beta:
            beta = beta.float().sigmoid() * largest_beta
        return replace(inputs, g=g, beta=beta)

    return activate


def _lower_bound(arguments: Arguments) -> float | None:
    """The lower bound of KDA's g for a raw gate, from `lower_bound` and `bounded` in `places.py`;
    None if it has none.
    """
    lower_bound: float | None = arguments.get("lower_bound")
    if "bounded" not in arguments:
        return lower_bound
    if arguments["bounded"] not in (True, "bounded"):
        return None
    return _LOWER_BOUND if lower_bound is None else lower_bound


def _activated_gate(
    gate: Tensor, weights: Mapping[str, Tensor], lower_bound: float | None
) -> Tensor:
    """g (B, T, HV) or (B, T, HV, K), fp32, from the gate before its activation, as `raw_gate` and
    `lower_bound` in `places.py` say.

    weights: A_log, with HV numbers, and dt_bias, with as many numbers as the gate has for a token:
        HV for a gate (B, T, HV), HV K for one (B, T, HV, K).  Both may have any shape, and count as
        0 if they are missing.
    """
    gate = gate.float()
    if "dt_bias" in weights:
        gate = gate + weights["dt_bias"].float().reshape(gate.shape[2:])
    amplitude = torch.ones((), device=gate.device)
    if "A_log" in weights:
        amplitude = weights["A_log"].float().exp().flatten()
        if gate.ndim == 4:
            amplitude = amplitude[:, None]
    if lower_bound is None:
        return -amplitude * torch.nn.functional.softplus(gate)
    return lower_bound * (amplitude * gate).sigmoid()
