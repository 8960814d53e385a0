"""SSD, the state-space duality of Mamba-2."""

from ssdprof.operators.outline import Outline
from ssdprof.operators.ssd.stages import STAGES

OUTLINE = Outline(name="ssd", title="SSD (Mamba-2)", layers="Mamba-2", largest={"dstate": 256}, stages=STAGES)
