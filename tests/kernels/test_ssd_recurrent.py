"""The recurrent SSD kernel, in the interpreter, against the fp64 recurrence."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ssd_cases import EXACT, Case, assert_close

from ssdprof.kernels import get, ssd_recurrent
from ssdprof.kernels.registry import UnsupportedError
from ssdprof.kernels.ssd.reference import ssd_recurrence

FP32_ROUNDING = 2e-6
CASES = [
    Case(batch=5, seqlen=1, heads=4, groups=2, initial_states=True),
    Case(batch=2, seqlen=1, headdim=20, skip="(h, p)", gate=True, initial_states=True),
    Case(seqlen=9, skip="", dstate=32),
    Case(batch=2, seqlen=3, dt_limit=(0.05, 0.1)),
    Case(lengths=(0, 1, 3, 0, 1), gate=True, initial_states=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_recurrence(case: Case) -> None:
    inputs = case.inputs()
    assert_close(get("ssd", "recurrent").run(inputs, EXACT), ssd_recurrence(inputs), FP32_ROUNDING)


def test_an_exp2_that_is_off_by_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, always in one direction: errors do not add up over 300 positions.  The last head forgets at once."""
    exp2 = np.exp2
    monkeypatch.setattr(np, "exp2", lambda v: np.nextafter(exp2(v), np.float32(0), dtype=np.float32))
    inputs = Case(seqlen=300, heads=3, initial_states=True).inputs(A=torch.tensor([-1e-3, -0.1, -100.0]))
    assert_close(ssd_recurrent(inputs), ssd_recurrence(inputs), FP32_ROUNDING)


def test_what_is_left_of_a_state_that_mostly_decays() -> None:
    """A rounding error of the state before a position would be larger than the state after its decay."""
    inputs = Case(seqlen=1, initial_states=True, dt_limit=(0.1, 0.1)).inputs(A=torch.tensor([-60.0, -90.0]))
    assert inputs.initial_states is not None
    inputs = replace(inputs, initial_states=1e4 * inputs.initial_states)
    assert_close(ssd_recurrent(inputs), ssd_recurrence(inputs), FP32_ROUNDING)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place(dtype: torch.dtype) -> None:
    inputs = CASES[0].inputs()
    assert inputs.initial_states is not None
    state = inputs.initial_states.to(dtype)
    inputs = replace(inputs, initial_states=state)
    expected = ssd_recurrent(inputs)
    out, final_states = ssd_recurrent(inputs, in_place=True)
    assert final_states is state
    assert torch.equal(out, expected.out)
    assert torch.equal(state, expected.final_states.to(dtype))
    with pytest.raises(ValueError, match="initial_states"):
        ssd_recurrent(replace(inputs, initial_states=None), in_place=True)
    shared = replace(inputs, initial_states=state[:1].expand(state.shape))
    with pytest.raises(ValueError, match="cannot write to expanded initial_states"):
        ssd_recurrent(shared, in_place=True)


def test_steps_are_a_sequence() -> None:
    """Decoding one position at a time, with the state carried over, equals one call over all positions."""
    inputs = Case(seqlen=4, gate=True, initial_states=True).inputs()
    whole, state = ssd_recurrent(inputs), inputs.initial_states
    for t in range(4):
        step = {name: getattr(inputs, name)[:, t : t + 1] for name in ("x", "dt", "B", "C", "z")}
        out, state = ssd_recurrent(replace(inputs, **step, initial_states=state))
        assert torch.equal(out[:, 0], whole.out[:, t])
    assert torch.equal(state, whole.final_states)


def test_refuses_by_name() -> None:
    inputs = CASES[0].inputs()
    with pytest.raises(UnsupportedError, match="dstate is at most 256, not 512"):
        ssd_recurrent(Case(seqlen=1, dstate=512).inputs())
    inputs.x.requires_grad_()
    with pytest.raises(UnsupportedError, match="recurrent: forward only"):
        ssd_recurrent(inputs)
