"""Forms of `recurrent` that a bench times only when they are named."""

from __future__ import annotations

from dataclasses import replace

import torch

from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, UnsupportedError, register
from ssdprof.kernels.ssd import recurrent
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput

_IN_PLACE = "recurrent_in_place"


def _run(inputs: SSDInputs, _precision: Precision) -> SSDOutput:
    """The new state over a copy of the old one, as `selective_state_update` needs it."""
    if inputs.initial_states is None:
        raise UnsupportedError(f"{_IN_PLACE}: sequences begin with a state")
    states = inputs.initial_states.to(torch.float32, copy=True)
    return recurrent.ssd_recurrent(replace(inputs, initial_states=states), in_place=True)


def _plan(inputs: SSDInputs, precision: Precision) -> Plan:
    plan = recurrent.plan(inputs, precision)
    return replace(plan, launches=2, reason=f"each call begins with a copy of the state, in its time; {plan.reason}")


register(Implementation(operator="ssd", name=_IN_PLACE, run=_run, plan=_plan))
