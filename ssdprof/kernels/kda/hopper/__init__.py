"""Two kernels for Hopper GPUs, each of one launch.

launch.py          the launches, which of them is faster, slabs and workspace

The first kernel prepares chunks of 64 positions, and scans them a slab of chunks later:

hopper_kernel.py   the programs, their order, and what they wait for
prep.py            the parts of a chunk that do not depend on the state
scan.py            the state from chunk to chunk, and the outputs
tiles.py           shared memory of a scan, and its copies through TMA

The second kernel has a program for each sequence and head, and chunks of 32 positions:

whole_kernel.py    the program, and copies through TMA
rings.py           shared memory, and what the roles pass to each other
decays.py          decays, operands of the scores, keys and queries
scores.py          norms, scores, their inverse, X and W
states.py          the state from chunk to chunk, and the outputs
"""
