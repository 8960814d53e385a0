"""A decode step of SSD in two launches: the first writes the state, the second reads it for the output.

It moves one state more than a fused step and computes the same in fp32.  The five launches of `unfused` would be a slow
baseline for one token, because they process chunks.
"""

from __future__ import annotations

from dataclasses import asdict

import torch

from ssdprof.kernels.device import INTERPRETED, capability
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, UnsupportedError, register
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.recurrent import MAX_DSTATE, RecurrentConfig
from ssdprof.kernels.ssd.unfused_step.step_output import step_output
from ssdprof.kernels.ssd.unfused_step.step_state import step_state

_NAME = "unfused_step"
_EQUALS = "; the same as exact with fp32 states"  # appended to the reason for every other precision


def run(inputs: SSDInputs, precision: Precision = Precision()) -> SSDOutput:  # noqa: ARG001, B008
    """Output in x's dtype, final states in fp32, for one token of each sequence.

    Raises UnsupportedError for more tokens, for packed sequences, and where the kernels cannot run.
    """
    _refuse_unsupported(inputs)
    return two_stages(inputs)


def two_stages(inputs: SSDInputs) -> SSDOutput:
    """`run` without checks."""
    config = RecurrentConfig.choose(inputs)
    with torch.cuda.device(inputs.x.get_device()):  # no effect for -1, the CPU
        final_states = step_state(inputs, config)
        return SSDOutput(step_output(inputs, final_states, config), final_states)


def plan(inputs: SSDInputs, precision: Precision = Precision()) -> Plan:  # noqa: B008
    """The launches and configuration of a call.  Launches nothing."""
    _refuse_unsupported(inputs)
    return Plan(
        variant="interpreter" if INTERPRETED else "portable",
        launches=2,
        config=asdict(RecurrentConfig.choose(inputs)),
        reason="the state in one launch, the output in another; fp32 throughout" + _EQUALS * (precision != Precision()),
    )


def _refuse_unsupported(inputs: SSDInputs) -> None:
    x, dstate = inputs.x, inputs.B.shape[3]
    if x.shape[1] != 1 or inputs.cu_seqlens is not None:
        raise UnsupportedError(f"{_NAME}: one token of each sequence, side by side")
    if dstate > MAX_DSTATE:
        raise UnsupportedError(f"{_NAME}: dstate is at most {MAX_DSTATE}, not {dstate}")
    tensors = [value for value in vars(inputs).values() if isinstance(value, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise UnsupportedError(f"{_NAME}: forward only; call it under torch.no_grad() or detach the inputs")
    if not x.is_cuda and not INTERPRETED:
        raise UnsupportedError(f"{_NAME}: without TRITON_INTERPRET=1, tensors must be on the GPU, not on {x.device}")
    if x.is_cuda and capability(x) < (8, 0):
        raise UnsupportedError(f"{_NAME}: needs a GPU of compute capability 8.0 or newer")


register(Implementation(operator="ssd", name=_NAME, run=run, plan=plan))
