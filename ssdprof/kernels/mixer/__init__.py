"""Kernels of a mixer around its operator: `causal_conv1d` before it, `gated_rms_norm` after it."""
