"""The gated delta rule of Gated DeltaNet."""

from ssdprof.operators.gdn.stages import STAGES
from ssdprof.operators.outline import Outline

OUTLINE = Outline(
    name="gdn", title="GDN", layers="Gated-DeltaNet", largest={"key_dim": 256, "value_dim": 256}, stages=STAGES
)
