"""Gated DeltaNet for Hopper, in Gluon.

`prep_kernel.py` inverts each chunk's triangular system.  `hopper_kernel.py` computes the outputs
and the final states, with warp roles and the state in registers.  For heads that forget slowly,
`parts.py` computes the states that enter segments before that.
"""
