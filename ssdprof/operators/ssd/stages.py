"""The stages of SSD, in the order of the algorithm, and the names of their parts."""

from pathlib import Path

from ssdprof.operators.known_sources import known_sources
from ssdprof.operators.outline import Stages

STAGES = Stages(
    order=(
        "setup",
        "setup.load",
        "setup.store",
        "ticket",
        "loads",
        "chunk_cumsum",
        "bmm_chunk",
        "waiting",
        "waiting.chunk",
        "waiting.scores",
        "waiting.half",  # of kernels until November 2026
        "waiting.gates",
        "chunk_state",
        "chunk_state.first_pass",
        "state_passing",
        "state_passing.wait",
        "state_passing.load",
        "state_passing.store",
        "chunk_scan",
        "chunk_scan.previous",
        "chunk_scan.current",
        "chunk_scan.residual",
        "recurrence",
        "step_state",
        "step_output",
        "ahead",
    ),
    words={
        "setup.load": "loading the initial state",
        "setup.store": "storing the final state",
        "waiting.chunk": "for a chunk and its gates",
        "waiting.scores": "for the scores",
        "waiting.half": "for the other half of N",
        "waiting.gates": "for the gates",
        "chunk_state.first_pass": "first pass",
        "state_passing.wait": "waiting for the segment before",
        "state_passing.load": "loading the state",
        "state_passing.store": "storing the state",
        "chunk_scan.previous": "previous state",
        "chunk_scan.current": "current chunk",
        "chunk_scan.residual": "residual and store",
        "ahead": "roles that are ahead",
    },
    ahead=frozenset({"ahead"}),
    kernels={
        "_fused_hopper_kernel": "fused",
        "_fused_kernel": "fused",
        "_chunk_table_kernel": "unfused",
        "_chunk_cumsum_kernel": "unfused",
        "_chunk_state_kernel": "unfused",
        "_state_passing_kernel": "unfused",
        "_bmm_chunk_kernel": "unfused",
        "_chunk_scan_kernel": "unfused",
        "_ssd_recurrent_kernel": "recurrent",
        "_ssd_step_state_kernel": "unfused_step",
        "_ssd_step_output_kernel": "unfused_step",
    },
    sources=known_sources(Path(__file__).with_name("known_sources.toml")),
)
