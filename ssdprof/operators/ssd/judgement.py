"""The judgement of SSD: the fp64 oracle in blocks, and the operator with every rounding that a precision allows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ssdprof.kernels.oracle import OutputBlock
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.ssd.reference import ssd_blocks
from ssdprof.operators.operator import Form, Judgement
from ssdprof.operators.ssd.rounding import RoundedSSD, SSDGate


def forms(inputs: SSDInputs) -> tuple[Form, Form]:
    """out is as x; final states are (sequences, h, p, n) in fp32."""
    return (
        Form(shape=tuple(inputs.x.shape), dtype=inputs.x.dtype),
        Form(shape=inputs.states_shape, dtype=torch.float32),
    )


def blocks(inputs: SSDInputs, length: int) -> Iterator[OutputBlock]:
    """The oracle, `length` positions at a time."""
    return ssd_blocks(inputs, torch.float64, block=length)


def bytes_per_position(inputs: SSDInputs) -> int:
    """The rounded form holds about six fp32 rows of scores (h, chunk_size); the oracle and the sums hold about ten fp64
    rows of (h, p + 64 + p n / 64), as `ssd_blocks` explains."""
    h, p = inputs.x.shape[2:]
    n, q = inputs.B.shape[3], inputs.power_of_two_chunk
    return h * (6 * 4 * q + 10 * 8 * (p + 64 + p * n // 64))


JUDGEMENT = Judgement(
    forms=forms,
    blocks=blocks,
    gate=SSDGate.of,
    rounded=RoundedSSD,
    bytes_per_position=bytes_per_position,
    chunk_size=lambda inputs: inputs.power_of_two_chunk,
)
