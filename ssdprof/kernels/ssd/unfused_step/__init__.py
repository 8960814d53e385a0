"""A decode step of SSD in two launches, one kernel per file: the baseline of `recurrent`.

two_launches.py   the implementation `unfused_step`
step_state.py -> step_output.py
"""
