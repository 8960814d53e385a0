"""The recurrent GDN kernel, in the interpreter, against the fp64 recurrence."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gdn_cases import EXACT, Case
from test_gdn_fused import assert_close

from ssdprof.kernels import gdn_recurrent, get
from ssdprof.kernels.gdn.recurrent import GDNRecurrentConfig, GDNRecurrentLaunch
from ssdprof.kernels.gdn.reference import gdn_recurrence
from ssdprof.kernels.registry import UnsupportedError

CASES = [
    Case(length=1, batch=5, values_per_key=2, key_dim=32, value_dim=48, initial_state=True),
    Case(length=1, batch=2, key_heads=2, key_dim=20, value_dim=12, l2norm=False, initial_state=True),
    Case(length=9, values_per_key=3, largest_beta=2.0),
    Case(lengths=(1,) * 7, initial_state=True, value_dim=20),
    Case(lengths=(0, 3, 0, 6), initial_state=True, gate=50.0),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_recurrence(case: Case) -> None:
    inputs = case.inputs(scale=0.3)
    expected = gdn_recurrence(inputs)
    assert_close(get("gdn", "recurrent").run(inputs, EXACT), expected, 1e-6)
    assert_close(GDNRecurrentLaunch(inputs, GDNRecurrentConfig(block_v=4))(inputs), expected, 1e-6)


@pytest.mark.parametrize("gate", [0.0, 1e-4, 3e-3, 3.0])
def test_an_exp2_that_is_off_by_a_bit(gate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, always in one direction: the error does not add up over 300 positions."""
    exp2 = np.exp2
    monkeypatch.setattr(np, "exp2", lambda v: np.nextafter(exp2(v), np.float32(0), dtype=np.float32))
    inputs = Case(length=300, gate=gate, largest_beta=0.1, initial_state=True).inputs()
    assert_close(gdn_recurrent(inputs), gdn_recurrence(inputs), 1e-6)


def test_what_is_left_of_a_state_that_mostly_decays() -> None:
    """A rounding error of the state before a position would be larger than the state after its decay."""
    inputs = Case(length=1, initial_state=True).inputs()
    assert inputs.initial_state is not None
    inputs = replace(inputs, g=torch.full_like(inputs.g, -8.0), initial_state=1e4 * inputs.initial_state)
    assert_close(gdn_recurrent(inputs), gdn_recurrence(inputs), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_rounds_only_the_output(dtype: torch.dtype) -> None:
    inputs = Case(length=4, dtype=dtype, initial_state=True).inputs()
    ours, expected = gdn_recurrent(inputs), gdn_recurrence(inputs)
    assert_close(ours._replace(out=expected.out), expected, 1e-6)
    torch.testing.assert_close(ours.out.double(), expected.out, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v_first", [False, True])
def test_in_place(v_first: bool, dtype: torch.dtype) -> None:
    """The state keeps its memory, dtype and layout."""
    inputs = Case(length=1, batch=2, values_per_key=2, key_dim=16, value_dim=20, initial_state=True).inputs()
    assert inputs.initial_state is not None
    state = inputs.initial_state.to(dtype)
    state = state.mT.contiguous().mT if v_first else state
    inputs = replace(inputs, initial_state=state)
    expected = gdn_recurrent(inputs)
    out, final_states = gdn_recurrent(inputs, in_place=True)
    assert final_states is state
    assert torch.equal(out, expected.out)
    assert torch.equal(state, expected.final_states.to(dtype))
    with pytest.raises(ValueError, match="initial_state"):
        gdn_recurrent(replace(inputs, initial_state=None), in_place=True)
    with pytest.raises(ValueError, match="cannot write to an expanded initial_state"):
        gdn_recurrent(replace(inputs, initial_state=state[:1].expand(2, -1, -1, -1)), in_place=True)


def test_a_batch_is_its_sequences() -> None:
    inputs = CASES[0].inputs()
    names = ("q", "k", "v", "g", "beta", "initial_state")
    together = gdn_recurrent(inputs)
    alone = gdn_recurrent(replace(inputs, **{name: getattr(inputs, name)[3:4] for name in names}))
    assert torch.equal(together.out[3:4], alone.out)
    assert torch.equal(together.final_states[3:4], alone.final_states)


def test_a_nan_stays_in_its_head_and_sequence() -> None:
    inputs = Case(length=2, batch=2, key_heads=2, initial_state=True).inputs()
    expected = gdn_recurrent(inputs)
    k = inputs.k.clone()
    k[0, 0, 0, 3] = float("nan")
    found = gdn_recurrent(replace(inputs, k=k))
    assert torch.isnan(found.out[0, :, 0]).all()
    assert torch.equal(found.out[:, :, 1], expected.out[:, :, 1])
    assert torch.equal(found.out[1], expected.out[1])


def test_refuses_to_drop_a_gradient() -> None:
    inputs = CASES[0].inputs()
    gdn_recurrent(inputs)
    inputs.v.requires_grad_()
    with pytest.raises(UnsupportedError, match="recurrent: forward only"):
        gdn_recurrent(inputs)
