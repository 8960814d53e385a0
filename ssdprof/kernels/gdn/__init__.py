"""Gated DeltaNet: inputs and oracle."""

from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput

__all__ = ["GDNInputs", "GDNOutput"]
