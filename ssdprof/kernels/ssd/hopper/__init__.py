"""The fused kernel for Hopper: warp roles, TMA copies, states in registers.

config.py          what the kernel supports; rings and registers
segments.py        the cut of sequences into segments, by a simulated schedule
launch.py          arguments, buffers and number of programs of a call
hopper_kernel.py   the kernel: it assigns work to a program and roles to its warps
assignment.py      the positions and heads that a program owns
rings.py           shared memory and barriers of all roles
role_*.py          one role per file: gates, loads, scores, stores, states
first_pass.py      the state that a segment adds; part of the role with the states
look_back.py       how a segment publishes its state, and how later segments sum them
lanes.py           two heads in one role of eight warps
halves.py          two halves of N in one role, for N = 256
weights.py         weights of positions as pairs of 16-bit numbers
"""
