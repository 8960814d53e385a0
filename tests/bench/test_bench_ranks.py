"""Ranks that share the cells of a bench: the first rank's report has all cells, in their order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore
from torchrun import starting

from ssdprof import operators
from ssdprof.jobs.run import run as bench_run
from ssdprof.core.report import LeftOut
from ssdprof.jobs.model import load
# TODO ssdprof.bench.schema: BenchCell, BenchReport
# TODO ssdprof.bench.shared: Outcomes
from ssdprof.store.ranks import POLL_S, Ranks
from ssdprof.errors import MissingCapabilityError
from ssdprof.progress import Unwatched
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
    for rank in range(2):
        store.set(f"{rank}/process", str(os.getpid()))
    return store


def kill(rank: int, store: HashStore) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    store.set(f"{rank}/process", str(process.pid))


def two(store: HashStore) -> tuple[Outcomes, Outcomes]:
    first, second = (Outcomes(CELLS, Ranks(rank, 2, store)) for rank in range(2))
    return first, second


def test_one_process_measures_all() -> None:
    alone = Outcomes(CELLS, None)
    measured(alone)
    assert list(alone.wait()) == []
    assert cells(alone) == [(cell, "measured") for cell in CELLS]


def test_the_first_rank_has_the_cells_of_all_in_their_order_and_the_others_wait_for_it(store: HashStore) -> None:
    first, second = two(store)
    measured(first)
    assert [cell for cell, _ in cells(first)] == ["a", "c", "e"]
    measured(second)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(lambda: list(second.wait()))
        list(first.wait())
        with pytest.raises(TimeoutError):
            waiting.result(timeout=3 * POLL_S)
        first.end()
        waiting.result(timeout=30)
    assert cells(first) == [(cell, "measured") for cell in CELLS]
    assert (first.writes, second.writes) == (True, False)


def test_the_cells_of_a_rank_that_died_are_left_out_and_name_it(store: HashStore) -> None:
    kill(1, store)
    first, second = two(store)
    second.add(1, LeftOut(cell="b", reason="measured"))
    measured(first)
    with pytest.raises(MissingCapabilityError, match="Rank 1 of 2 died") as caught:
        list(first.wait())
    assert str(first.broken_off(caught.value)) == str(caught.value)
    reasons = dict(cells(first))
    assert reasons["b"] == "measured"
    assert "Rank 1 of 2 died" in reasons["d"]
    assert list(reasons) == list(CELLS)


@pytest.mark.parametrize("busy", [True, False])
def test_a_first_rank_that_died_is_named_and_the_other_keeps_the_cells_of_both(store: HashStore, busy: bool) -> None:
    """busy: the other rank still measures; else it waits for the first rank's report."""
    first, second = two(store)
    first.add(0, LeftOut(cell="a", reason="measured"))
    if not busy:
        measured(second)
    kill(0, store)
    with pytest.raises(MissingCapabilityError, match="Rank 0 of 2 died") as caught:
        second.add(1, LeftOut(cell="b", reason="measured")) if busy else list(second.wait())
    assert not second.writes
    assert second.broken_off(caught.value)
    assert second.writes
    died = "Rank 0 of 2 died before its share was done"
    left = dict.fromkeys(CELLS, died) | {"a": "measured", "b": "measured"} | ({} if busy else {"d": "measured"})
    assert dict(cells(second)) == left


def test_torchrun_interrupts_the_others_when_the_first_died(store: HashStore) -> None:
    _, second = two(store)
    assert second.broken_off(KeyboardInterrupt()) is None
    kill(0, store)
    died = second.broken_off(KeyboardInterrupt())
    assert died is not None
    assert died.message == "Rank 0 of 2 died before its share was done."


def test_an_interrupted_rank_is_not_said_to_have_died(store: HashStore) -> None:
    first, second = two(store)
    measured(first)
    assert second.broken_off(KeyboardInterrupt()) is None
    kill(1, store)
    list(first.wait())
    assert dict(cells(first))["b"] == "its process was interrupted"


def test_the_bench_of_another_rank_is_written_only_where_the_first_died(
    store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error names the first rank, although torchrun interrupts this one."""

    def measure(*_: object) -> BenchCell:
        kill(0, store)
        raise KeyboardInterrupt

    written: list[BenchReport] = []

    def write(report: BenchReport) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        written.append(report)

    monkeypatch.setattr(bench_run, "require_gpu", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(bench_run, "measure_ceilings", lambda _: None)
    monkeypatch.setattr(bench_run, "ClockWatch", lambda: nullcontext(SimpleNamespace(clocks=None)))
    monkeypatch.setattr(bench_run, "_Cells", lambda *_: SimpleNamespace(outcome=measure))
    request = bench_run.BenchRequest(operator=operators.get("ssd"), cells=CELLS, precisions=lambda _: (), named=())
    first, second = (Ranks(rank, 2, store) for rank in range(2))
    Outcomes(CELLS, first).add(0, LeftOut(cell="a", reason="measured"))
    with pytest.raises(MissingCapabilityError, match="Rank 0 of 2 died"):
        bench_run.bench(request, Unwatched(), write, second)
    (report,) = written
    assert report.state == "partial"
    assert [left.cell for left in report.left_out] == list(CELLS)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_two_gpus_write_the_bench_of_one_but_for_times(tmp_path: Path) -> None:
    words = ("bench", "gdn", "--shape", "qwen3.5-9b", "--seq", "1k,4k", "--impl", "unfused,fused")
    with starting(tmp_path) as start:
        for name, ranks in (("one.json", False), ("two.json", True)):
            process = start(*words, "--out", name, ranks=ranks)
            _, err = process.communicate(timeout=300)
            assert process.returncode == 0, err
    one, two = (load((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    assert (one.ranks, two.ranks) == (1, 2)
    assert all(case.timing for cell in two.cells for case in cell.cases)
    times = {"timing": True, "speedups": True, "over_exact": True, "roofline": True, "first_call": True}

    def rest(report: BenchReport) -> list[dict[str, Any]]:
        return [cell.model_dump(exclude={"cases": {"__all__": times}}) for cell in report.cells]

    assert rest(one) == rest(two)
