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
from command_line import latest, passing
from torch import Tensor

from ssdprof import operators
from ssdprof.capture import provenance
from ssdprof.capture.layers import CapturedLayer
from ssdprof.capture.provenance import Provenance
from ssdprof.capture.recording import open_recording
from ssdprof.core.conditions import parse_gate
from ssdprof.core.outcome import broken
from ssdprof.core.target import Serving
from ssdprof.report.statements import in_short

pytestmark = pytest.mark.usefixtures("in_empty_folder")
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
def test_a_recorded_call_with_a_wrong_state_is_suspected(
    plant: Plant, slots, words, outputs, monkeypatch
):
    """Of recordings with outputs and the states of each call, and of pools without outputs."""
    torch.manual_seed(0)
    folder = recorded(
        Path("r"), plant, slots, lambda name: outputs or name not in ("out", "final_states")
    )
    calls = list(open_recording(folder, "safetensors").layers())
    faults = faults_of(calls)
    assert len(faults) == (1 if words else 0), faults
    assert not words or faults[0].startswith(words)
    if not words:  # a prompt without slots may leave its states in any
        prompt = replace(calls[1], slots=())
        assert not faults_of([calls[0], prompt, *calls[2:]])
    elif "no earlier" in words:  # a state that is older than those that are remembered
        monkeypatch.setattr(provenance, "_REMEMBERED", 2)
        assert not faults_of(calls)
    # after calls that are missing, any state may be there
    calls[2] = replace(calls[2], gap=True)
    assert not faults_of(calls)


def test_a_verification_is_not_followed():
    """Which of its states the server keeps is not recorded."""
    folder = recorded(Path("r"), lambda left: -left[1], SLOTS, lambda _: True)
    calls = list(open_recording(folder, "safetensors").layers())
    out, states = calls[1].served
    inputs = replace(calls[1].inputs, state_every=1)
    served = out, states[:1].repeat(out.shape[1], 1, 1, 1)
    calls[1] = replace(calls[1], inputs=inputs, served=served)
    assert not faults_of(calls)


def test_the_capture_and_its_run_name_the_suspicion():
    """Beside the verdict, which is on the kernels; one case of each other call keeps the gate."""
    torch.manual_seed(0)
    folder = recorded(Path("r"), lambda left: left[1].flip(0), SLOTS, bool)
    words = "row 0 (slot 5) of call 3 begins with the state that row 1 (slot 2) of call 2 left"
    answer = passing(f"capture --from safetensors {folder} --out c")
    assert f"States between calls that do not fit: recorded layer 0, {words}" in answer.err
    ran = passing("run c --dtypes exact --states fp32 --impl fused --full")
    assert "PASSED for the kernels, not for the states between calls: all" in ran.shown
    assert f"The states between calls do not fit: in layer 0, {words}" in ran.shown
    assert "2 of 4 forward passes in layer 0" in ran.shown
    assert "weights" not in ran.shown
    short = "In short: explain first why the states between calls do not fit"
    assert f"{short}; fused is" in ran.shown
    report = latest("run").changed(conditions=[parse_gate("state-breaks:0")])
    (verdict,) = broken(report)
    assert "pass 3 of 4" in verdict.case
    assert "misses" not in in_short(report)[0].text


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "kimi_linear"])
@pytest.mark.parametrize("serving", [Serving(chunk=16), Serving(decode=3)])
def test_a_models_own_calls_pass_their_states_on(name, serving: Serving):
    """Row i is sequence i; the rows of one call are exchanged, which no call shows by itself."""
    captured, _ = capture(name, tiny_models.prompt(40, batch=2), serving)
    assert not faults_of(captured, rows_are_sequences=True)
    *_, last = (number for number, call in enumerate(captured) if call.layer.index == 0)
    states = operators.get(captured[0].layer.operator).inputs.STATES
    inputs = captured[last].inputs
    exchanged = replace(inputs, **{states: getattr(inputs, states).flip(0)})
    captured[last] = replace(captured[last], inputs=exchanged)
    (fault,) = faults_of(captured, rows_are_sequences=True)
    assert "row 0 of " in fault
    assert "begins with the state that row 1 of" in fault


def faults_of(captured: list[CapturedLayer], *, rows_are_sequences: bool = False) -> list[str]:
    checks = Provenance(rows_are_sequences=rows_are_sequences)
    return [*filter(None, map(checks.state_break, captured))]
