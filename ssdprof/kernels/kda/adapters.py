"""KDA kernels of other libraries, as installed.  Each `load_...` raises ImportError if its library is missing.

fla         the Triton kernels of https://github.com/fla-org/flash-linear-attention, given computed gates
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ssdprof.kernels.adapters import SHORT, Tunings, library_kernel
from ssdprof.kernels.gdn.adapters import MOST_STEPS, _call, _function, _refuse_relaxed
from ssdprof.kernels.kda.inputs import GDNOutput, KDAInputs
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, UnsupportedError

FLA = "fla.ops.kda"  # the module to pass to `load_fla` and `load_fla_recurrent`
_FLA_KERNELS = (FLA, "fla.ops.common", "fla.ops.utils", "fla.modules.l2norm", "fla.modules.norm")


def load_fla(operator: Any) -> Implementation:
    """The chunked kernels of the library's operator."""
    tunings = Tunings(module for name, module in sorted(sys.modules.items()) if name.startswith(_FLA_KERNELS))

    def call(inputs: KDAInputs, _precision: Precision) -> GDNOutput:
        short = inputs.v.shape[0] * inputs.v.shape[1] <= SHORT
        tunings.use_for((inputs.q.shape[2:], inputs.v.shape[2:], inputs.q.dtype, short))
        return _call(operator.chunk_kda, inputs)

    def refuse(inputs: KDAInputs, precision: Precision) -> None:
        _refuse_relaxed("fla", precision)
        if precision.state_dtype != inputs.q.dtype:
            raise UnsupportedError(f"fla: states that enter chunks are {inputs.q.dtype}, as q is")

    reason = "it tunes itself in each process; calls to other libraries are turned off; gates arrive computed"
    plan = Plan(variant="triton", launches=6, config={"chunk_size": 64}, reason=reason)
    return library_kernel("kda", "fla", refuse, call, plan)


def load_fla_recurrent(operator: Any) -> Implementation:
    """The library's token-by-token kernel."""

    def refuse(inputs: KDAInputs, precision: Precision) -> None:
        _refuse_relaxed("fla_recurrent", precision)
        if precision.state_dtype != torch.float32:
            raise UnsupportedError("fla_recurrent: states stay in fp32")
        tokens = inputs.length if inputs.cu_seqlens is None else inputs.length / inputs.sequences
        if tokens > MOST_STEPS:
            raise UnsupportedError(f"fla_recurrent: token by token, for sequences of at most {MOST_STEPS}")

    call = _function(operator.fused_recurrent_kda)
    plan = Plan(variant="triton", launches=1, reason="one launch, token by token")
    return library_kernel("kda", "fla_recurrent", refuse, call, plan)
