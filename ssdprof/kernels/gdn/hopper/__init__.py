"""Gated DeltaNet for Hopper, in Gluon.

`prep_kernel.py` inverts each chunk's triangular system.  `hopper_kernel.py` computes the outputs
and the final states, with warp roles and the state in registers.  Between the two, `parts.py`
computes the states that enter segments of heads that forget slowly.  `slices.py` runs these kernels
for K and V that are not both 128.
"""
