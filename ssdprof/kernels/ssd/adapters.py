"""SSD kernels of other libraries.  Each `load_...` imports its library, and raises ImportError if
it, or one of its dependencies, is missing.

mamba_ssm               the five kernels of https://github.com/state-spaces/mamba, as installed
published               the published single-launch kernel, from a checkout of
                        https://github.com/RishiAstra/mamba.  Its package has the same name as the
                        library that it was forked from, so its files are loaded by path, under
                        different module names
model                   the torch function of transformers, in fp32, except the sum of dt and its
                        bias, which is in dt's dtype

final_states have the dtype in which the library returns them, so that times do not include a
conversion.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ssdprof.kernels.adapters import (
    INT32_ELEMENTS,
    SHORT,
    Tunings,
    content,
    library_kernel,
    model_function,
    span,
)
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, Reasons, first_reason
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput

# modules of mamba_ssm: that of the function, and those of the kernels that tune themselves
_MAMBA = "mamba_ssm.ops.triton.ssd_combined"
_MAMBA_KERNELS = {
    f"mamba_ssm.ops.triton.{name}"
    for name in ("ssd_bmm", "ssd_chunk_scan", "ssd_chunk_state", "ssd_state_passing")
}
# the published kernel's folder in its checkout, and the names of its two files without ".py"
_FOLDER = Path("mamba_ssm", "ops", "triton")
_KERNEL, _SOFTPLUS = "ssd_fused5", "softplus"
# the published kernel's switches for intermediates: fp32 in its "high" setting, 16 bit in "medium"
_INTERMEDIATES = ("cb_store_fp32", "cb_scale_fp32", "cs_acc_fp32")


def _positional(inputs: SSDInputs) -> tuple[torch.Tensor, ...]:
    """The first arguments of each library's function, which are passed by position."""
    return inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C


def _options(inputs: SSDInputs) -> dict[str, Any]:
    """Arguments that have the same names in all libraries of this file."""
    return {
        "dt_bias": inputs.dt_bias,
        "initial_states": inputs.initial_states,
        "dt_softplus": inputs.dt_softplus,
        "dt_limit": inputs.dt_limit,
    }


def _of_positions(inputs: SSDInputs) -> list[torch.Tensor]:
    """The tensors (b, l, ...) of a call, whose strides the caller chose."""
    tensors = inputs.tensors
    return [tensors[name] for name in ("x", "dt", "B", "C", "z") if name in tensors]


def _spans_far(spans: Iterable[int], kind: str) -> tuple[bool, str]:
    """Whether a library that addresses with 32-bit offsets must refuse a call, and why.

    spans: for each tensor, its elements from the first to the last; or, if the library's offsets
        begin at a sequence, those of one sequence.  kind: "tensor" or "sequence".
    """
    far = max(spans) > INT32_ELEMENTS
    return far, f"32-bit offsets, and a {kind} here spans more than 2^31 elements"


