"""What the adapters of other libraries' kernels share, whatever the operator."""
