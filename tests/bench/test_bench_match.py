"""Which outputs of a bench are matched with which."""

from __future__ import annotations

import pytest
import torch
from fakes import CELL, EXACT, contender

from ssdprof.bench import judge as judging
from ssdprof.operators.ssd.drawing import CHUNK_SIZES, draw
from ssdprof.operators.ssd.operator import OPERATOR as SSD
from ssdprof.schema import PrecisionRecord

HALF = PrecisionRecord(intermediates="exact", state_dtype="bf16")
UNFUSED = contender("unfused", lambda _: 1.0, chunk_sizes=CHUNK_SIZES)
FUSED = contender("fused", lambda _: 1.0)
CHUNKED = contender("chunked", lambda _: 1.0, chunk_sizes=CHUNK_SIZES)
HALF_FUSED = contender("fused", lambda _: 1.0, precision=HALF)
LINE_UP = (FUSED, UNFUSED, CHUNKED, HALF_FUSED)


def test_with_unfused_at_equal_states_and_the_same_chunk_size_if_there_is_one() -> None:
    inputs = draw(CELL, torch.device("cpu"))
    entries = [entry for one in LINE_UP for entry in one.entries(SSD, inputs)]
    found = judging.baselines_of(entries, "unfused")
    named = {
        (one.contender.name, one.contender.precision, one.chunk_size): (other.contender.name, other.chunk_size)
        for one, other in found.items()
    }
    assert named == {
        ("fused", EXACT, None): ("unfused", 128),
        ("chunked", EXACT, 128): ("unfused", 128),
        ("chunked", EXACT, 256): ("unfused", 256),
    }


@pytest.mark.parametrize("capacity", [1, 2, 3, 9])
def test_however_few_outputs_fit_into_memory(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "outputs_that_fit", lambda _: capacity)
    inputs = draw(CELL, torch.device("cpu"))
    entries = [entry for one in LINE_UP for entry in one.entries(SSD, inputs)]
    judged = judging.judge(entries)
    assert [one.entry for one in judged] == entries
    errors = [one.verdict.error for one in judged]
    assert [bool(error and error.matches) for error in errors] == [True, False, False, True, True, False]
