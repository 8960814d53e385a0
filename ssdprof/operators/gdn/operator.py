"""The record of the gated delta rule."""

from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.operators.gdn import OUTLINE
from ssdprof.operators.gdn.cost import COST
from ssdprof.operators.gdn.door import DOOR
from ssdprof.operators.gdn.drawing import DRAWING
from ssdprof.operators.gdn.judgement import JUDGEMENT
from ssdprof.operators.gdn.sharding import SHARDING
from ssdprof.operators.gdn.tuning import TUNING
from ssdprof.operators.operator import Operator

OPERATOR = Operator(
    outline=OUTLINE,
    inputs=GDNInputs,
    door=DOOR,
    cost=COST,
    judgement=JUDGEMENT,
    bench=DRAWING,
    tuning=TUNING,
    sharding=SHARDING,
)
