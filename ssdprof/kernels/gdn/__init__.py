"""Gated DeltaNet: inputs, oracle, kernels, and adapters of other libraries' kernels."""
