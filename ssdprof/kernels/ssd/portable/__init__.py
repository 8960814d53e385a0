"""The fused kernel in plain Triton: for GPUs from sm_80 on, and for the interpreter.

config.py            tiles, warps and segments of a call
launch.py            arguments, buffers and number of programs of a call
portable_kernel.py   the kernel
segments.py          assignment of segments to programs
stages.py            the stages inside a segment, one function each
states.py            states in memory, and their hand-over from one segment to the next
"""
