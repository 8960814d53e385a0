"""The TileLang kernels of FlashQLA, as installed: https://github.com/QwenLM/FlashQLA.

Where it cuts a long sequence, it drops the contribution of a state after a decay below exp(-10).  The comparison with
the oracle shows the effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from ssdprof.kernels.gdn.adapters.refusals import refuse_unlike_128
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan


def load() -> Implementation:
    """Raises ImportError if the library or one of its dependencies is missing."""
    flash_qla = _FlashQLA(import_module("flash_qla").chunk_gated_delta_rule)
    return Implementation(operator="gdn", name="flash_qla", run=flash_qla.run, plan=flash_qla.plan)


@dataclass(frozen=True)
class _FlashQLA:
    function: Callable[..., Any]

    def run(self, inputs: GDNInputs, precision: Precision) -> GDNOutput:
        refuse_unlike_128("flash_qla", inputs, precision)
        with torch.cuda.device(inputs.q.get_device()), torch.no_grad():
            out, final_states = self.function(
                q=inputs.q, k=inputs.k, v=inputs.v, g=inputs.g, beta=inputs.beta, scale=inputs.scale_or_default,
                initial_state=inputs.initial_state, output_final_state=True,
                use_qk_l2norm_in_kernel=inputs.use_qk_l2norm, cu_seqlens=inputs.cu_seqlens,
            )  # fmt: skip
        return GDNOutput(out, final_states)

    def plan(self, inputs: GDNInputs, precision: Precision) -> Plan:
        refuse_unlike_128("flash_qla", inputs, precision)
        return Plan(variant="tilelang", launches=3, config={"chunk_size": 64}, reason="it cuts sequences by itself")
