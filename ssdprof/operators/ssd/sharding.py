"""How servers divide a Mamba-2 layer among tensor-parallel ranks, as vLLM does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.operators.operator import Sharding


def refusal(sizes: Mapping[str, int], ranks: int) -> str:
    """Every rank takes the same number of heads; groups are divided, too, or one group is on every rank."""
    heads, groups = sizes["nheads"], sizes["ngroups"]
    if heads % ranks:
        return f"its {heads} heads cannot be divided by {ranks}"
    if groups % ranks and groups != 1:
        return f"its {groups} groups cannot be divided by {ranks}, and only a single group is repeated on every rank"
    return ""


def first_rank(inputs: SSDInputs, ranks: int) -> SSDInputs:
    """The first heads with their groups."""
    heads, groups = inputs.x.shape[2] // ranks, max(1, inputs.B.shape[2] // ranks)

    def first(tensor: torch.Tensor | None, dim: int) -> torch.Tensor | None:
        return None if tensor is None else tensor.narrow(dim, 0, heads)

    return replace(
        inputs,
        x=inputs.x[:, :, :heads],
        dt=inputs.dt[:, :, :heads],
        A=inputs.A[:heads],
        B=inputs.B[:, :, :groups],
        C=inputs.C[:, :, :groups],
        D=first(inputs.D, 0),
        z=first(inputs.z, 2),
        dt_bias=first(inputs.dt_bias, 0),
        initial_states=first(inputs.initial_states, 1),
    )


SHARDING = Sharding(refusal=refusal, first_rank=first_rank)
