"""Checkpoints: finds a model by its id, folder or name, fetches its files, finds its layers with an
operator, and loads it.
"""

from ssdprof.operators.fla import keep_alone
from ssdprof.operators.late import lazy

# imported at the first use: the imports take seconds, and stored captures need neither
accelerate = lazy("accelerate")
transformers = lazy("transformers", prepare=keep_alone)
