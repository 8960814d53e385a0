"""The five kernels of state-spaces/mamba, as installed: https://github.com/state-spaces/mamba."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from ssdprof.kernels.adapters.content import content
from ssdprof.kernels.adapters.offsets import INT32_ELEMENTS, span
from ssdprof.kernels.adapters.tuning import SHORT, Tunings
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, UnsupportedError
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput

_MODULE = "mamba_ssm.ops.triton.ssd_combined"
_KERNELS = {
    f"mamba_ssm.ops.triton.{name}" for name in ("ssd_bmm", "ssd_chunk_scan", "ssd_chunk_state", "ssd_state_passing")
}


def load() -> Implementation:
    """Raises ImportError if the library or one of its dependencies is missing."""
    module: Any = import_module(_MODULE)
    tunings = Tunings(import_module(name) for name in sys.modules.keys() & _KERNELS)
    five_kernels = _FiveKernels(module._mamba_chunk_scan_combined_fwd, tunings)
    return Implementation(operator="ssd", name="mamba_ssm", run=five_kernels.run, plan=five_kernels.plan)


def version() -> str:
    """The library's own version; without one, a name with a hash of the file."""
    stated = getattr(import_module("mamba_ssm"), "__version__", None)
    return str(stated or content(Path(str(import_module(_MODULE).__file__))))


def passes_any_states() -> bool:
    """Whether the installed version can pass states in a dtype other than that of C; older versions cannot."""
    return _takes_state_dtype(import_module(_MODULE)._mamba_chunk_scan_combined_fwd)


def _takes_state_dtype(forward: Callable[..., Any]) -> bool:
    return "state_dtype" in signature(forward).parameters


@dataclass(frozen=True)
class _FiveKernels:
    """forward: the function that `mamba_chunk_scan_combined` calls, without the autograd function around it."""

    forward: Callable[..., Any]
    tunings: Tunings

    def run(self, inputs: SSDInputs, precision: Precision) -> SSDOutput:
        self._refuse_unsupported(inputs, precision)
        # tune only twice: each time five kernels try dozens of configurations, at two chunk sizes
        self.tunings.use_for(inputs.x.shape[0] * inputs.x.shape[1] <= SHORT)
        # without the argument it is C's dtype, also in versions that have no other
        states = {} if precision.state_dtype == inputs.C.dtype else {"state_dtype": precision.state_dtype}
        with torch.cuda.device(inputs.x.get_device()):
            out, _, _, _, _, final_states = self.forward(
                inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C, inputs.chunk_size, D=inputs.D, z=inputs.z,
                dt_bias=inputs.dt_bias, initial_states=inputs.initial_states, dt_softplus=inputs.dt_softplus,
                dt_limit=inputs.dt_limit, **states,
            )  # fmt: skip
        return SSDOutput(out, final_states)

    def plan(self, inputs: SSDInputs, precision: Precision) -> Plan:
        self._refuse_unsupported(inputs, precision)
        return Plan(variant="mamba_ssm", launches=5, config={"chunk_size": inputs.chunk_size}, reason="it tunes itself")

    def _refuse_unsupported(self, inputs: SSDInputs, precision: Precision) -> None:
        if not precision.exact:
            raise UnsupportedError("mamba_ssm: exact intermediates only")
        if precision.state_dtype != inputs.C.dtype and not _takes_state_dtype(self.forward):
            raise UnsupportedError(f"mamba_ssm: this version passes states on in {inputs.C.dtype} only")
        if inputs.cu_seqlens is not None:
            raise UnsupportedError("mamba_ssm: no initial and final states of each packed sequence")
        if inputs.chunk_size & (inputs.chunk_size - 1):  # NaN: https://github.com/state-spaces/mamba/issues/449
            raise UnsupportedError(f"mamba_ssm: chunk_size must be a power of two, not {inputs.chunk_size}")
        (batch, seqlen, nheads, headdim), dstate = inputs.x.shape, inputs.B.shape[3]
        states = batch * -(-seqlen // inputs.chunk_size) * nheads * headdim * dstate
        farthest = max(states, *(span(tensor) for tensor in (inputs.x, inputs.dt, inputs.B, inputs.C)))
        if farthest > INT32_ELEMENTS:
            raise UnsupportedError("mamba_ssm: 32-bit offsets, and a tensor here spans more than 2^31 elements")
