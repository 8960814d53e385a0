"""Faults as small as a rounding are found in the errors of 16-bit outputs; the reason names their
kind and place.
"""

from collections.abc import Callable

import pytest
import torch
from measure.conftest import random_inputs
from torch import Tensor

from ssdprof import operators
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.measure.accuracy import Candidate, compare
from ssdprof.measure.rounding_tests import DRAWS, RoundingTests

LENGTH = 320
Pair = tuple[Tensor, Tensor]  # the output and the state


def exact(inputs: SSDInputs) -> Pair:
    """(l, h, p) and (h, p, n) in fp64."""
    blocks = list(operators.get(inputs.operator).oracle.blocks(inputs, block=LENGTH))
    return torch.cat([out for _, out, _, _ in blocks]).double(), blocks[-1][2].double()


def reasons(inputs: SSDInputs, out: Tensor, state: Tensor) -> str:
    output = out[None].to(inputs.x.dtype), state[None].float()
    found = compare(inputs, {"ours": Candidate(output=output, precision=Precision())})["ours"]
    return "; ".join(one.reason for one in found)


def no_fault(out: Tensor, state: Tensor) -> Pair:
    return out, state


def gain(out: Tensor, state: Tensor) -> Pair:
    return out * 1.005, state


def gain_of_a_head_of_states(out: Tensor, state: Tensor) -> Pair:
    scale = torch.ones(len(state), 1, 1).index_fill(0, torch.tensor(2), 1.008)
    return out, state * scale


def gain_of_all_states(out: Tensor, state: Tensor) -> Pair:
    """In each head too small to be seen."""
    return out, state * 1.0025


def truncated(out: Tensor, state: Tensor) -> Pair:
    # toward zero
    return (out.float().view(torch.int32) & -(1 << 16)).view(torch.float32).double(), state


def border(out: Tensor, state: Tensor) -> Pair:
    at_border = (torch.arange(LENGTH) % 64 == 0)[:, None, None]
    sign = 1 - 2.0 * (torch.arange(out.shape[2]) % 2)
    return torch.where(
        at_border, out + 0.004 * sign * out.square().mean(2, keepdim=True).sqrt(), out
    ), state


def column(out: Tensor, state: Tensor) -> Pair:
    one = torch.arange(out.shape[2]) == 5
    return torch.where(one, out + 0.003 * out.square().mean(2, keepdim=True).sqrt(), out), state


FAULTS = {
    no_fault: "; ",
    gain: "gain 1.00",
    gain_of_a_head_of_states: "final_states, head 2: gain 1.00",
    gain_of_all_states: "final_states, mean over heads: gain 1.00",
    truncated: "gain 0.99",
    border: "position 0 of each",
    column: "column 5",
}


@pytest.mark.parametrize("together", [1, 4])  # draws that are evaluated at once, as on a GPU
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_named(fault: Callable[[Tensor, Tensor], Pair], together, monkeypatch):
    monkeypatch.setattr("ssdprof.measure.accuracy._drawn_together", lambda *_: together)
    inputs = random_inputs(seqlen=LENGTH)
    found = reasons(inputs, *fault(*exact(inputs)))
    assert FAULTS[fault] in found
    assert (found == "; ") == (fault is no_fault)


def test_a_cut_of_operands_must_be_declared():
    high = torch.randn(2, 100, 16, dtype=torch.float64)

    def errors(gain: float) -> list[Tensor]:
        noise = torch.randn(1 + DRAWS, *high.shape, dtype=torch.float64)
        return list(high * (gain + 1e-3 * noise))

    tests = RoundingTests(None)
    draws = {"rounds": errors(0), "cuts": errors(-3e-3)}
    tests.add(high, high, {"ours": high + errors(-3e-3)[0]}, draws, 0, 0)

    def failed(*nulls: str) -> list[str]:
        checks = tests.checks("ours", nulls, 2.0**-9, torch.full((2,), 2.0**-9))
        return [one.test for one in checks if one.used > 1]

    assert failed("rounds")[0] == "gain"
    assert failed("rounds", "cuts") == []


def test_fp32_inputs_are_judged_by_the_budget_alone():
    inputs = random_inputs(seqlen=LENGTH, dtype=torch.float32)
    out, state = exact(inputs)
    found = compare(
        inputs,
        {"ours": Candidate(output=(out[None].float(), state[None].float()), precision=Precision())},
    )
    assert [one.checks for one in found["ours"]] == [(), ()]
    assert "budget" in reasons(inputs, out * 1.0001, state)
