"""The judgement of GDN: the fp64 oracle in blocks, and the operator with every rounding that a precision allows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.gdn.reference import gdn_blocks
from ssdprof.kernels.oracle import OutputBlock
from ssdprof.operators.gdn.rounding import CHUNK, GDNGate, RoundedGDN
from ssdprof.operators.operator import Form, Judgement


def forms(inputs: GDNInputs) -> tuple[Form, Form]:
    """out is as v; final states are (sequences, HV, K, V) in fp32."""
    return (
        Form(shape=tuple(inputs.v.shape), dtype=inputs.v.dtype),
        Form(shape=inputs.states_shape, dtype=torch.float32),
    )


def blocks(inputs: GDNInputs, length: int) -> Iterator[OutputBlock]:
    """The oracle, `length` positions at a time."""
    return gdn_blocks(inputs, torch.float64, block=length)


def bytes_per_position(inputs: GDNInputs) -> int:
    """The rounded form holds about eight fp32 rows of K, V or CHUNK; the oracle about ten fp64 rows of K + V + 64."""
    heads, value_dim = inputs.v.shape[2:]
    width = inputs.q.shape[3] + value_dim + CHUNK
    return int(heads * (8 * 4 * width + 10 * 8 * width))


JUDGEMENT = Judgement(
    forms=forms,
    blocks=blocks,
    gate=GDNGate.of,
    rounded=RoundedGDN,
    bytes_per_position=bytes_per_position,
    chunk_size=lambda _inputs: CHUNK,
)
