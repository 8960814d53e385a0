"""From a model's call of its operator to SSDInputs or GDNInputs: no copy, the model's own strides.

Models pass the keyword arguments of their forward through to the operator (`use_cache`, `output_router_logits`, ...).
Those mean nothing to it and are dropped; those that a production kernel would act on and that the inputs cannot express
are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ssdprof.capture.captured import OperatorInputs
from ssdprof.errors import BadInputError
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.schema import Operator

# Arguments of mamba_ssm's and fla's functions that change the result, beyond those bound below.
_NOT_REPRESENTABLE: dict[Operator, tuple[str, ...]] = {
    "ssd": ("seq_idx", "cu_seqlens", "return_varlen_states"),
    "gdn": (
        "cu_seqlens",
        "cp_context",
        "head_first",
        "use_gate_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval",
        "transpose_state_layout",
        "state_v_first",
    ),
}


@dataclass(frozen=True)
class BoundCall:
    inputs: OperatorInputs
    wants_final_state: bool


def bind(operator: Operator, mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundCall:
    """What `mixer` asks of its operator.

    Raises BadInputError for a call that the operator's inputs cannot express; the message names the argument.
    """
    for name in _NOT_REPRESENTABLE[operator]:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise BadInputError(f"{type(mixer).__name__} passes {name} to its operator, which a capture cannot hold.")
    try:
        return _BINDERS[operator](mixer, *args, **kwargs)
    except (ValueError, TypeError) as error:
        raise BadInputError(
            f"{type(mixer).__name__} calls its {operator} operator in a way unknown here: {error}."
        ) from error


def _bind_ssd(
    mixer: nn.Module,  # noqa: ARG001
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **dropped: Any,  # noqa: ARG001
) -> BoundCall:
    low, high = dt_limit
    inputs = SSDInputs(
        x=x,
        dt=dt,
        A=A,
        B=B,
        C=C,
        chunk_size=chunk_size,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=(float(low), float(high)),
        initial_states=initial_states,
    )
    return BoundCall(inputs, return_final_states)


def _bind_gdn(
    mixer: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    scale: float | None = None,
    **dropped: Any,  # noqa: ARG001
) -> BoundCall:
    copies = _head_copies(mixer, q, k, v)
    inputs = GDNInputs(
        q=q[:, :, ::copies],
        k=k[:, :, ::copies],
        v=v,
        g=g,
        beta=beta,
        initial_state=initial_state,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        chunk_size=chunk_size,
    )
    return BoundCall(inputs, output_final_state)


_BINDERS: dict[Operator, Callable[..., BoundCall]] = {"ssd": _bind_ssd, "gdn": _bind_gdn}


def _head_copies(mixer: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """How often each q and k head was repeated before the call.

    Up to transformers 5.22 mixers repeat them to the number of value heads; kernels take them once.  The strides of
    such a capture are those of every n-th head.
    """
    own_heads = getattr(mixer, "num_k_heads", q.shape[2])
    if q.shape[2] == own_heads or q.shape[2] != v.shape[2] or v.shape[2] % own_heads:
        return 1
    copies = v.shape[2] // own_heads
    for tensor in (q, k):
        per_head = tensor.view(*tensor.shape[:2], own_heads, copies, tensor.shape[3])
        if not all(torch.equal(per_head[:, :, :, 0], per_head[:, :, :, i]) for i in range(1, copies)):
            raise ValueError(f"q and k have {q.shape[2]} heads that are not copies of {own_heads}")
    return copies
