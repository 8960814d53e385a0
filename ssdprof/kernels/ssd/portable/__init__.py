"""The fused kernel in plain Triton: for GPUs from sm_80 on, and for the interpreter.

config.py            tiles, warps and segments of a call
launch.py            arguments, buffers and number of programs of a call
portable_kernel.py   the kernel
segments.py          which segment of which sequence a program works on
stages.py            the stages inside a segment, one function each
states.py            states in memory, and how a segment hands one over to the next
"""
