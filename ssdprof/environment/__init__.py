"""The machine of a measurement: its hardware, versions, clocks and memory, what it lacks, and its
other processes.
"""
