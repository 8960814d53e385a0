"""States that are rounded between steps as a pool keeps them, against plain loops in torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import BF16, GDNCase, KDACase, SSDCase

from ssdprof.kernels import Precision, get
from ssdprof.operators.decode_states import parse_state_format, stepped_states

CASES: dict[str, Any] = {
    "gdn": GDNCase(batch=2, seqlen=9, values_per_key=2, key_dim=20, value_dim=24),
    "kda": KDACase(batch=2, seqlen=9, key_dim=20, value_dim=24, dtype=BF16),
    "ssd": SSDCase(batch=2, seqlen=9, headdim=20, dstate=12, gate=True),
}
PACK = dict(lengths=(3, 0, 6), initial_states=True)
EACH = pytest.mark.parametrize(
    ("operator", "changes"), [(name, changes) for name in CASES for changes in ({}, PACK)]
)


def rounds_nothing(states: torch.Tensor) -> torch.Tensor:
    return states


@EACH
@pytest.mark.parametrize("name", ["fp32", "test_stored_states:rounds_nothing"])
def test_fp32_and_a_function_that_rounds_nothing_are_recurrent(
    operator: str, changes: dict[str, Any], name: str
) -> None:
    inputs = CASES[operator].but(**changes).inputs()
    expected = get(operator, "recurrent").run(inputs, Precision())
    every = get(operator, "recurrent").run(replace(inputs, state_every=1), Precision())
    out, states = stepped_states(inputs, parse_state_format(name), 1, (0, 2, 100))
    assert torch.equal(out.to(inputs.values.dtype), expected.out)
    assert torch.equal(states[2], expected.final_states)
    assert torch.equal(states[0], inputs.initial if changes else torch.zeros_like(states[0]))
    second = every.final_states[[1, 1, 4] if changes else [1, 10]]
    second[1] = states[0, 1] if changes else second[1]
    assert torch.equal(states[1], second)
