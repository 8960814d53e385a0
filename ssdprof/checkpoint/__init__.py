"""Checkpoints: from a model id, a folder or a demo to local files, the layers with an operator, and
the model.
"""

from ssdprof.operators.fla import keep_alone
from ssdprof.operators.late import lazy

accelerate = lazy("accelerate")  # stored captures need neither, and their imports take seconds
transformers = lazy("transformers", prepare=keep_alone)
