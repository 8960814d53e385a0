"""The states that servers keep: `benchmarks/serving_cases.py` finds the faults that servers had."""

from collections.abc import Callable

import pytest
import serving_cases
import torch
from serving_cases import Kept, cut_runs, drawn, every_state, fault, fused, one_after_the_other

from ssdprof.kernels.gdn.recurrent import gdn_recurrent

SQUARE = "1/2x16x16"  # K = V, so that exchanged axes have the right shape


@pytest.mark.parametrize("tokens", [2, 5, 8])
def test_tokens_at_once_are_single_steps_and_every_kept_state_is_that_of_a_run_cut_there(tokens: int) -> None:
    inputs = drawn(SQUARE, 3, tokens)
    kept, steps = every_state(inputs), one_after_the_other(gdn_recurrent, 1, inputs)
    assert not fault(inputs, 1, kept)
    assert not fault(inputs, 1, steps)
    assert torch.allclose(kept[1], steps[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("accepted", range(5))
def test_the_next_step_starts_after_any_accepted_token(accepted: int) -> None:
    inputs = drawn(SQUARE, 2, 4)
    out, states = every_state(inputs)
    state = states[:, accepted - 1] if accepted else inputs.initial_state
    if accepted < 4:
        again = every_state(serving_cases.part(inputs, accepted, 4, state))
        assert torch.allclose(again[1], states[:, accepted:], rtol=1e-5, atol=1e-5)
        assert torch.allclose(again[0].float(), out[:, accepted:].float(), rtol=1e-2, atol=1e-2)
    else:
        assert torch.equal(state, gdn_recurrent(inputs).final_states)  # type: ignore[arg-type]  # there is one


def test_checkpoints_are_states_of_runs_cut_there() -> None:
    inputs = drawn(SQUARE, 1, 96)
    assert not fault(inputs, 32, one_after_the_other(fused, 32, inputs))
    assert cut_runs(inputs, 32).cu_seqlens.tolist() == [0, 32, 96, 192]  # type: ignore[union-attr]  # it is packed


def last_never_written(states: torch.Tensor) -> torch.Tensor:
    found = states.clone()
    found[:, -1] = states[:, -2]
    return found


@pytest.mark.parametrize(
    "plant",
    [
        lambda states: states.roll(1, 0),  # another slot
        lambda states: states.roll(1, 1),  # another column
        lambda states: states.mT,  # V before K
        last_never_written,
        lambda states: states.bfloat16().float(),
    ],
    ids=["slot", "column", "layout", "snapshot", "rounded"],
)
def test_planted_faults_are_found(plant: Callable[[torch.Tensor], torch.Tensor]) -> None:
    inputs = drawn(SQUARE, 3, 4)
    out, states = every_state(inputs)
    planted: Kept = (out, plant(states).contiguous())
    assert "final_states" in fault(inputs, 1, planted) or "states" in fault(inputs, 1, planted)
