"""The stages of GDN, in the order of the algorithm."""

from ssdprof.operators.outline import Stages

STAGES = Stages(
    order=(
        "setup",
        "qk_l2norm",
        "gate_cumsum",
        "scaled_dot_kkt",
        "solve_tril",
        "recompute_w_u",
        "chunk_state",
        "chunk_output",
    ),
    kernels={
        "_gdn_qk_l2norm_kernel": "unfused",
        "_gdn_gate_cumsum_kernel": "unfused",
        "_gdn_scaled_dot_kkt_kernel": "unfused",
        "_gdn_solve_tril_kernel": "unfused",
        "_gdn_recompute_w_u_kernel": "unfused",
        "_gdn_chunk_state_kernel": "unfused",
        "_gdn_chunk_output_kernel": "unfused",
    },
)
