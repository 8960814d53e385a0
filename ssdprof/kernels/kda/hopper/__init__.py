"""Kernels for Hopper GPUs, of one launch each.

launch.py          the launches, which of them is faster, slabs and workspace

Chunks of 64 are prepared, and scanned a slab later:

hopper_kernel.py   programs, their order, and what they wait for
prep.py            the parts of a chunk that do not depend on the state
scan.py            the state from chunk to chunk, and the outputs
tiles.py           shared memory of a scan, and its copies through TMA

A program for each sequence and head, in chunks of 32:

whole_kernel.py    the program, and copies through TMA
rings.py           shared memory, and what the roles pass to each other
decays.py          decays, operands of the scores, keys and queries
scores.py          norms, scores, their inverse, X and W
states.py          the state from chunk to chunk, and the outputs
"""
