"""The machine of a measurement: its hardware, versions, clocks and memory, missing requirements,
and child processes.
"""
