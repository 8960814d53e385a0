"""Gated DeltaNet: inputs, oracle and kernels."""

from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput

__all__ = ["GDNInputs", "GDNOutput"]
