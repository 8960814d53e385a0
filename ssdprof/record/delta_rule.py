"""Functions that compute the gated delta rule: GDN and KDA.  Imports torch at first use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ssdprof.operators.late import torch
from ssdprof.record.place import Activate, Arguments, FunctionCall, unchanged
from ssdprof.record.states import CallStates, tensors_of

if TYPE_CHECKING:
    from torch import Tensor

    from ssdprof.kernels.inputs import Inputs

_LOWER_BOUND = -5.0  # cuDNN's, where a call has a bounded gate and names no bound


def bind(per_channel: bool, step: bool, arguments: Arguments) -> FunctionCall | None:
    """A call in terms of the operator's inputs.

    per_channel: KDA, whose gates have a number for each channel.  step: of a few tokens.
    arguments: by our names.  ValueError for those that the inputs cannot express.
    """
    if bool(arguments.get("is_kda", per_channel)) != per_channel:
        return None
    if arguments.get("softplus", 1.0) != 1.0 or arguments.get("second") is not None:
        raise ValueError("a call with a factor in softplus, or with two pools, is not recorded")
    state = arguments.get("state") if arguments.get("pool") is None else arguments["pool"]
    q, k, v = _rows(arguments, state)
    cu_seqlens = arguments.get("cu_seqlens")
    states = CallStates.of(v, {**arguments, "state": state, "step": step})
    inputs: dict[str, object] = {
        "q": q,
        "k": k,
        "v": v,
        "g": _gates(
            "g", arguments, (*v.shape[:3], q.shape[3]) if per_channel else v.shape[:3], v, 0
        ),
        "beta": _gates("beta", arguments, v.shape[:3], v, 1),
        "initial_state": states.initial(),
        "scale": arguments.get("scale"),
        "use_qk_l2norm": bool(arguments.get("norm")),
        "cu_seqlens": cu_seqlens,
        "state_every": int(states.after_each_token),
    }

    def result(returned: object) -> tuple[Tensor, Tensor | None]:
        several = tensors_of(returned)
        out = several[0] if arguments.get("out") is None else arguments["out"]
        final = several[1] if len(several) > 1 else None
        out = states.live(out.reshape(v.shape).to(v.dtype))
        return out, states.final(final)

    weights = {name: arguments.get(name) for name in ("A_log", "dt_bias")}
    return FunctionCall(
        inputs=inputs,
        result=result,
        slots=states.slots_read,
        copied=frozenset({"initial_state"} if states.gathered else ()),
        weights={name: weight for name, weight in weights.items() if weight is not None},
        activate=_activation(arguments, per_channel),
    )


def _rows(arguments: Arguments, pool: Tensor | None) -> tuple[Tensor, ...]:
    """q, k and v, (B, T, heads, ...), as views."""
    if (mixed := arguments.get("mixed")) is None:
        several = (arguments[name] for name in ("q", "k", "v"))
        return tuple(rows if rows.ndim == 4 else rows[None] for rows in several)
    assert pool is not None
    value_heads, value_dim, key_dim = pool.shape[1:]  # V before K
    keys = (mixed.shape[1] - value_heads * value_dim) // 2
    q, k, v = mixed[:, None].split((keys, keys, value_heads * value_dim), -1)
    q, k = (rows.unflatten(-1, (-1, key_dim)) for rows in (q, k))
    return q, k, v.unflatten(-1, (value_heads, value_dim))


def _gates(
    name: str, arguments: Arguments, shape: tuple[int, ...], v: Tensor, without: float
) -> Tensor:
    """The gates of v's tokens: (B, T, ...).  Gates of tokens behind T are padding, and are cut off.

    without: the value of gates that the call does not have.

    ValueError for gates that are not one for each head, or channel.
    """
    gate: Tensor | None = arguments.get(name)
    if gate is None:
        return v.new_full(shape, without)
    if gate.ndim == len(shape) and len(gate) == shape[0]:
        gate = gate[:, : shape[1]]
    if gate.numel() != math.prod(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, not {tuple(gate.shape)}")
    return gate.reshape(shape)


def _activation(arguments: Arguments, per_channel: bool) -> Activate:
    """`FunctionCall.activate` of a call: how its g and beta are computed from those that it has."""
    raw = bool(arguments.get("raw_gate", arguments.get("A_log") is not None))
    linear = arguments.get("domain") == "linear" and arguments.get("g") is not None
    raw_beta = bool(arguments.get("raw_beta"))
    lower_bound = None
    if per_channel and arguments.get("bounded", True) in (True, "bounded"):
        lower_bound = arguments.get("lower_bound")
        if lower_bound is None and "bounded" in arguments:
            lower_bound = _LOWER_BOUND
    if not (raw or linear or raw_beta):
        return unchanged
    return partial(
        _activated,
        raw=raw,
        lower_bound=lower_bound,
        linear=linear,
        raw_beta=raw_beta,
        doubled=bool(arguments.get("doubled")),
    )


def _activated(
    inputs: Inputs,
    weights: Mapping[str, Tensor],
    *,
    raw: bool,
    lower_bound: float | None,
    linear: bool,
    raw_beta: bool,
    doubled: bool,
) -> Inputs:
    """As `FunctionCall.activate`.  weights: without A_log, it counts as 0.

    linear: g is the decay, unless it is raw.  The others are as in `places.py`.
    """
    g, beta = inputs.tensors["g"], inputs.tensors["beta"]
    if raw:
        g = g.float()
        if "dt_bias" in weights:
            g = g + weights["dt_bias"].float().reshape(g.shape[2:])
        amplitude = torch.ones((), device=g.device)
        if "A_log" in weights:
            amplitude = weights["A_log"].float().exp().reshape(-1, *(1 for _ in g.shape[3:]))
        if lower_bound is None:
            g = -amplitude * torch.nn.functional.softplus(g)
        else:
            g = lower_bound * (amplitude * g).sigmoid()
    elif linear:
        g = g.log()
    if raw_beta:
        beta = beta.float().sigmoid() * (2 if doubled else 1)
    return replace(inputs, g=g, beta=beta)
