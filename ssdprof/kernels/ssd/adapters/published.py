"""The published single-launch kernel, from a checkout of https://github.com/RishiAstra/mamba.

Its package has the same name as the library that it was forked from, so its files are loaded by path, under different
module names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ssdprof.kernels.adapters.content import content
from ssdprof.kernels.adapters.offsets import INT32_ELEMENTS, span
from ssdprof.kernels.adapters.tuning import Tunings
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, UnsupportedError
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput

_FOLDER = Path("mamba_ssm", "ops", "triton")
_KERNEL, _SOFTPLUS = "ssd_fused5", "softplus"

# the kernel's switches for intermediates: fp32 in its "high" setting, 16 bit in "medium"; C B^T is tf32 in both
_INTERMEDIATES = ("cb_store_fp32", "cb_scale_fp32", "cs_acc_fp32")


def load(checkout: Path) -> Implementation:
    """Raises ImportError if the checkout lacks the kernel, or if one of the kernel's dependencies is missing."""
    softplus = _module(checkout / _FOLDER / f"{_SOFTPLUS}.py")
    with _found_as(f"{'.'.join(_FOLDER.parts)}.{_SOFTPLUS}", softplus):
        kernel: Any = _module(checkout / _FOLDER / f"{_KERNEL}.py")
    tunings = Tunings([kernel])
    tunings.zero_before_each_try("sync_atomic")  # unless zeroed, all tries but the first skip two stages
    published = _Published(kernel._fused5_ssd, tunings)
    return Implementation(operator="ssd", name="published", run=published.run, plan=published.plan)


def version(checkout: Path) -> str:
    """The kernel's file name with a hash, because a checkout has no version."""
    return content(checkout / _FOLDER / f"{_KERNEL}.py")


def _module(file: Path) -> ModuleType:
    spec = spec_from_file_location(f"ssdprof_published_{file.stem}", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ImportError(f"there is no {'/'.join(_FOLDER.parts)}/{file.name}")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def _found_as(name: str, module: ModuleType) -> Iterator[None]:
    """Let `import name` find `module` in the context.  Afterwards restores an installed library of that name."""
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before


@dataclass(frozen=True)
class _Published:
    launch: Callable[..., Any]
    tunings: Tunings

    def run(self, inputs: SSDInputs, precision: Precision) -> SSDOutput:
        self._refuse_unsupported(inputs, precision)
        self.tunings.use_for((inputs.x.shape, inputs.B.shape))
        with torch.cuda.device(inputs.x.get_device()):
            out, _, _, final_states, _, _ = self.launch(
                inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C, inputs.D, chunk_size=inputs.chunk_size,
                initial_states=inputs.initial_states, z=inputs.z, dt_bias=inputs.dt_bias,
                dt_softplus=inputs.dt_softplus, dt_limit=inputs.dt_limit, **_switches(precision),
            )  # fmt: skip
        return SSDOutput(out, final_states)

    def plan(self, inputs: SSDInputs, precision: Precision) -> Plan:
        self._refuse_unsupported(inputs, precision)
        setting = "high" if precision.exact else "medium"
        own = precision.exact == (precision.state_dtype == torch.float32)
        return Plan(
            variant=setting,
            launches=4,
            config={"chunk_size": inputs.chunk_size},
            reason=f"its {setting!r} setting{'' if own else ' with the states of the other one'}; also launched: flags "
            "and first state zeroed, last state copied",
        )

    def _refuse_unsupported(self, inputs: SSDInputs, precision: Precision) -> None:
        if precision.state_dtype not in (torch.float32, torch.float16):
            raise UnsupportedError("published: fp32 and fp16 states only")
        plain = precision.exact and precision.state_dtype == torch.float32
        if not plain and inputs.x.dtype != torch.float16:  # it sums in 16 bit, which Triton supports only in fp16
            raise UnsupportedError("published: relaxed intermediates and fp16 states go with fp16 inputs")
        if inputs.cu_seqlens is not None:
            raise UnsupportedError("published: no packed sequences")
        if inputs.chunk_size & (inputs.chunk_size - 1):
            raise UnsupportedError(f"published: chunk_size must be a power of two, not {inputs.chunk_size}")
        (seqlen, nheads, headdim), dstate = inputs.x.shape[1:], inputs.B.shape[3]
        states = (-(-seqlen // inputs.chunk_size) + 1) * nheads * headdim * dstate
        rows = (span(tensor, axes=slice(1, None)) for tensor in (inputs.x, inputs.dt, inputs.B, inputs.C))
        if max(states, *rows) > INT32_ELEMENTS:
            raise UnsupportedError("published: 32-bit offsets, and a sequence here spans more than 2^31 elements")


def _switches(precision: Precision) -> dict[str, bool]:
    states = {"states_in_fp32": precision.state_dtype == torch.float32}
    return states | dict.fromkeys(_INTERMEDIATES, precision.exact) | {"cb_comp_fp32": True}
