"""The stages of GDN, in the order of the algorithm."""

from ssdprof.operators.outline import Stages

STAGES = Stages(
    order=(
        "setup",
        "setup.load",
        "setup.store",
        "qk_l2norm",
        "gate_cumsum",
        "scaled_dot_kkt",
        "solve_tril",
        "recompute_w_u",
        "state_factor",
        "out_factor",
        "rows",
        "warm_up",
        "chunk_state",
        "chunk_state.residual",
        "chunk_state.update",
        "chunk_output",
        "recurrence",
    ),
    words={
        "setup.load": "loading the initial state",
        "setup.store": "storing the final state",
        "chunk_state.residual": "residual",
        "chunk_state.update": "update of the state",
    },
    kernels={
        "_gdn_qk_l2norm_kernel": "unfused",
        "_gdn_gate_cumsum_kernel": "unfused",
        "_gdn_scaled_dot_kkt_kernel": "unfused",
        "_gdn_solve_tril_kernel": "unfused",
        "_gdn_recompute_w_u_kernel": "unfused",
        "_gdn_chunk_state_kernel": "unfused",
        "_gdn_chunk_output_kernel": "unfused",
        "_gdn_factors_kernel": "fused",
        "_gdn_scan_kernel": "fused",
        "_gdn_recurrent_kernel": "recurrent",
    },
)
