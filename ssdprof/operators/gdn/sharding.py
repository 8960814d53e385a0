"""How servers divide a gated-delta-rule layer among tensor-parallel ranks, as vLLM does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.operators.operator import Sharding


def refusal(sizes: Mapping[str, int], ranks: int) -> str:
    """Every rank takes the same number of key heads, with their value heads."""
    heads = sizes["key_heads"]
    return f"its {heads} key heads cannot be divided by {ranks}" if heads % ranks else ""


def first_rank(inputs: GDNInputs, ranks: int) -> GDNInputs:
    """The first key heads with their value heads."""
    keys, values = inputs.q.shape[2] // ranks, inputs.v.shape[2] // ranks
    state = inputs.initial_state
    return replace(
        inputs,
        q=inputs.q[:, :, :keys],
        k=inputs.k[:, :, :keys],
        v=inputs.v[:, :, :values],
        g=inputs.g[:, :, :values],
        beta=inputs.beta[:, :, :values],
        initial_state=None if state is None else state[:, :values],
    )


SHARDING = Sharding(refusal=refusal, first_rank=first_rank)
