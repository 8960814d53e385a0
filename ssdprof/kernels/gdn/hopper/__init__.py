"""Gated DeltaNet for Hopper, in Gluon.

`prep_kernel.py` inverts each chunk's triangular system.  `hopper_kernel.py` computes the rest, with
warp roles and the state in registers.
"""
