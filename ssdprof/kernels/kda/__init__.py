"""Kimi Delta Attention: inputs, oracle and kernels."""
