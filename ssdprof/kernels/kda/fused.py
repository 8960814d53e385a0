"""Kimi Delta Attention in few launches: the choice between kernels."""

from __future__ import annotations

from math import prod

from ssdprof.kernels.choice import Fused, FusedCall, Variant
from ssdprof.kernels.device import sm_count
from ssdprof.kernels.gdn.fused import RECURRENT, _equals
from ssdprof.kernels.kda.inputs import GDNOutput
from ssdprof.kernels.kda.portable import KDAPortableConfig, KDAPortableLaunch, handed_on
from ssdprof.kernels.registry import Implementation, register

_H200_SMS = 132  # the interpreter divides calls as an H200 does


def portable_config(call: FusedCall) -> KDAPortableConfig:
    """The configuration of the portable kernel."""
    count = sm_count(call.inputs.q) if call.inputs.q.is_cuda else _H200_SMS
    return KDAPortableConfig.choose(call.inputs, count, batch_invariant=call.batch_invariant)


def _portable_work(call: FusedCall, config: KDAPortableConfig) -> tuple[int, int, str]:
    handed = handed_on(call.inputs, call.precision, config)
    reason = f"two launches: factors of all chunks, then the states; {config.reason}{_equals(call)}"
    return 2, sum(prod(shape) * dtype.itemsize for shape, dtype in handed), reason


PORTABLE: Variant[GDNOutput] = Variant(
    name="portable",
    configure=portable_config,
    prepare=lambda call, config: KDAPortableLaunch(
        call.inputs, call.precision, config, state_v_first=call.state_v_first
    ),
    work=_portable_work,
)
FUSED: Fused[GDNOutput] = Fused("fused", (RECURRENT, PORTABLE))
run, plan = FUSED.run, FUSED.plan
register(Implementation(operator="kda", name="fused", run=run, plan=plan))
