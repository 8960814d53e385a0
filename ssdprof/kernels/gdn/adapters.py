"""GDN kernels of other libraries, as installed.  Each `load_...` imports its library, and raises ImportError if it, or
one of its dependencies, is missing.

fla         the Triton kernels of https://github.com/fla-org/flash-linear-attention.  It passes some calls to other
            installed libraries.  The code that imports it turns this off (`operators/gdn/peers.py`)
flash_qla   the TileLang kernels of https://github.com/QwenLM/FlashQLA.  Where it cuts a long sequence, it drops the
            contribution of a state after a decay below exp(-10).  The comparison with the oracle shows the effect
flashinfer  the kernel of https://github.com/flashinfer-ai/flashinfer.  Its operator differs from ours in four ways: it
            takes the decay instead of its logarithm, not every version can normalise q and k, beta is fp32, and its
            states have V before K.  The first call prepares the library's arguments and keeps them as long as the
            inputs live, so that the library's time does not include the preparation
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

import torch

from ssdprof.kernels.adapters import SHORT, Tunings, library_kernel
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, UnsupportedError

EPS = 1e-6  # added to squared norms, as in `GDNInputs`
HEAD_DIM = 128  # the only K and V of some libraries
MOST_STEPS = 64  # most tokens of a sequence for the token-by-token kernel
FLA = "fla.ops.gated_delta_rule"  # the module to pass to `load_fla` and `load_fla_recurrent`
_FLA_KERNELS = (FLA, "fla.ops.common", "fla.ops.utils", "fla.modules.l2norm")


def _refuse_relaxed(name: str, precision: Precision) -> None:
    """Raises UnsupportedError for relaxed intermediates, for which no library has a setting."""
    if not precision.exact:
        raise UnsupportedError(f"{name}: exact intermediates only")


def _refuse_unlike_128(name: str, inputs: GDNInputs, precision: Precision) -> None:
    """Check for kernels that require exact intermediates, K = V = 128, 16-bit inputs and a state in fp32."""
    _refuse_relaxed(name, precision)
    if precision.state_dtype != torch.float32:
        raise UnsupportedError(f"{name}: states stay in fp32")
    key_dim, value_dim = inputs.q.shape[3], inputs.v.shape[3]
    if (key_dim, value_dim) != (HEAD_DIM, HEAD_DIM):
        raise UnsupportedError(f"{name}: K and V are {HEAD_DIM}, not {key_dim} and {value_dim}")
    if inputs.q.dtype == torch.float32:
        raise UnsupportedError(f"{name}: fp16 and bf16 inputs only")


def load_fla(operator: Any) -> Implementation:
    """The chunked kernels of the library's operator."""
    tunings = Tunings(module for name, module in sorted(sys.modules.items()) if name.startswith(_FLA_KERNELS))

    def call(inputs: GDNInputs, _precision: Precision) -> GDNOutput:
        short = inputs.v.shape[0] * inputs.v.shape[1] <= SHORT
        tunings.use_for((inputs.q.shape[2:], inputs.v.shape[2:], inputs.q.dtype, short))
        return _call(operator.chunk_gated_delta_rule, inputs)

    def plan(inputs: GDNInputs, _precision: Precision) -> Plan:
        return Plan(
            variant="triton",
            launches=5 + 2 * int(inputs.use_qk_l2norm),
            config={"chunk_size": 64},
            reason="it tunes itself; calls to other libraries are turned off",
        )

    def refuse(inputs: GDNInputs, precision: Precision) -> None:
        _refuse_relaxed("fla", precision)
        if precision.state_dtype != inputs.q.dtype:
            raise UnsupportedError(f"fla: states that enter chunks are {inputs.q.dtype}, as q is")

    return library_kernel("gdn", "fla", refuse, call, plan)


def load_fla_recurrent(operator: Any) -> Implementation:
    """The library's token-by-token kernel."""

    def call(inputs: GDNInputs, _precision: Precision) -> GDNOutput:
        return _call(operator.fused_recurrent_gated_delta_rule, inputs)

    def plan(_inputs: GDNInputs, _precision: Precision) -> Plan:
        return Plan(variant="triton", launches=1, reason="one launch, token by token")

    def refuse(inputs: GDNInputs, precision: Precision) -> None:
        _refuse_relaxed("fla_recurrent", precision)
        tokens = inputs.length if inputs.cu_seqlens is None else inputs.length / inputs.sequences
        if tokens > MOST_STEPS:
            raise UnsupportedError(f"fla_recurrent: token by token, for sequences of at most {MOST_STEPS}")

    return library_kernel("gdn", "fla_recurrent", refuse, call, plan)


def fla_version() -> str:
    """The library's own version."""
    return str(getattr(import_module("fla"), "__version__", "unknown"))


def load_flash_qla() -> Implementation:
    function = import_module("flash_qla").chunk_gated_delta_rule

    def call(inputs: GDNInputs, _precision: Precision) -> GDNOutput:
        return _call(function, inputs)

    def plan(_inputs: GDNInputs, _precision: Precision) -> Plan:
        return Plan(variant="tilelang", launches=3, config={"chunk_size": 64}, reason="it cuts sequences by itself")

    return library_kernel("gdn", "flash_qla", partial(_refuse_unlike_128, "flash_qla"), call, plan)


def _call(function: Callable[..., Any], inputs: GDNInputs) -> GDNOutput:
    with torch.cuda.device(inputs.q.get_device()), torch.no_grad():
        out, final_states = function(
            q=inputs.q, k=inputs.k, v=inputs.v, g=inputs.g, beta=inputs.beta, scale=inputs.scale_or_default,
            initial_state=inputs.initial_state, output_final_state=True, use_qk_l2norm_in_kernel=inputs.use_qk_l2norm,
            cu_seqlens=inputs.cu_seqlens,
        )  # fmt: skip
    return GDNOutput(out, final_states)


def load_flashinfer() -> Implementation:
    flashinfer = _FlashInfer(import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule)

    def plan(_inputs: GDNInputs, _precision: Precision) -> Plan:
        return Plan(
            variant="cute",
            launches=1,
            reason="normalised q and k, the decays, beta in fp32 and V-first states are prepared outside of its time",
        )

    return library_kernel("gdn", "flashinfer", partial(_refuse_unlike_128, "flashinfer"), flashinfer.call, plan)


class _FlashInfer:
    """function: of the library.  If it can choose among libraries, this class requests the library's own kernel."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._options = {"backend": "flashinfer"} if "backend" in signature(function).parameters else {}
        self._inputs: Callable[[], GDNInputs | None] = lambda: None
        self._prepared: dict[str, torch.Tensor | None] = {}

    def call(self, inputs: GDNInputs, _precision: Precision) -> GDNOutput:
        if self._inputs() is not inputs:
            self._prepared = _prepared(inputs)
            self._inputs = weakref.ref(inputs, self._forget)
        with torch.cuda.device(inputs.q.get_device()), torch.no_grad():
            out, final_states = self._function(
                **self._prepared, scale=inputs.scale_or_default, output_final_state=True,
                use_qk_l2norm_in_kernel=False, **self._options,
            )  # fmt: skip
        return GDNOutput(out.view(inputs.v.shape), final_states.mT)

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
