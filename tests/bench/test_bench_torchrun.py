"""`torchrun -m ssdprof bench` as a user starts it: two processes, kernels in the interpreter, a fake stopwatch."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torchrun import Start, ranks_of, starting, wait_for

from ssdprof.jobs.model import load
# TODO ssdprof.bench.schema: BenchReport
from ssdprof.kernels._triton import INTERPRETED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INTERPRETED, reason="only the interpreter's kernels run on a CPU"),
]

HERE = Path(__file__).parent
BENCH = ("bench", "ssd", "--shape", "1x16x16x1", "--chunk-size", "128", "--json")


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (HERE.parent.parent, HERE.parent, HERE))))
    with starting(tmp_path, (str(HERE / "bench_without_gpu.py"),)) as start:
        yield start


def comparable(report: BenchReport) -> dict[str, Any]:
    """The report without its duration, start time, command and number of processes."""
    first_calls = {"first_call": True, "trials": {"__all__": {"first_call"}}}
    cells = {"__all__": {"cases": {"__all__": first_calls}}}
    return report.model_dump(exclude={"created": True, "command": True, "seconds": True, "ranks": True, "cells": cells})


def test_two_ranks_write_the_bench_of_one_process(start: Start, tmp_path: Path) -> None:
    found = {}
    for name, ranks in (("one.json", False), ("two.json", True)):
        process = start(*BENCH, "--seq", "40,50,60", "--cells", "2x40", "--out", name, ranks=ranks)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        found[name] = load(out)
        assert found[name] == load((tmp_path / name).read_text())
    assert len(found["one.json"].cells) == 4
    assert (found["one.json"].ranks, found["two.json"].ranks) == (1, 2)
    assert comparable(found["two.json"]) == comparable(found["one.json"])


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_dies_ends_the_bench_and_is_named(start: Start, tmp_path: Path, killed: int) -> None:
    """A cell takes seconds.  After the first one, both ranks have begun, and neither is near its end."""
    result = tmp_path / "result.json"
    process = start(*BENCH, "--seq", "3000,3001,3002,3003,3004,3005", "--out", "result.json")
    ranks = wait_for(lambda: ranks_of(process.pid) if result.exists() else None)
    os.kill(ranks[killed], signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    died = f"Rank {killed} of 2 died before its share was done"
    assert died in err
    report = load(result.read_text())
    assert report.state == "partial"
    assert report.cells
    assert len(report.cells) + len(report.left_out) == 6
    assert {left.reason for left in report.left_out} == {died}
