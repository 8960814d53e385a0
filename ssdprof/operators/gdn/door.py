"""How a model calls the gated delta rule: transformers' `torch_chunk_gated_delta_rule`, bound to `GDNInputs`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.gdn.reference import gdn_chunked
from ssdprof.operators.operator import BoundCall, Door, Output
from ssdprof.operators.stand_in import run_kernels


def bind(
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
    cu_seqlens: torch.Tensor | None = None,
    **dropped: Any,  # noqa: ARG001
) -> BoundCall:
    """The call of `mixer` as inputs; arguments of its forward that have no effect on the operator are dropped."""
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
        cu_seqlens=cu_seqlens,
    )
    remark = ""
    if copies > 1:
        remark = (
            f"The model repeats each query and key head {copies} times before the operator; each was taken once, as "
            "kernels take it."
        )
    return BoundCall(inputs, output_final_state, remark)


def _head_copies(mixer: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """How often the mixer repeated each q and k head before the call, from the number of its own key heads.

    Up to transformers 5.22 mixers repeat them to the number of value heads; kernels take them once.  The strides of
    such a capture are those of every n-th head.  Raises ValueError if the heads are not copies.
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


def stand_in(inputs: GDNInputs) -> Output:
    """Our kernels on a GPU, the chunked form in fp32 elsewhere."""
    if inputs.v.device.type == "cuda":
        return run_kernels("gdn", inputs, inputs.v.device)
    out, final_states = gdn_chunked(inputs, dtype=torch.float32)
    return out.to(inputs.v.dtype), final_states


DOOR = Door(
    function="torch_chunk_gated_delta_rule",
    step="torch_recurrent_gated_delta_rule",
    bind=bind,
    bind_step=bind,
    refused=(
        "cp_context",
        "head_first",
        "use_gate_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval",
        "transpose_state_layout",
        "state_v_first",
    ),
    always_a_pair=True,
    views=("q", "k", "v"),
    per_position=("g", "beta"),
    always_fp32=("g",),
    gate_bytes=lambda item: item + 4,  # beta, and g in fp32
    stand_in=stand_in,
)
