"""Code shared by the adapters of other libraries' kernels, for all operators."""
