"""The SSD (Mamba-2) operator: inputs, oracle and kernels."""
