"""The fused kernel for Hopper: warp roles, TMA copies, states in registers.

config.py          what the kernel supports; rings, registers and the model of the time of a cut
                   into segments
launch.py          arguments, buffers and number of programs of a call
hopper_kernel.py   the kernel: it assigns positions and heads to a program and roles to its warps
rings.py           shared memory and barriers of all roles
role_*.py          the roles: gates and scores, copies (loads and stores), states
lanes.py           two heads, or two halves of N = 256, in one role of eight warps; weights of
                   positions
"""
