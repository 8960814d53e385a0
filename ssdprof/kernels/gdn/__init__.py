"""Gated DeltaNet: inputs, oracle and kernels."""
