"""GDN in six launches, one kernel per file.

six_launches.py   the implementation: `gdn_unfused`
gate_cumsum.py -> scaled_dot_kkt.py -> solve_tril.py -> recompute_w_u.py -> chunk_state.py -> chunk_output.py
qk_l2norm.py      before the others, if the call normalises q and k
precisions.py     the dtype of every product
configs.py        block sizes and warps of every kernel
"""
