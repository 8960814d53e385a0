"""A call whose states are another sequence's, or nobody's, is a suspicion, however right it is
itself.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
from capture.exact import capture
from capture.recordings import gdn_call, record
from command_line import passing
from torch import Tensor

from ssdprof import operators
from ssdprof.capture.layers import CapturedLayer
from ssdprof.capture.provenance import Provenance
from ssdprof.capture.recording import open_recording
from ssdprof.core.target import Serving

SLOTS = (5, 2)  # of the two sequences, in every call


Plant = Callable[[list[Tensor]], Tensor]  # states after each call -> the next one's


def recorded(
    folder: Path, plant: Plant, slots: tuple[int, ...], keeps: Callable[[str], bool]
) -> Path:
    """Four calls, of which the third begins with planted states; each call is right by itself.
    Without outputs, each holds the server's whole pool of states, if it has slots.
    """
    pool = slots and not keeps("out")
    left = []
    calls = []
    for number in range(4):
        begin = (left[-1] if number != 2 else plant(left)) if left else None
        # a pass ends where the lengths change
        length = 9 + number % 2
        states = None if begin is None else begin.bfloat16().float()
        tensors = gdn_call(length, (0, 4, length), states, forgets=1 / 9)
        left.append(tensors["final_states"])
        if slots:
            tensors["state_indices" if pool else "slots"] = torch.tensor(slots)
        if pool:
            states = torch.zeros(2, 2, 16, 8) if begin is None else tensors["initial_state"]
            tensors["initial_state"] = torch.randn(7, 2, 16, 8)
            tensors["initial_state"][list(slots)] = states
        calls.append({name: tensor for name, tensor in tensors.items() if keeps(name)})
    return record(folder, "gdn", calls, processes=(7,))


def one_head(left: list[Tensor]) -> Tensor:
    states = left[1].clone()
    states[1, 1] = left[0][1, 1]
    return states


LAST = "begins with the state that row"
FAULTS: list[tuple[Plant, tuple[int, ...], str]] = [
    (lambda left: left[1], SLOTS, ""),
    (lambda left: left[1], (), ""),
    (lambda left: torch.zeros_like(left[1]), SLOTS, ""),
    (
        lambda left: left[1].flip(0),
        SLOTS,
        f"row 0 (slot 5) of call 3 {LAST} 1 (slot 2) of call 2 left, not with that of row 0 "
        "(slot 5) of call 2.  Wrong in this call, too: 1 row.",
    ),
    (
        lambda left: left[0],
        SLOTS,
        f"row 0 (slot 5) of call 3 {LAST} 0 (slot 5) of call 1 left, not with that of row 0 "
        "(slot 5) of call 2.",
    ),
    (
        lambda left: left[1][[0, 0]],
        (),
        f"row 1 of call 3 {LAST} 0 of call 2 left, as did row 0 of call 3: a shared prefix, or "
        "another sequence.",
    ),
    (lambda left: -left[1], (), "row 0 of call 3 begins with a state that no earlier call left."),
    (one_head, (), "row 1 of call 3 begins with a state that no earlier call left."),
    (lambda left: left[1] * torch.nan, (), "row 0 of call 3 begins with a state that no earlier"),
]


@pytest.mark.parametrize("outputs", [True, False])
@pytest.mark.parametrize(("plant", "slots", "words"), FAULTS)
@pytest.mark.usefixtures("in_empty_folder")
def test_a_recorded_call_with_a_wrong_state_is_suspected(plant: Plant, slots, words, outputs):
    """Of recordings with outputs and the states of each call, and of pools without outputs."""
    torch.manual_seed(0)
    folder = recorded(
        Path("r"), plant, slots, lambda name: outputs or name not in ("out", "final_states")
    )
    provenance = Provenance(rows_are_sequences=False)
    calls = list(open_recording(folder, "safetensors").layers())
    faults = [text for call in calls for text in provenance.faults(call)]
    assert len(faults) == (1 if words else 0), faults
    assert not words or faults[0].startswith(words)
    # after calls that are missing, any state may be there
    provenance = Provenance(rows_are_sequences=False)
    calls[2] = replace(calls[2], gap=True)
    assert not [text for call in calls for text in provenance.faults(call)]


@pytest.mark.usefixtures("in_empty_folder")
def test_a_verification_is_not_followed():
    """Which of its states the server keeps is not recorded."""
    folder = recorded(Path("r"), lambda left: -left[1], SLOTS, lambda _: True)
    provenance = Provenance(rows_are_sequences=False)
    for number, captured in enumerate(open_recording(folder, "safetensors").layers()):
        if number == 1:
            out, states = captured.served
            served = out, states[:1].repeat(out.shape[1], 1, 1, 1)
            captured = replace(
                captured, inputs=replace(captured.inputs, state_every=1), served=served
            )
        assert not provenance.faults(captured)


@pytest.mark.usefixtures("in_empty_folder")
def test_the_capture_and_its_run_name_the_suspicion():
    torch.manual_seed(0)
    folder = recorded(Path("r"), lambda left: left[1].flip(0), SLOTS, bool)
    words = "row 0 (slot 5) of call 3 begins with the state that row 1 (slot 2) of call 2 left"
    answer = passing("capture", "--from", "safetensors", str(folder), "--out", "c")
    assert f"Suspect the recording: {words}" in answer.err
    ran = passing(
        "run", "c", "--dtypes", "exact", "--states", "fp32", "--impl", "unfused", "--full"
    )
    assert words in ran.shown
    assert "2 of 4 passes in layer 0" in ran.shown
    assert "weights" not in ran.shown


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "kimi_linear"])
@pytest.mark.parametrize("serving", [Serving(chunk=16), Serving(decode=3)])
def test_a_models_own_calls_pass_their_states_on(name, serving: Serving):
    """Row i is sequence i; the rows of one call are exchanged, which no call shows by itself."""
    captured, _ = capture(name, tiny_models.prompt(40, batch=2), serving)
    assert not faults_of(captured)
    *_, last = (number for number, call in enumerate(captured) if call.layer.index == 0)
    states = operators.get(captured[0].layer.operator).inputs.STATES
    inputs = captured[last].inputs
    exchanged = replace(inputs, **{states: getattr(inputs, states).flip(0)})
    captured[last] = replace(captured[last], inputs=exchanged)
    (fault,) = faults_of(captured)
    assert "row 0 of " in fault
    assert "begins with the state that row 1 of" in fault


def faults_of(captured: list[CapturedLayer]) -> list[str]:
    provenance = Provenance(rows_are_sequences=True)
    return [text for call in captured for text in provenance.faults(call)]
