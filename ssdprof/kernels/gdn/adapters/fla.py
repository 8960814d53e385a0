"""The Triton kernels of flash-linear-attention, as installed: https://github.com/fla-org/flash-linear-attention.

The library passes some calls to other installed libraries.  The code that imports it turns this off
(`operators/gdn/peers.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from ssdprof.kernels.adapters.tuning import SHORT, Tunings
from ssdprof.kernels.gdn.adapters.refusals import refuse_relaxed
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, UnsupportedError

MOST_STEPS = 64  # most tokens of a sequence for the token-by-token kernel
OPERATOR = "fla.ops.gated_delta_rule"  # the module to pass to `load` and `load_recurrent`
_KERNELS = (OPERATOR, "fla.ops.common", "fla.ops.utils", "fla.modules.l2norm")


def load(operator: Any) -> Implementation:
    """The chunked kernels of the library's operator."""
    tunings = Tunings(module for name, module in sorted(sys.modules.items()) if name.startswith(_KERNELS))
    chunked = _Chunked(operator.chunk_gated_delta_rule, tunings)
    return Implementation(operator="gdn", name="fla", run=chunked.run, plan=chunked.plan)


def load_recurrent(operator: Any) -> Implementation:
    """The library's token-by-token kernel."""
    recurrent = _Recurrent(operator.fused_recurrent_gated_delta_rule)
    return Implementation(operator="gdn", name="fla_recurrent", run=recurrent.run, plan=recurrent.plan)


def version() -> str:
    """The library's own version."""
    return str(getattr(import_module("fla"), "__version__", "unknown"))


@dataclass(frozen=True)
class _Chunked:
    function: Callable[..., Any]
    tunings: Tunings

    def run(self, inputs: GDNInputs, precision: Precision) -> GDNOutput:
        self._refuse_unsupported(inputs, precision)
        self.tunings.use_for((inputs.q.shape[2:], inputs.v.shape[2:], inputs.q.dtype, _short(inputs)))
        return _call(self.function, inputs)

    def plan(self, inputs: GDNInputs, precision: Precision) -> Plan:
        self._refuse_unsupported(inputs, precision)
        return Plan(
            variant="triton",
            launches=5 + 2 * int(inputs.use_qk_l2norm),
            config={"chunk_size": 64},
            reason="it tunes itself; calls to other libraries are turned off",
        )

    def _refuse_unsupported(self, inputs: GDNInputs, precision: Precision) -> None:
        refuse_relaxed("fla", precision)
        if precision.state_dtype != inputs.q.dtype:
            raise UnsupportedError(f"fla: states that enter chunks are {inputs.q.dtype}, as q is")


@dataclass(frozen=True)
class _Recurrent:
    function: Callable[..., Any]

    def run(self, inputs: GDNInputs, precision: Precision) -> GDNOutput:
        self._refuse_unsupported(inputs, precision)
        return _call(self.function, inputs)

    def plan(self, inputs: GDNInputs, precision: Precision) -> Plan:
        self._refuse_unsupported(inputs, precision)
        return Plan(variant="triton", launches=1, reason="one launch, token by token")

    def _refuse_unsupported(self, inputs: GDNInputs, precision: Precision) -> None:
        refuse_relaxed("fla_recurrent", precision)
        tokens = inputs.length if inputs.cu_seqlens is None else inputs.length / inputs.sequences
        if tokens > MOST_STEPS:
            raise UnsupportedError(f"fla_recurrent: token by token, for sequences of at most {MOST_STEPS}")


def _call(function: Callable[..., Any], inputs: GDNInputs) -> GDNOutput:
    with torch.cuda.device(inputs.q.get_device()), torch.no_grad():
        out, final_states = function(
            q=inputs.q, k=inputs.k, v=inputs.v, g=inputs.g, beta=inputs.beta, scale=inputs.scale_or_default,
            initial_state=inputs.initial_state, output_final_state=True, use_qk_l2norm_in_kernel=inputs.use_qk_l2norm,
            cu_seqlens=inputs.cu_seqlens,
        )  # fmt: skip
    return GDNOutput(out, final_states)


def _short(inputs: GDNInputs) -> bool:
    return inputs.v.shape[0] * inputs.v.shape[1] <= SHORT
