"""Which outputs of a bench are compared with each other."""

from __future__ import annotations

import pytest
import torch
from fakes import CELL, contender
from ssdprof.bench import judge as judging
from ssdprof.bench.contenders import Entry
from ssdprof.operators.ssd.drawing import CHUNK_SIZES, draw
from ssdprof.operators.ssd.operator import OPERATOR as SSD
from ssdprof.schema import EXACT_FP32, PrecisionRecord

HALF = PrecisionRecord(intermediates="exact", state_dtype="bf16")
UNFUSED = contender("unfused", lambda _: 1.0, chunk_sizes=CHUNK_SIZES)
FUSED = contender("fused", lambda _: 1.0)
CHUNKED = contender("chunked", lambda _: 1.0, chunk_sizes=CHUNK_SIZES)
HALF_FUSED = contender("fused", lambda _: 1.0, precision=HALF)


def entries_of_all() -> list[Entry]:
    inputs = draw(CELL, torch.device("cpu"))
    return [entry for one in (FUSED, UNFUSED, CHUNKED, HALF_FUSED) for entry in one.entries(SSD, inputs)]


def test_with_unfused_at_the_same_chunk_size_if_there_is_one() -> None:
    entries = entries_of_all()
    named = {
        (one.contender.name, one.contender.precision, one.chunk_size): (found.contender.name, found.chunk_size)
        for one in entries
        if (found := judging.reference_of(one, entries, "unfused"))
    }
    assert named == {
        ("fused", EXACT_FP32, None): ("unfused", 128),
        ("chunked", EXACT_FP32, 128): ("unfused", 128),
        ("chunked", EXACT_FP32, 256): ("unfused", 256),
        ("fused", HALF, None): ("unfused", 128),
    }


@pytest.mark.parametrize("capacity", [2, 3, 9])
def test_however_few_outputs_fit_into_memory(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "outputs_that_fit", lambda _: capacity)
    entries = entries_of_all()
    judged = judging.judge(entries, match_with="unfused")
    assert [one.entry for one in judged] == entries
    matched = [any(one.vs_baseline for one in found.verdict.accuracy) for found in judged]
    assert matched == [True, False, False, True, True, True]
