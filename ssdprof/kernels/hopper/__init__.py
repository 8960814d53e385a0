"""Code that the Hopper kernels of the operators share.

ring.py       ring buffers in shared memory, and their mbarriers
schedule.py   the cut of sequences into segments, by a model of the time
"""
