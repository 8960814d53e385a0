"""The script that records placements: its comparisons, its failures, and the results after an early end."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import record_placement
from random_models import GRANITE_SMALL, MODELS, Mamba2

from ssdprof.errors import MissingCapabilityError
from ssdprof.jobs.subject import find

TINY = replace(
    GRANITE_SMALL, hidden=64, heads=4, kv_heads=2, mlp=96, mixer=Mamba2(hidden=64, nheads=8, headdim=16, dstate=16),
    experts=8, chosen=2, expert=64, vocabulary=300, attention_layers=(1,),
)  # fmt: skip


def test_a_tensor_that_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, record_placement.MODEL, TINY)
    record_placement.write_checkpoint(record_placement.MODEL, tmp_path, 1, 0, "cpu")
    subject = find(record_placement.request_of(tmp_path, 64, "one-gpu"))
    captures: record_placement.Captures = []
    assert record_placement.measure(subject, captures)["layers_compared"] == 0
    captures[0]["x"][0, 3, 2, 1] += 1
    measured = record_placement.measure(subject, captures)
    assert measured["differing"] == ["model.layers.0.mamba x"]
    assert record_placement.failures({"disk-offload": measured}) == ["disk-offload: differs in model.layers.0.mamba x"]
    captures[0]["x"][0, 3, 2, 1] -= 1
    measured = record_placement.measure(subject, [*captures, captures[0]])
    assert measured["differing"] == ["a layer that is missing"]


def test_a_run_that_raises_is_a_failure_and_what_was_measured_is_kept_when_it_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two runs on one GPU, one that raises, and one that is interrupted."""
    whole = row() | {"load_s": 1.0, "capture_s": 2.0, "placement": {"held": [{"place": "cuda:0", "layers": 4}]}}
    measured: Any = iter([whole, whole, MissingCapabilityError("needs an NVIDIA GPU", ""), KeyboardInterrupt()])

    def measure(*_: Any) -> dict[str, Any]:
        if isinstance(one := next(measured), BaseException):
            raise one
        return one

    monkeypatch.setitem(MODELS, record_placement.MODEL, TINY)
    monkeypatch.setattr(record_placement, "measure", measure)
    monkeypatch.setattr(record_placement, "capped", nullcontext)
    chosen = SimpleNamespace(record=SimpleNamespace(kind="cpu-offload"))
    monkeypatch.setattr(record_placement.placement, "choose", lambda *_: chosen)
    file = tmp_path / "placement.json"
    with pytest.raises(KeyboardInterrupt):
        record_placement.record(file, layers=4, seqlen=64, parent=tmp_path, command=["python"])
    document = json.loads(file.read_text())
    assert list(document["runs"]) == ["one-gpu", "cpu-offload"]
    assert document["runs"]["one-gpu"]["placement"] == whole["placement"]
    assert document["runs"]["cpu-offload"]["cap_bytes"] > 0
    assert document["failures"] == ["cpu-offload: MissingCapabilityError: needs an NVIDIA GPU"]


def row(**changes: Any) -> dict[str, Any]:
    return {"differing": [], "layers_compared": 3, "peak_by_predicted": 1.1} | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peak_by_predicted": 1.16}, "1.16 times the predicted"),
        ({"peak_by_predicted": 0.84}, "0.84 times the predicted"),
        ({"layers_compared": 0}, "compared nothing"),
        ({"chosen_by_itself": "one-gpu"}, "fits on one GPU"),
    ],
)
def test_failures(changes: dict[str, Any], words: str) -> None:
    assert record_placement.failures({"disk-offload": row(chosen_by_itself="disk-offload")}) == []
    (found,) = record_placement.failures({"disk-offload": row(**changes)})
    assert words in found
