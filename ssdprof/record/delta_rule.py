"""Functions that compute the gated delta rule: GDN and KDA.  Imports torch at first use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ssdprof.operators.late import torch
from ssdprof.record.place import FunctionCall
from ssdprof.record.states import CallStates

if TYPE_CHECKING:
    from torch import Tensor

_LOWER_BOUND = -5.0  # cuDNN's, where a call has a bounded gate and names no bound


def bind(per_channel: bool, step: bool, given: Mapping[str, Any]) -> FunctionCall | None:
    """A call in terms of the operator's inputs.

    per_channel: KDA, whose gates have a number for each channel.  step: of a few tokens.
    given: the arguments by our names.  ValueError for those that the inputs cannot express.
    """
    if bool(given.get("is_kda", per_channel)) != per_channel:
        return None
    if given.get("softplus", 1.0) != 1.0 or given.get("second") is not None:
        raise ValueError("a call with a factor in softplus, or with two pools, is not recorded")
    state = given.get("state") if given.get("pool") is None else given["pool"]
    q, k, v = _rows(given, state)
    cu_seqlens = given.get("cu_seqlens")
    states = CallStates(v.shape[0], v.shape[1], cu_seqlens, {**given, "state": state, "step": step})
    overwritten = given.get("overwrites_v") and given.get("room") is None
    inputs: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v.clone() if overwritten else v,
        "initial_state": states.initial(),
        "scale": given.get("scale"),
        "use_qk_l2norm": bool(given.get("norm")),
        "cu_seqlens": cu_seqlens,
        "state_every": int(states.every),
    }
    activate = _take_gates(inputs, given, per_channel)

    def result(returned: Any) -> tuple[Tensor, Tensor | None]:
        several = isinstance(returned, tuple | list)
        out = given.get("out")
        if out is None:
            out = returned[0] if several else returned
        final = returned[1] if several and len(returned) > 1 else None
        out = states.live(out.reshape(v.shape).to(v.dtype))
        return out, states.final(final)

    return FunctionCall(inputs=inputs, result=result, slots=states.slots, activate=activate)


def _rows(given: Mapping[str, Any], pool: Tensor | None) -> tuple[Tensor, ...]:
    """q, k and v, (B, T, heads, ...), as views."""
    if (mixed := given.get("mixed")) is None:
        several = (given[name] for name in ("q", "k", "v"))
        return tuple(rows if rows.ndim == 4 else rows[None] for rows in several)
    assert pool is not None
    value_heads, value_dim, key_dim = pool.shape[1:]  # V before K
    keys = (mixed.shape[1] - value_heads * value_dim) // 2
    q, k, v = mixed[:, None].split((keys, keys, value_heads * value_dim), -1)
    q, k = (rows.unflatten(-1, (-1, key_dim)) for rows in (q, k))
    return q, k, v.unflatten(-1, (value_heads, value_dim))


def _take_gates(
    inputs: dict[str, Any], given: Mapping[str, Any], per_channel: bool
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Adds g and beta to the inputs, and what they need.  Returns what activates them."""
    q, v = inputs["q"], inputs["v"]
    tokens = v.shape[:3]
    for name, shape, without in (
        ("g", (*tokens, q.shape[3]) if per_channel else tokens, v.new_zeros),
        ("beta", tokens, v.new_ones),
    ):
        gate = given.get(name)
        inputs[name] = without(shape) if gate is None else _reshaped(name, gate, shape)
    A_log, bound = given.get("A_log"), given.get("lower_bound")
    raw = bool(given.get("raw_gate", A_log is not None))
    if raw:
        inputs |= {"A_log": A_log, "dt_bias": given.get("dt_bias")}
    if not per_channel or given.get("bounded", True) not in (True, "bounded"):
        bound = None
    elif "bounded" in given and bound is None:
        bound = _LOWER_BOUND
    return partial(
        _activated,
        lower_bound=bound,
        linear=given.get("domain") == "linear" and not raw and given.get("g") is not None,
        raw_beta=bool(given.get("raw_beta")),
        doubled=bool(given.get("doubled")),
    )


def _activated(
    inputs: dict[str, Any],
    *,
    lower_bound: float | None,
    linear: bool,
    raw_beta: bool,
    doubled: bool,
) -> dict[str, Any]:
    """As `FunctionCall.activate`.  Gates are raw if the inputs have an A_log, None counting as 0.

    linear: g is the decay.  The others are as in `signature.py`.
    """
    inputs = dict(inputs)
    g, beta = inputs["g"], inputs["beta"]
    if "A_log" in inputs:
        A_log, bias = inputs.pop("A_log"), inputs.pop("dt_bias")
        g = g.float()
        if bias is not None:
            g = g + bias.float().reshape(g.shape[2:])
        amplitude = torch.ones((), device=g.device)
        if A_log is not None:
            amplitude = A_log.float().exp().reshape(-1, *(1 for _ in g.shape[3:]))
        if lower_bound is None:
            g = -amplitude * torch.nn.functional.softplus(g)
        else:
            g = lower_bound * (amplitude * g).sigmoid()
    elif linear:
        g = g.log()
    if raw_beta:
        beta = beta.float().sigmoid() * (2 if doubled else 1)
    return inputs | {"g": g, "beta": beta}


def _reshaped(name: str, gate: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The gates of the tokens, (B, T, ...).  Those of tokens behind T are padding.  ValueError for
    gates that are not one for each head, or channel.
    """
    if gate.ndim == len(shape) and len(gate) == shape[0]:
        gate = gate[:, : shape[1]]
    if gate.numel() != math.prod(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, not {tuple(gate.shape)}")
    return gate.reshape(shape)
