"""The kernel of FlashInfer, as installed: https://github.com/flashinfer-ai/flashinfer.

Its operator differs from ours in four ways: it takes the decay instead of its logarithm, not every version can
normalise q and k, beta is fp32, and its states have V before K.  The first call prepares the library's arguments and
keeps them as long as the inputs live, so that the library's time does not include the preparation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import Any

import torch

from ssdprof.kernels.gdn.adapters.refusals import refuse_unlike_128
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan

EPS = 1e-6  # added to squared norms, as in `GDNInputs`


def load() -> Implementation:
    """Raises ImportError if the library or one of its dependencies is missing."""
    flashinfer = _FlashInfer(import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule)
    return Implementation(operator="gdn", name="flashinfer", run=flashinfer.run, plan=flashinfer.plan)


class _FlashInfer:
    """function: of the library.  If it can choose among libraries, this class requests the library's own kernel."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._options = {"backend": "flashinfer"} if "backend" in signature(function).parameters else {}
        self._inputs: Callable[[], GDNInputs | None] = lambda: None
        self._prepared: dict[str, torch.Tensor | None] = {}

    def run(self, inputs: GDNInputs, precision: Precision) -> GDNOutput:
        refuse_unlike_128("flashinfer", inputs, precision)
        if self._inputs() is not inputs:
            self._prepared = _prepared(inputs)
            self._inputs = weakref.ref(inputs, self._forget)
        with torch.cuda.device(inputs.q.get_device()), torch.no_grad():
            out, final_states = self._function(
                **self._prepared, scale=inputs.scale_or_default, output_final_state=True,
                use_qk_l2norm_in_kernel=False, **self._options,
            )  # fmt: skip
        return GDNOutput(out.view(inputs.v.shape), final_states.mT)

    def plan(self, inputs: GDNInputs, precision: Precision) -> Plan:
        refuse_unlike_128("flashinfer", inputs, precision)
        return Plan(
            variant="cute",
            launches=1,
            reason="normalised q and k, the decays, beta in fp32 and V-first states are prepared outside of its time",
        )

    def _forget(self, _gone: object) -> None:
        self._prepared = {}


def _prepared(inputs: GDNInputs) -> dict[str, torch.Tensor | None]:
    """The library's arguments: one row of tokens, contiguous."""
    q, k = inputs.q, inputs.k
    if inputs.use_qk_l2norm:
        q, k = _normalised(q), _normalised(k)
    cu_seqlens = inputs.cu_seqlens
    if cu_seqlens is None:
        cu_seqlens = torch.arange(inputs.sequences + 1, device=q.device) * inputs.length
    states = inputs.initial_state
    return {
        "q": q.flatten(0, 1).contiguous(),
        "k": k.flatten(0, 1).contiguous(),
        "v": inputs.v.flatten(0, 1).contiguous(),
        "g": inputs.g.float().clamp(max=0).exp().flatten(0, 1).contiguous(),
        "beta": inputs.beta.float().flatten(0, 1).contiguous(),
        "initial_state": None if states is None else states.float().mT.contiguous(),
        "cu_seqlens": cu_seqlens.long(),
    }


def _normalised(x: torch.Tensor) -> torch.Tensor:
    """x divided by the root of its sum of squares, in the dtype of x."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)).to(x.dtype)
