"""The decoding kernel of state-spaces/mamba, as installed: https://github.com/state-spaces/mamba.

The kernel overwrites the state.  So that every call computes the same, each call begins with a copy of the initial
state.  Its time includes the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from math import inf
from typing import Any

import torch

from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, UnsupportedError
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput

_NAME = "selective_state_update"
_MODULE = "mamba_ssm.ops.triton.selective_state_update"


def load() -> Implementation:
    """Raises ImportError if the library or one of its dependencies is missing."""
    step = _Step(import_module(_MODULE).selective_state_update)
    return Implementation(operator="ssd", name=_NAME, run=step.run, plan=step.plan)


@dataclass(frozen=True)
class _Step:
    function: Callable[..., Any]

    def run(self, inputs: SSDInputs, precision: Precision) -> SSDOutput:
        _refuse_unsupported(inputs, precision)
        heads, width, size = inputs.states_shape[1:]
        x, initial = inputs.x[:, 0], inputs.initial_states
        states = x.new_zeros(inputs.states_shape, dtype=torch.float32) if initial is None else initial.clone()
        with torch.cuda.device(x.get_device()):
            out = self.function(
                states, x, inputs.dt[:, 0, :, None].expand(-1, -1, width),
                inputs.A[:, None, None].expand(heads, width, size), inputs.B[:, 0], inputs.C[:, 0],
                D=_wide(inputs.D, width), z=None if inputs.z is None else inputs.z[:, 0],
                dt_bias=_wide(inputs.dt_bias, width), dt_softplus=inputs.dt_softplus,
            )  # fmt: skip
        return SSDOutput(out[:, None], states)

    def plan(self, inputs: SSDInputs, precision: Precision) -> Plan:
        _refuse_unsupported(inputs, precision)
        return Plan(variant="triton", launches=2, reason="each call begins with a copy of the state, in its time")


def _wide(per_head: torch.Tensor | None, width: int) -> torch.Tensor | None:
    """(h) or (h, p) -> (h, p)."""
    if per_head is None or per_head.ndim == 2:
        return per_head
    return per_head[:, None].expand(-1, width)


def _refuse_unsupported(inputs: SSDInputs, precision: Precision) -> None:
    if not precision.exact or precision.state_dtype != torch.float32:
        raise UnsupportedError(f"{_NAME}: exact intermediates and fp32 states only")
    if inputs.cu_seqlens is not None or inputs.x.shape[1] != 1:
        raise UnsupportedError(f"{_NAME}: one token of each sequence")
    if inputs.dt_limit != (0.0, inf):
        raise UnsupportedError(f"{_NAME}: no dt_limit")
