"""SSD in five launches, one kernel per file.

five_launches.py   the implementation: `ssd_unfused`
chunk_cumsum.py -> chunk_state.py -> state_passing.py -> bmm_chunk.py -> chunk_scan.py
"""
