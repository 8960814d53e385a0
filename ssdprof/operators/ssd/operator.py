"""The record of SSD."""

from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.operators.operator import Operator
from ssdprof.operators.ssd import OUTLINE
from ssdprof.operators.ssd.cost import COST
from ssdprof.operators.ssd.door import DOOR
from ssdprof.operators.ssd.drawing import DRAWING
from ssdprof.operators.ssd.judgement import JUDGEMENT
from ssdprof.operators.ssd.sharding import SHARDING
from ssdprof.operators.ssd.tuning import TUNING

OPERATOR = Operator(
    outline=OUTLINE,
    inputs=SSDInputs,
    door=DOOR,
    cost=COST,
    judgement=JUDGEMENT,
    bench=DRAWING,
    tuning=TUNING,
    sharding=SHARDING,
)
