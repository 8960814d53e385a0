"""Computes an operator with our kernels while a model runs on a GPU and its inputs are captured.

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
    """Run the first of our implementations that supports `inputs`, with exact intermediates and fp32 states.

    Raises BadInputError with the reason of each refusal.
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
