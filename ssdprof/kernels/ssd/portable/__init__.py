"""The fused kernel in plain Triton: for GPUs from sm_80 on, and for the interpreter.

config.py            tiles, warps and segments of a call
portable_kernel.py   the kernel and its launch
stages.py            its stages, one function each
"""
