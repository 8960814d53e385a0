"""How a model calls SSD: transformers' `mamba2_chunk_scan`, bound to `SSDInputs` without a copy."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ssdprof import kernels
from ssdprof.errors import BadInputError
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import UnsupportedError
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.ssd.reference import ssd_chunked
from ssdprof.operators import tensors
from ssdprof.operators.operator import BoundCall, Door, Output, Scalar

_PREFERRED_ON_GPU = ("fused", "unfused")


def bind(
    mixer: nn.Module,  # noqa: ARG001
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
    """What `mixer` asks of the operator; arguments of its forward that mean nothing to the operator are dropped."""
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
    return BoundCall(inputs, return_final_states)


def stand_in(inputs: SSDInputs) -> Output:
    """Ours, exact and with fp32 states: transformers' own needs a matrix per chunk and head, which for one layer of a
    large model at 128K tokens is more than 100 GiB."""
    if inputs.x.device.type == "cuda":
        return _run_on_gpu(inputs)
    out, final_states = ssd_chunked(inputs, dtype=torch.float32)
    return out.to(inputs.x.dtype), final_states


def _run_on_gpu(inputs: SSDInputs) -> Output:
    """The first of our implementations that takes these inputs, with exact intermediates and fp32 states."""
    refusals = []
    with torch.cuda.device(inputs.x.device):
        for name in _PREFERRED_ON_GPU:
            try:
                out, final_states = kernels.get("ssd", name).run(inputs, Precision())
            except UnsupportedError as error:
                refusals.append(f"{name}: {error}")
            else:
                return out, final_states
    raise BadInputError(f"No SSD implementation runs this model's layers ({'; '.join(refusals)}).")


def scalars(inputs: SSDInputs) -> dict[str, Scalar]:
    """JSON has no infinity: a limit of dt that is None is none."""
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
    bind=bind,
    refused=("seq_idx", "cu_seqlens", "return_varlen_states"),
    views=("x", "B", "C"),
    per_position=("dt", "z"),
    gate_bytes=lambda item: item,  # dt
    stand_in=stand_in,
    scalars=scalars,
    arguments=arguments,
)
