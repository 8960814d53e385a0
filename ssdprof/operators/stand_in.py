"""What computes an operator in a model on a GPU while its inputs are taken: our kernels.

transformers' own operators need a matrix per chunk and head, for one layer of a large model at 128K tokens 30 to more
than 100 GiB.
"""

from __future__ import annotations

from typing import Any

import torch

from ssdprof import kernels
from ssdprof.errors import BadInputError
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import UnsupportedError
from ssdprof.operators.operator import Output

_PREFERRED = ("fused", "unfused")


def run_kernels(operator: str, inputs: Any, device: torch.device) -> Output:
    """The first of our implementations that takes `inputs`, with exact intermediates and fp32 states.

    Raises BadInputError with what each refuses.
    """
    refusals = []
    with torch.cuda.device(device):
        for name in _PREFERRED:
            if name not in kernels.names(operator):
                refusals.append(f"{name}: there is none")
                continue
            try:
                out, final_states = kernels.get(operator, name).run(inputs, Precision())
            except UnsupportedError as error:
                refusals.append(f"{name}: {error}")
            else:
                return out, final_states
    raise BadInputError(f"No {operator.upper()} implementation runs this model's layers ({'; '.join(refusals)}).")
