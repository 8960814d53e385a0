"""A decode step of the gated delta rule in three launches, one kernel a file: the baseline of `recurrent`.

three_launches.py   the implementation `unfused_step`
step_write.py -> step_state.py -> step_output.py; where a call asks for it, `../unfused/qk_l2norm.py` before them
"""
