"""One launch for Hopper GPUs: chunks are prepared, and scanned a slab later.

hopper_kernel.py   programs, their order, and what they wait for
prep.py            the parts of a chunk that do not depend on the state
scan.py            the state from chunk to chunk, and the outputs
role_copies.py     copies through TMA
tiles.py           shared memory of a scan
launch.py          the launch, its slabs and workspace
"""
