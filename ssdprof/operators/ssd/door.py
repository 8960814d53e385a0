"""How a model calls SSD: transformers' `mamba2_chunk_scan`, bound to `SSDInputs` without a copy."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.ssd.reference import ssd_chunked
from ssdprof.operators import tensors
from ssdprof.operators.operator import BoundCall, Door, Output, Scalar
from ssdprof.operators.stand_in import run_kernels


def bind(
    mixer: nn.Module,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **dropped: Any,  # noqa: ARG001
) -> BoundCall:
    """The call of `mixer` as inputs; arguments of its forward that have no effect on the operator are dropped."""
    low, high = dt_limit
    inputs = SSDInputs(
        x=x,
        dt=dt,
        A=A,
        B=B,
        C=C,
        chunk_size=chunk_size,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=(float(low), float(high)),
        initial_states=initial_states,
    )
    return BoundCall(inputs, return_final_states, _limit_remark(mixer, inputs.dt_limit))


def _limit_remark(mixer: nn.Module, passed: tuple[float, float]) -> str:
    """A sentence if the config's limits of dt differ from those that the model passes; else empty."""
    stated = getattr(getattr(mixer, "config", None), "time_step_limit", None)
    if stated is None or tuple(map(float, stated)) == passed:
        return ""
    low, high = map(float, stated)
    return (
        f"The model calls the operator with dt_limit ({passed[0]:g}, {passed[1]:g}), and these limits were used; its "
        f"config states time_step_limit ({low:g}, {high:g}), which other runtimes use."
    )


def bind_step(
    mixer: nn.Module,
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    **dropped: Any,  # noqa: ARG001
) -> BoundCall:
    """A call of `mixer` for one token: x (b, h, p), B and C (b, g, n), and dt, A, D and dt_bias repeated over channels.

    The state is updated in place, so only the output is returned.  The limits of dt are not among the
    arguments: a model applies them to prompts only.
    """
    inputs = SSDInputs(
        x=x[:, None],
        dt=_of_heads("dt", dt, 2)[:, None],
        A=_of_heads("A", A, 1),
        B=B[:, None],
        C=C[:, None],
        chunk_size=getattr(mixer, "chunk_size", SSDInputs.chunk_size),
        D=None if D is None else _of_heads("D", D, 1),
        z=None if z is None else z[:, None],
        dt_bias=None if dt_bias is None else _of_heads("dt_bias", dt_bias, 1),
        dt_softplus=dt_softplus,
        initial_states=state,
    )
    return BoundCall(inputs, wants_final_state=False)


def _of_heads(name: str, tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """The first `dims` dimensions of a tensor that is the same over the others.  ValueError if it is not."""
    first = tensor
    for _ in range(tensor.ndim - dims):
        first = first.select(-1, 0)
    if any(tensor.stride()[dims:]):  # not expanded
        repeated = first.reshape(*first.shape, *(1 for _ in tensor.shape[dims:])).expand_as(tensor)
        if not torch.equal(tensor, repeated):
            raise ValueError(f"{name} differs between the channels of a head")
    return first


def stand_in(inputs: SSDInputs) -> Output:
    """Our kernels on a GPU, the chunked form in fp32 elsewhere."""
    if inputs.x.device.type == "cuda":
        return run_kernels("ssd", inputs, inputs.x.device)
    out, final_states = ssd_chunked(inputs, dtype=torch.float32)
    return out.to(inputs.x.dtype), final_states


def scalars(inputs: SSDInputs) -> dict[str, Scalar]:
    """The scalars in JSON, which has no infinity: None means no limit of dt."""
    found = tensors.scalars(inputs)
    low, high = (limit if math.isfinite(limit) else None for limit in found.pop("dt_limit"))
    return found | {"dt_limit_low": low, "dt_limit_high": high}


def arguments(stored: dict[str, Scalar]) -> dict[str, Any]:
    """The inverse of `scalars`."""
    found: dict[str, Any] = dict(stored)
    if "dt_limit_low" in found:
        low, high = found.pop("dt_limit_low"), found.pop("dt_limit_high", None)
        found["dt_limit"] = (-math.inf if low is None else low, math.inf if high is None else high)
    return found


DOOR = Door(
    function="mamba2_chunk_scan",
    step="mamba2_selective_state_update",
    bind=bind,
    bind_step=bind_step,
    refused=("seq_idx", "cu_seqlens", "return_varlen_states"),
    views=("x", "B", "C"),
    per_position=("dt", "z"),
    gate_bytes=lambda item: item,  # dt
    stand_in=stand_in,
    scalars=scalars,
    arguments=arguments,
)
