"""A decode step of the gated delta rule in three launches: the written value, the state, the output.

It moves two states more than a fused step and computes the same in fp32.  If the call normalises q and k, two small
launches do so.  The six launches of `unfused` would be a slow baseline for one token, because they process chunks.
"""

from __future__ import annotations

from dataclasses import asdict

import torch

from ssdprof.kernels.device import INTERPRETED
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.gdn.recurrent import RecurrentConfig
from ssdprof.kernels.gdn.refusals import refuse_gradient, refuse_unsupported
from ssdprof.kernels.gdn.unfused.qk_l2norm import qk_l2norm
from ssdprof.kernels.gdn.unfused_step.step_output import step_output
from ssdprof.kernels.gdn.unfused_step.step_state import step_state
from ssdprof.kernels.gdn.unfused_step.step_write import step_write
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, UnsupportedError, register

_NAME = "unfused_step"
_EQUALS = "; the same as exact with fp32 states"  # appended to the reason for every other precision


def run(inputs: GDNInputs, precision: Precision = Precision()) -> GDNOutput:  # noqa: ARG001, B008
    """Output in v's dtype, final states in fp32, for one token of each sequence.

    Raises UnsupportedError for more tokens, for packed sequences, and where the kernels cannot run.
    """
    _refuse_unsupported(inputs)
    refuse_gradient(_NAME, (value for value in vars(inputs).values() if isinstance(value, torch.Tensor)))
    return three_stages(inputs)


def three_stages(inputs: GDNInputs) -> GDNOutput:
    """`run` without checks."""
    config = RecurrentConfig.choose(inputs)
    q, k = inputs.q, inputs.k
    with torch.cuda.device(q.get_device()):  # no effect for -1, the CPU
        if inputs.use_qk_l2norm:
            q, k = (qk_l2norm(tensor, dtype=torch.float32) for tensor in (q, k))
        u = step_write(inputs, k, config)
        final_states = step_state(inputs, k, u, config)
        return GDNOutput(step_output(inputs, q, final_states, config), final_states)


def plan(inputs: GDNInputs, precision: Precision = Precision()) -> Plan:  # noqa: B008
    """The launches, configuration and workspace of a call.  Launches nothing."""
    _refuse_unsupported(inputs)
    normalised = inputs.q.numel() + inputs.k.numel() if inputs.use_qk_l2norm else 0
    reason = "what is written, the state and the output in a launch each; fp32 throughout"
    return Plan(
        variant="interpreter" if INTERPRETED else "portable",
        launches=3 + 2 * bool(inputs.use_qk_l2norm),
        config=asdict(RecurrentConfig.choose(inputs)),
        workspace_bytes=4 * (inputs.v.numel() + normalised),
        reason=reason + _EQUALS * (precision != Precision()),
    )


def _refuse_unsupported(inputs: GDNInputs) -> None:
    if inputs.q.shape[1] != 1 or inputs.cu_seqlens is not None:
        raise UnsupportedError(f"{_NAME}: one token of each sequence, side by side")
    refuse_unsupported(_NAME, inputs)


register(Implementation(operator="gdn", name=_NAME, run=run, plan=plan))
