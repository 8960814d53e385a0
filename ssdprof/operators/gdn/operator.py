"""The record of the gated delta rule: as much of it as there is."""

from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.operators.gdn import OUTLINE
from ssdprof.operators.gdn.door import DOOR
from ssdprof.operators.operator import Operator

OPERATOR = Operator(outline=OUTLINE, inputs=GDNInputs, door=DOOR)
