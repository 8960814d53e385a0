"""Ranks that share the cells of a bench: the first one's report has all of them, in their order."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from torch.distributed import HashStore

from ssdprof.bench.schema import BenchReport, LeftOut
from ssdprof.bench.shared import Outcomes
from ssdprof.environment.ranks import Ranks
from ssdprof.errors import MissingCapabilityError
from ssdprof.schema import Environment

CELLS: Any = ("a", "b", "c", "d", "e")
EMPTY = BenchReport(
    operator="ssd",
    ssdprof_version="",
    created="",
    command=(),
    environment=Environment(gpu=None, cpu="", platform="", python="", packages={}),
    peers={},
    baseline="unfused",
)


def measured(outcomes: Outcomes) -> None:
    for number, cell in outcomes.mine:
        outcomes.add(number, LeftOut(cell=str(cell), reason="measured"))


def cells(outcomes: Outcomes) -> list[tuple[str, str]]:
    return [(left.cell, left.reason) for left in outcomes.put_in(EMPTY).left_out]


@pytest.fixture
def store() -> HashStore:
    store = HashStore()
    store.set("0/process", str(os.getpid()))
    return store


def test_one_process_measures_all() -> None:
    alone = Outcomes(CELLS, None)
    measured(alone)
    assert list(alone.wait()) == []
    assert cells(alone) == [(cell, "measured") for cell in CELLS]


def test_the_first_rank_has_the_cells_of_all_in_their_order(store: HashStore) -> None:
    first, second = (Outcomes(CELLS, Ranks(rank, 2, store)) for rank in range(2))
    measured(first)
    assert [cell for cell, _ in cells(first)] == ["a", "c", "e"]
    measured(second)
    list(second.wait())
    list(first.wait())
    assert cells(first) == [(cell, "measured") for cell in CELLS]


def test_the_cells_of_a_rank_that_died_are_left_out_and_name_it(store: HashStore) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    store.set("1/process", str(gone.pid))
    first, second = (Outcomes(CELLS, Ranks(rank, 2, store)) for rank in range(2))
    second.add(1, LeftOut(cell="b", reason="measured"))
    measured(first)
    with pytest.raises(MissingCapabilityError, match="Rank 1 of 2 died"):
        list(first.wait())
    reasons = dict(cells(first))
    assert reasons["b"] == "measured"
    assert "Rank 1 of 2 died" in reasons["d"]
    assert list(reasons) == list(CELLS)