def load_mamba_ssm() -> Implementation:
    """The library's five kernels: `mamba_chunk_scan_combined` without the autograd function around
    it.  Raises ImportError without the library.
    """
    module: Any = import_module(_MAMBA)
    forward = module._mamba_chunk_scan_combined_fwd
    # of the modules with kernels, those that the function's module has imported
    tunings = Tunings(import_module(name) for name in sys.modules.keys() & _MAMBA_KERNELS)

    def call(inputs: SSDInputs, precision: Precision) -> SSDOutput:
        # tune only twice, for short and for long calls: each time, five kernels try dozens of
        # configurations
        tunings.use_for(inputs.x.shape[0] * inputs.x.shape[1] <= SHORT)
        arguments = _options(inputs) | {"D": inputs.D, "z": inputs.z}
        # C's dtype is the default, and the only one in older versions, which lack the argument
        if precision.state_dtype != inputs.C.dtype:
            arguments["state_dtype"] = precision.state_dtype
        with torch.cuda.device(inputs.x.get_device()):
            out, *_, final_states = forward(*_positional(inputs), inputs.chunk_size, **arguments)
        return SSDOutput(out, final_states)

    def plan(inputs: SSDInputs, _precision: Precision) -> Plan:
        return Plan(
            variant="mamba_ssm",
            launches=5,
            config={"chunk_size": inputs.chunk_size},
            reason="it tunes itself in each process",
        )

    @first_reason
    def unsupported(inputs: SSDInputs, precision: Precision) -> Reasons:
        """Calls that the library would compute at another precision, or wrongly."""
        fp32 = inputs.x.dtype == torch.float32
        reason = "fp32 inputs are multiplied in tf32, which is relaxed intermediates only"
        yield fp32 and precision.exact, reason
        yield not fp32 and not precision.exact, "exact intermediates only"
        reason = f"this version passes states on in {inputs.C.dtype} only"
        yield precision.state_dtype != inputs.C.dtype and not _takes_state_dtype(forward), reason
        yield inputs.cu_seqlens is not None, "no initial and final states of each packed sequence"
        yield uneven_chunks(inputs)  # NaN: https://github.com/state-spaces/mamba/issues/449
        batch, seqlen, nheads, headdim = inputs.x.shape
        dstate = inputs.B.shape[3]
        states = batch * -(-seqlen // inputs.chunk_size) * nheads * headdim * dstate
        yield _spans_far([states, *map(span, _of_positions(inputs))], "tensor")

    return library_kernel("ssd", "mamba_ssm", unsupported, call, plan)


def uneven_chunks(inputs: SSDInputs) -> tuple[bool, str]:
    """Whether a library that needs a power of two as chunk_size must refuse a call, and why."""
    uneven = inputs.chunk_size.bit_count() > 1
    return uneven, f"chunk_size must be a power of two, not {inputs.chunk_size}"


def mamba_ssm_version() -> str:
    """The library's version; if it has none, the name of the function's file with a hash of the
    content.
    """
    version = getattr(import_module("mamba_ssm"), "__version__", None)
    return str(version or content(Path(str(import_module(_MAMBA).__file__))))


def mamba_ssm_passes_any_states() -> bool:
    """Whether the installed version can pass states in a dtype other than that of C; older versions
    cannot.
    """
    return _takes_state_dtype(import_module(_MAMBA)._mamba_chunk_scan_combined_fwd)


def _takes_state_dtype(forward: Callable[..., Any]) -> bool:
    return "state_dtype" in signature(forward).parameters


def load_model() -> Implementation:
    """transformers' torch function, which is not a kernel."""
    function = model_function("mamba2", "mamba2_chunk_scan", "")

    def call(inputs: SSDInputs, _precision: Precision) -> SSDOutput:
        with torch.cuda.device(inputs.x.get_device()), torch.no_grad():
            arguments = _options(inputs) | {"D": inputs.D, "return_final_states": True}
            out, final_states = function(*_positional(inputs), inputs.chunk_size, **arguments)
        return SSDOutput(out.to(inputs.x.dtype), final_states)

    @first_reason
    def unsupported(inputs: SSDInputs, precision: Precision) -> Reasons:
        yield precision != Precision(), "exact intermediates and fp32 states only"
        yield inputs.cu_seqlens is not None, "no packed sequences"
        yield inputs.z is not None, "no z: models gate after it"
        yield inputs.D is not None and inputs.D.ndim == 2, "D of heads, not of channels"

    plan = Plan(variant="torch", launches=0, reason="as transformers calls it")
    return library_kernel("ssd", "model", unsupported, call, plan)


def load_published(checkout: Path) -> Implementation:
    """The published single-launch kernel.  Raises ImportError also if a file of it is not in the
    checkout.
    """
    softplus = _module(checkout / _FOLDER / f"{_SOFTPLUS}.py")
    # the kernel's file imports this module by the name of the installed library
    with _found_as(f"{'.'.join(_FOLDER.parts)}.{_SOFTPLUS}", softplus):
        kernel: Any = _module(checkout / _FOLDER / f"{_KERNEL}.py")
    tunings = Tunings([kernel])
    # the argument with the kernel's flags: a tuner calls the kernel many times, and with flags that
    # are not zeroed, all calls but the first would skip two stages
    tunings.zero_before_each_try("sync_atomic")
    launch = kernel._fused5_ssd

    def call(inputs: SSDInputs, precision: Precision) -> SSDOutput:
        tunings.use_for((inputs.x.shape, inputs.B.shape))
        with torch.cuda.device(inputs.x.get_device()):
            arguments = _options(inputs) | _switches(precision) | {"z": inputs.z}
            out, _, _, final_states, _, _ = launch(
                *_positional(inputs), inputs.D, chunk_size=inputs.chunk_size, **arguments
            )
        return SSDOutput(out, final_states)

    def plan(inputs: SSDInputs, precision: Precision) -> Plan:
        setting = "high" if precision.exact else "medium"
        # as published, "high" has fp32 states and "medium" fp16 states
        is_published = precision.exact == (precision.state_dtype == torch.float32)
        states = "" if is_published else " with the states of the other one"
        return Plan(
            variant=setting,
            launches=4,
            config={"chunk_size": inputs.chunk_size},
            reason=f"its {setting!r} setting{states}; also launched: flags and first state "
            "zeroed, last state copied",
        )

    return library_kernel("ssd", "published", _published_unsupported, call, plan)


def published_version(checkout: Path) -> str:
    """The kernel's file name with a hash, because a checkout has no version."""
    return content(checkout / _FOLDER / f"{_KERNEL}.py")


def _module(file: Path) -> ModuleType:
    """Load a file of the published kernel as a module.  Raises ImportError if there is none."""
    spec = spec_from_file_location(f"ssdprof_published_{file.stem}", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ImportError(f"there is no {'/'.join(_FOLDER.parts)}/{file.name}")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def _found_as(name: str, module: ModuleType) -> Iterator[None]:
    """Let `import name` find `module` in the context.  Afterwards, restore the module that had the
    name before.
    """
    replaced = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        if replaced is None:
            del sys.modules[name]
        else:
            sys.modules[name] = replaced


@first_reason
def _published_unsupported(inputs: SSDInputs, precision: Precision) -> Reasons:
    """The calls that the published kernel does not support."""
    yield precision.state_dtype not in (torch.float32, torch.float16), "fp32 and fp16 states only"
    # except with exact intermediates and fp32 states, the kernel sums in 16 bit, for which Triton
    # needs fp16
    sums_in_16_bit = precision != Precision()
    reason = "relaxed intermediates and fp16 states go with fp16 inputs"
    yield sums_in_16_bit and inputs.x.dtype != torch.float16, reason
    yield inputs.cu_seqlens is not None, "no packed sequences"
    yield uneven_chunks(inputs)
    seqlen, nheads, headdim = inputs.x.shape[1:]
    dstate = inputs.B.shape[3]
    states = (-(-seqlen // inputs.chunk_size) + 1) * nheads * headdim * dstate
    yield _spans_far([states, *(span(tensor[0]) for tensor in _of_positions(inputs))], "sequence")


def _switches(precision: Precision) -> dict[str, bool]:
    """The published kernel's switches for a precision.  cb_comp_fp32 is on in both settings: C B^T
    is then computed in tf32.
    """
    states = {"states_in_fp32": precision.state_dtype == torch.float32, "cb_comp_fp32": True}
    return states | dict.fromkeys(_INTERMEDIATES, precision.exact)
