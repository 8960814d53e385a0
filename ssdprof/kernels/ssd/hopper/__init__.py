"""The fused kernel for Hopper: warp roles, the copy engine, states in registers.

config.py          what the kernel supports; rings and registers
segments.py        how sequences are cut into segments: a simulated schedule
launch.py          arguments, buffers and number of programs of a call
hopper_kernel.py   the kernel: it assigns work to a program and roles to its warps
assignment.py      which positions of which heads a program works on
rings.py           shared memory and barriers: what the roles share
role_*.py          one role a file: gates, loads, scores, stores, states
first_pass.py      what a segment adds to a state; part of the role with the states
look_back.py       what a segment leaves for later ones, and how they sum it
lanes.py           two heads in one role of eight warps
halves.py          two halves of N in one role, for N = 256
weights.py         weights of positions as pairs of 16-bit numbers
"""
