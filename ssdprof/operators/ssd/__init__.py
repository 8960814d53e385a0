"""SSD, the state-space duality of Mamba-2."""

from ssdprof.operators.outline import Outline
from ssdprof.operators.ssd.stages import STAGES

OUTLINE = Outline(
    name="ssd",
    title="SSD (Mamba-2)",
    layers="Mamba-2",
    mixer_sizes={
        "nheads": "num_heads",
        "headdim": "head_dim",
        "dstate": "ssm_state_size",
        "ngroups": "n_groups",
        "chunk_size": "chunk_size",
    },
    words="{nheads}x{headdim}, N {dstate}, G {ngroups}, chunk {chunk_size}",
    largest={"dstate": 256},
    stages=STAGES,
)
