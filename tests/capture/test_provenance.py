"""A call whose states are another sequence's, or nobody's, is told, however right it is itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from capture.exact import capture
from command_line import passing
from safetensors.torch import save_file

from ssdprof import operators
from ssdprof.capture.layers import CapturedLayer
from ssdprof.capture.provenance import Provenance
from ssdprof.capture.recording import MANIFEST, open_recording
from ssdprof.core.target import Serving
from ssdprof.kernels import GDNInputs
from ssdprof.kernels.gdn.reference import gdn_recurrence

SLOTS = (5, 2)  # of the two sequences, in every call


def gdn(length: int, states: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """A call on two packed sequences, with what it computes."""
    given = {
        "q": torch.randn(1, length, 1, 16),
        "k": torch.nn.functional.normalize(torch.randn(1, length, 1, 16), dim=-1),
        "v": torch.randn(1, length, 2, 8),
        "g": -torch.rand(1, length, 2) / 9,
        "beta": torch.rand(1, length, 2),
        "cu_seqlens": torch.tensor([0, 4, length]),
        **({} if states is None else {"initial_state": states}),
    }
    out, final_states = gdn_recurrence(GDNInputs(**given))
    return {**given, "out": out.float(), "final_states": final_states.float()}


Plant = Callable[[list[torch.Tensor]], torch.Tensor]  # states after each call -> the next one's


def recorded(
    folder: Path, plant: Plant, slots: tuple[int, ...], keeps: Callable[[str], bool]
) -> Path:
    """Four calls, of which the third begins with planted states; each call is right by itself."""
    folder.mkdir()
    (folder / MANIFEST).write_text(json.dumps({"operator": "gdn"}))
    left: list[torch.Tensor] = []
    for number in range(4):
        begin = (left[-1] if number != 2 else plant(left)) if left else None
        # a pass ends where the lengths change
        tensors = gdn(9 + number % 2, None if begin is None else begin.bfloat16().float())
        left.append(tensors["final_states"])
        if slots:
            tensors["slots"] = torch.tensor(slots)
        kept = {name: tensor.contiguous() for name, tensor in tensors.items() if keeps(name)}
        save_file(kept, folder / f"7_{number:06}.safetensors")
    return folder


def one_head(left: list[torch.Tensor]) -> torch.Tensor:
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
        "(slot 5) of call 2.  1 more rows",
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
]


@pytest.mark.parametrize("outputs", [True, False])
@pytest.mark.parametrize(("plant", "slots", "words"), FAULTS)
@pytest.mark.usefixtures("in_empty_folder")
def test_a_recorded_call_with_a_wrong_state_is_told(
    plant: Plant, slots: tuple[int, ...], words: str, outputs: bool
) -> None:
    torch.manual_seed(0)
    folder = recorded(
        Path("r"), plant, slots, lambda name: outputs or name not in ("out", "final_states")
    )
    provenance = Provenance(rows_are_sequences=False)
    calls = list(open_recording(folder, "safetensors").layers())
    faults = [text for call in calls for text in provenance.faults(call)]
    assert len(faults) == (1 if words else 0), faults
    assert not words or faults[0].startswith(words)


@pytest.mark.usefixtures("in_empty_folder")
def test_the_capture_and_its_run_tell_it() -> None:
    torch.manual_seed(0)
    folder = recorded(Path("r"), lambda left: left[1].flip(0), SLOTS, bool)
    words = "row 0 (slot 5) of call 3 begins with the state that row 1 (slot 2) of call 2 left"
    answer = passing("capture", "--from", "safetensors", str(folder), "--out", "c")
    assert f"Suspect the recording: {words}" in answer.err
    ran = passing("run", "c", "--dtypes", "exact", "--states", "fp32", "--impl", "unfused")
    assert words in ran.shown


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "kimi_linear"])
@pytest.mark.parametrize("serving", [Serving(chunk=16), Serving(decode=3)])
def test_a_models_own_calls_pass_their_states_on(name: str, serving: Serving) -> None:
    """Row i is sequence i; the rows of one call are exchanged, which no call shows by itself."""
    captured, _ = capture(name, tiny_models.prompt(40, batch=2), serving)
    assert not faults_of(captured)
    *_, last = (number for number, call in enumerate(captured) if call.layer.index == 0)
    states = operators.get(captured[0].layer.operator).inputs.LINEAR[1]
    inputs: Any = captured[last].inputs
    exchanged = replace(inputs, **{states: getattr(inputs, states).flip(0)})
    captured[last] = replace(captured[last], inputs=exchanged)
    (fault,) = faults_of(captured)
    assert "row 0 of " in fault
    assert "begins with the state that row 1 of" in fault


def faults_of(captured: list[CapturedLayer]) -> list[str]:
    provenance = Provenance(rows_are_sequences=True)
    return [text for call in captured for text in provenance.faults(call)]
