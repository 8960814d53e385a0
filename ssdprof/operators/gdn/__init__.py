"""The gated delta rule of Gated DeltaNet."""

from ssdprof.operators.gdn.stages import STAGES
from ssdprof.operators.outline import Outline

OUTLINE = Outline(
    name="gdn",
    title="GDN",
    layers="Gated-DeltaNet",
    mixer_sizes={
        "key_heads": "num_k_heads",
        "value_heads": "num_v_heads",
        "key_dim": "head_k_dim",
        "value_dim": "head_v_dim",
    },
    words="{key_heads}/{value_heads} heads, K {key_dim}, V {value_dim}",
    largest={"key_dim": 256, "value_dim": 256},
    stages=STAGES,
)
