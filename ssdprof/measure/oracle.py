"""The fp64 oracle as an implementation, rounded once."""

from __future__ import annotations

from typing import Any

import torch

from ssdprof import operators
from ssdprof.measure.accuracy import block_length
from ssdprof.operators import tensors
from ssdprof.operators.operator import Output


def oracle_output(inputs: Any) -> Output:
    """The oracle's out, in the dtype of the operator's output, and final states in fp32, computed in blocks."""
    judgement, device = operators.of(inputs).judged, tensors.device(inputs)
    out, final_states = (torch.empty(form.shape, dtype=form.dtype, device=device) for form in judgement.forms(inputs))
    for block in judgement.blocks(inputs, block_length(judgement, inputs, device)):
        out[block.batch, block.start : block.stop] = block.out
        if block.last:
            final_states[block.sequence] = block.state
    return out, final_states
