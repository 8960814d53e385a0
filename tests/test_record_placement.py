"""The script that records placements: its comparisons, its failures, and the results after an early
end.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import record_placement
from random_models import GRANITE_SMALL, MODELS, Mamba2

from ssdprof.jobs.target import find

TINY = replace(
    GRANITE_SMALL,
    hidden=64,
    heads=4,
    kv_heads=2,
    mlp=96,
    mixer=Mamba2(hidden=64, nheads=8, headdim=16, dstate=16),
    experts=8,
    chosen=2,
    expert=64,
    vocabulary=300,
    attention_layers=(1,),
)


def test_a_tensor_that_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(MODELS, record_placement.MODEL, TINY)
    record_placement.write_checkpoint(record_placement.MODEL, tmp_path, 1, 0, "cpu")
    target = find(record_placement.request_of(tmp_path, 64, "one-gpu"))
    captures = []
    assert record_placement.measure(target, captures)["layers_compared"] == 0
    captures[0]["x"][0, 3, 2, 1] += 1
    measured = record_placement.measure(target, captures)
    assert measured["differing"] == ["model.layers.0.mamba x"]
    assert record_placement.failures({"disk-offload": measured}) == [
        "disk-offload: differs in model.layers.0.mamba x"
    ]
    captures[0]["x"][0, 3, 2, 1] -= 1
    measured = record_placement.measure(target, [*captures, captures[0]])
    assert measured["differing"] == ["a layer that is missing"]


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
def test_failures(changes: dict[str, Any], words: str):
    assert record_placement.failures({"disk-offload": row(chosen_by_itself="disk-offload")}) == []
    (found,) = record_placement.failures({"disk-offload": row(**changes)})
    assert words in found
