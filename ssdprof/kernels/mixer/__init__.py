"""What a mixer computes around its operator: `causal_conv1d` before it, `gated_rms_norm` after it."""
