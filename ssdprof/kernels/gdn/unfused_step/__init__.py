"""A decode step of the gated delta rule in three launches, one kernel per file: the baseline of `recurrent`.

three_launches.py   the implementation `unfused_step`
step_write.py -> step_state.py -> step_output.py; before them `../unfused/qk_l2norm.py`, if the call normalises q and k
"""
