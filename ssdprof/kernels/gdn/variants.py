"""The kernels of `gdn_fused`, and the preparation of their launches.

The first entry of `VARIANTS` that supports a call runs it.  A new kernel adds a `Variant`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch

from ssdprof.kernels.device import INTERPRETED, capability, sm_count
from ssdprof.kernels.gdn import tuned
from ssdprof.kernels.gdn.hopper import config as hopper_config
from ssdprof.kernels.gdn.hopper import slices as hopper_slices
from ssdprof.kernels.gdn.hopper.config import HopperConfig
from ssdprof.kernels.gdn.hopper.launch import HopperLaunch, launch_count, workspace_bytes
from ssdprof.kernels.gdn.hopper.slices import SlicedLaunch
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.gdn.portable.config import PortableConfig
from ssdprof.kernels.gdn.portable.launch import PortableLaunch, Workspace
from ssdprof.kernels.gdn.recurrent import RecurrentConfig, RecurrentLaunch
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Plan

_RECURRENT_LENGTH = 16  # sequences of up to this many positions are faster token by token than in a chunk
_H200 = ((9, 0), 132)  # capability and multiprocessors of an H200; the interpreter divides calls as an H200 does

Launch = Callable[[GDNInputs], GDNOutput]


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments for the choice and preparation of a kernel.

    batch_invariant: a sequence's result must not depend on the number of others
    state_v_first: V precedes K in the memory of final states
    """

    inputs: GDNInputs
    precision: Precision
    batch_invariant: bool = False
    state_v_first: bool = False


@dataclass(frozen=True, kw_only=True)
class Variant:
    """unsupported: why the kernel does not support the inputs, or should not run them; "" if it runs
    prepare: makes the launch, without tensors, of a call
    """

    name: str
    unsupported: Callable[[GDNInputs], str]
    prepare: Callable[[Call], Launch]
    plan: Callable[[Call], Plan]


def _equals(call: Call) -> str:
    """The part of a plan's reason that names another precision with the same bits; "" if there is none.

    States stay in fp32, and exact and relaxed intermediates do not differ for 16-bit inputs.
    """
    exact = call.precision.exact or call.inputs.q.dtype != torch.float32
    if (exact, torch.float32) == (call.precision.exact, call.precision.state_dtype):
        return ""
    return f"; the same as {'exact' if exact else 'relaxed'} with fp32 states"


def _recurrent_unsupported(inputs: GDNInputs) -> str:
    """The host does not know packed lengths.  With at most as many tokens as sequences, it assumes a step of each."""
    most = _RECURRENT_LENGTH if inputs.cu_seqlens is None else max(_RECURRENT_LENGTH, inputs.sequences)
    length = inputs.v.shape[1]
    return "" if length <= most else f"more than {most} positions"


def _prepare_recurrent(call: Call) -> Launch:
    config = RecurrentConfig.choose(call.inputs)
    return RecurrentLaunch(call.inputs, config, state_v_first=call.state_v_first)


def _plan_recurrent(call: Call) -> Plan:
    equal = "" if call.precision == Precision() else "; the same as exact with fp32 states"
    return Plan(
        variant="recurrent",
        launches=1,
        config=asdict(RecurrentConfig.choose(call.inputs)),
        reason=f"one launch, token by token: the sequences are short{equal}",
    )


def _hopper_cut(call: Call) -> HopperConfig:
    """The division of the call into programs on a Hopper GPU."""
    return HopperConfig.choose(call.inputs, sm_count(call.inputs.q), batch_invariant=call.batch_invariant)


def _prepare_hopper(call: Call) -> Launch:
    return HopperLaunch(call.inputs, _hopper_cut(call), state_v_first=call.state_v_first)


def _plan_hopper(call: Call) -> Plan:
    config = _hopper_cut(call)
    settings = asdict(config)
    reason = settings.pop("reason")
    slow = "; two more launches for heads that forget slowly" if config.slow_parts else ""
    return Plan(
        variant="hopper",
        launches=launch_count(call.inputs, config),
        config=settings,
        workspace_bytes=workspace_bytes(call.inputs, config),
        reason=f"two launches: inverses of all chunks, then the states{slow}; {reason}{_equals(call)}",
    )


def _sliced(call: Call) -> Call:
    return replace(call, inputs=hopper_slices.by_slice(call.inputs))


def _prepare_slices(call: Call) -> Launch:
    return SlicedLaunch(call.inputs, _hopper_cut(_sliced(call)), state_v_first=call.state_v_first)


def _plan_slices(call: Call) -> Plan:
    of_heads, count = _sliced(call), hopper_slices.slice_count(call.inputs)
    plan = _plan_hopper(of_heads)
    copies = 1 + 2 * (count > 1) + (call.inputs.initial_state is not None)
    return replace(
        plan,
        launches=plan.launches + copies,
        workspace_bytes=hopper_slices.workspace_bytes(call.inputs, _hopper_cut(of_heads)),
        reason=f"{count} x V / {count} padded to 128 as K is, copies of gates and states; {plan.reason}",
    )


def committed_portable(inputs: GDNInputs, *, batch_invariant: bool = False) -> PortableConfig:
    """The configuration of the portable kernel without tuning."""
    gpu = (capability(inputs.q), sm_count(inputs.q)) if inputs.q.is_cuda else _H200
    return PortableConfig.choose(inputs, *gpu, batch_invariant=batch_invariant)


def _portable_config(call: Call) -> PortableConfig:
    found = tuned.portable(call.inputs, call.precision, batch_invariant=call.batch_invariant)
    return found or committed_portable(call.inputs, batch_invariant=call.batch_invariant)


def _prepare_portable(call: Call) -> Launch:
    return PortableLaunch(call.inputs, call.precision, _portable_config(call), state_v_first=call.state_v_first)


def _plan_portable(call: Call) -> Plan:
    config = _portable_config(call)
    settings = asdict(config)
    reason = settings.pop("reason")
    return Plan(
        variant="interpreter" if INTERPRETED else "portable",
        launches=2,
        config=settings,
        workspace_bytes=Workspace.of(call.inputs, call.precision, config).bytes,
        reason=f"two launches: factors of all chunks, then the states; {reason}{_equals(call)}",
    )


RECURRENT = Variant(
    name="recurrent", unsupported=_recurrent_unsupported, prepare=_prepare_recurrent, plan=_plan_recurrent
)
HOPPER = Variant(name="hopper", unsupported=hopper_config.unsupported, prepare=_prepare_hopper, plan=_plan_hopper)
SLICES = Variant(
    name="hopper, slices", unsupported=hopper_slices.unsupported, prepare=_prepare_slices, plan=_plan_slices
)
PORTABLE = Variant(name="portable", unsupported=lambda _inputs: "", prepare=_prepare_portable, plan=_plan_portable)
VARIANTS = (RECURRENT, HOPPER, SLICES, PORTABLE)


def choose(call: Call) -> Variant:
    """The first of `VARIANTS` that supports the call, by the GPU, shapes, strides, alignment and dtypes.

    Packed, batch-invariant calls never run the recurrent kernel, because that choice depends on the length of the whole
    pack.
    """
    whole_pack = call.batch_invariant and call.inputs.cu_seqlens is not None
    variants = [one for one in VARIANTS if not (whole_pack and one.name == "recurrent")]
    return next(variant for variant in variants if not variant.unsupported(call.inputs))
