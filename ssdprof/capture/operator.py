"""The operator that the model runs on while its inputs are taken: ours, never transformers' torch fallback.

The fallback holds a matrix per chunk and head: more than 100 GiB for one layer of a large model at 128K tokens.
"""

from __future__ import annotations

import torch

from ssdprof import kernels
from ssdprof.capture.captured import OperatorInputs
from ssdprof.capture.intercept import Result
from ssdprof.errors import BadInputError
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.gdn.reference import gdn_chunked
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import UnsupportedError
from ssdprof.kernels.ssd.inputs import SSDInputs

_PREFERRED_ON_GPU = ("fused", "unfused")


def run_operator(inputs: OperatorInputs) -> Result:
    """Output, in the dtype of the inputs as production kernels give it, and final state in fp32."""
    if isinstance(inputs, GDNInputs):
        out, final_states = gdn_chunked(inputs, dtype=torch.float32)
        return out.to(inputs.v.dtype), final_states
    if inputs.x.device.type == "cuda":
        return _run_on_gpu(inputs)
    from ssdprof.kernels.ssd.reference import ssd_chunked

    out, final_states = ssd_chunked(inputs, dtype=torch.float32)
    return out.to(inputs.x.dtype), final_states


def _run_on_gpu(inputs: SSDInputs) -> Result:
    """The first of our implementations that takes these inputs, with exact intermediates and fp32 states."""
    refusals = []
    with torch.cuda.device(inputs.x.device):
        for name in _PREFERRED_ON_GPU:
            try:
                out, final_states = kernels.get("ssd", name).run(inputs, Precision())
            except UnsupportedError as error:
                refusals.append(f"{name}: {error}")
            else:
                return out, final_states
    raise BadInputError(f"No SSD implementation runs this model's layers ({'; '.join(refusals)}).")
