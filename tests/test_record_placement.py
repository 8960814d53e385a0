"""The script that records placements: its comparisons, its failures, and the results after an early end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import record_placement
from random_models import GRANITE_SMALL, MODELS, Mamba2

from ssdprof.jobs import limits
from ssdprof.jobs.subject import find

TINY = replace(
    GRANITE_SMALL, hidden=64, heads=4, kv_heads=2, mlp=96, mixer=Mamba2(hidden=64, nheads=8, headdim=16, dstate=16),
    experts=8, chosen=2, expert=64, vocabulary=300, attention_layers=(1,),
)  # fmt: skip
LAYERS = 4
Recorded = tuple[list[str], dict[str, Any]]


@contextmanager
def capped_main_memory(size: int) -> Iterator[None]:
    """In capped main memory, only the disk can hold the remaining weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "free_bytes", lambda: size)
        yield


def record(folder: Path) -> list[str]:
    file = folder / "placement.json"
    found: list[str] = record_placement.record(file, layers=LAYERS, seqlen=64, parent=folder, command=["python"])
    return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Failures and the document of a record without a GPU."""
    folder = tmp_path_factory.mktemp("record")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, record_placement.MODEL, TINY)
        patch.setattr(record_placement, "capped", capped_main_memory)
        found = record(folder)
    return found, json.loads((folder / "placement.json").read_text())


@pytest.mark.slow
def test_offloaded_weights_give_the_same_captures(recorded: Recorded) -> None:
    _, document = recorded
    runs = document["runs"]
    for kind in ("one-gpu", "disk-offload"):
        assert (runs[kind]["layers_compared"], runs[kind]["differing"]) == (LAYERS - 1, [])
    disk = runs["disk-offload"]
    assert disk["chosen_by_itself"] == disk["placement"]["kind"] == "disk-offload"
    assert disk["placement"]["streamed_layer_bytes"] > 0
    assert disk["placement"]["forward_calls"] == 4
    held = {held["place"]: held["weight_bytes"] for held in disk["placement"]["held"]}
    assert 0 < held["disk"] < document["weight_bytes"] == sum(held.values())


@pytest.mark.slow
def test_a_run_that_raises_is_a_failure_and_the_next_one_is_made(recorded: Recorded) -> None:
    (failure,), document = recorded
    assert list(document["runs"]) == ["one-gpu", "cpu-offload", "disk-offload"]
    assert failure.startswith("cpu-offload: MissingCapabilityError: --placement cpu-offload needs an NVIDIA GPU")
    assert document["failures"] == [failure]


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


def test_what_was_measured_is_kept_when_it_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = [{"place": "cuda:0", "layers": 1}, {"place": "disk", "layers": 3}]
    whole = {"load_s": 1.0, "capture_s": 2.0, "peak_bytes": [5_210_000_000], "placement": {"held": held}}
    measured = iter([row() | whole] * 2)

    def measure(*_: Any) -> dict[str, Any]:
        if (one := next(measured, None)) is None:
            raise KeyboardInterrupt
        return one

    monkeypatch.setitem(MODELS, record_placement.MODEL, TINY)
    monkeypatch.setattr(record_placement, "measure", measure)
    monkeypatch.setattr(
        record_placement.placement, "choose", lambda *_: SimpleNamespace(record=SimpleNamespace(kind=""))
    )
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path)
    document = json.loads((tmp_path / "placement.json").read_text())
    assert list(document["runs"]) == ["one-gpu"]
    assert document["failures"] == []
    assert document["runs"]["one-gpu"]["placement"] == {"held": held}


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
