"""Forms of `fused` that a bench times only when they are named: a kernel that `fused` would not choose."""

from __future__ import annotations

from dataclasses import replace

from ssdprof.kernels.device import refuse_device, refuse_gradient
from ssdprof.kernels.gdn.fused import PORTABLE, Launch, Variant, VariantCall
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.launch import LaunchCache
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, UnsupportedError, register, when_overridden


class _Forced:
    """`fused` with a fixed kernel."""

    def __init__(self, variant: Variant) -> None:
        self._variant = variant
        self._name = f"fused_{variant.name}"
        self._launches: LaunchCache[Launch] = LaunchCache()
        when_overridden(self._launches.forget)

    @property
    def implementation(self) -> Implementation:
        return Implementation(operator="gdn", name=self._name, run=self.run, plan=self.plan)

    def run(self, inputs: GDNInputs, precision: Precision) -> GDNOutput:
        refuse_gradient(self._name, (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.initial_state))
        signature = (inputs.signature, precision.intermediates, precision.state_dtype)
        return self._launches.get(signature, lambda: self._prepare(inputs, precision))(inputs)

    def plan(self, inputs: GDNInputs, precision: Precision) -> Plan:
        self._refuse_unsupported(inputs)
        found = self._variant.plan(VariantCall(inputs=inputs, precision=precision))
        return replace(found, reason=f"requested; {found.reason}")

    def _prepare(self, inputs: GDNInputs, precision: Precision) -> Launch:
        inputs.check()
        self._refuse_unsupported(inputs)
        return self._variant.prepare(VariantCall(inputs=inputs, precision=precision))

    def _refuse_unsupported(self, inputs: GDNInputs) -> None:
        refuse_device(self._name, inputs.q)
        if why := self._variant.unsupported(inputs):
            raise UnsupportedError(f"{self._name}: {why}")


register(_Forced(PORTABLE).implementation)
