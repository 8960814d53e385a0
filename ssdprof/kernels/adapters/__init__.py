"""Shared code of the adapters for kernels of other libraries, for all operators."""
