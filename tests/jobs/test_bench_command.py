"""`ssdprof bench` as a user calls it: a small bench, and benches of ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Answer
from torchrun import MODULE, starting

from ssdprof.core.report import Report
from ssdprof.kernels.device import INTERPRETED
from ssdprof.store.reports import load

pytestmark = pytest.mark.usefixtures("in_empty_folder")


@pytest.mark.gpu
def test_a_small_bench() -> None:
    options = "--shape 16x64x128x1 --seq 256 --cells 2x200 --packed 4x16-64 --dtypes all"
    words = ("bench", "ssd", *options.split())
    answer = Answer(*words, "--out", "cells", "--json")
    assert answer.code == 0, answer.err
    report = load("cells")[1]
    assert report == Report.model_validate(json.loads(answer.out))
    assert (report.complete, report.missing) == (True, ())
    assert list(dict.fromkeys(case.size for case in report.cases)) == ["1 x 256", "2 x 200", "4 packed x 16-64"]
    assert [case.implementation for case in report.cases] == (["unfused"] * 2 + ["fused"] * 2) * 3
    for case in report.cases:
        assert case.result == "passed", case.why
        assert all((case.samples, case.flops, case.workspace_bytes is not None))
        assert all(launch.registers for launch in case.launches)
        assert bool(case.trials) is (case.implementation == "unfused")
        assert case.implementation == "unfused" or report.speedup(case)
    answer = Answer(*words, "--check", "short", "--min-speedup", "1000")
    assert answer.code == 1
    assert "GATE FAILED: min-speedup 1000" in answer.err
    assert "x over unfused" in answer.out


# --- two processes of torchrun

TESTS = Path(__file__).parents[1]
MEASURED = {"samples", "first_call", "trials"}


def of_both(folder: Path, program: tuple[str, ...], *words: str) -> tuple[Report, Report]:
    """The bench of one process and that of two ranks."""
    with starting(folder, program) as start:
        for name, ranks in (("one", False), ("two", True)):
            process = start("bench", *words, "--out", name, ranks=ranks)
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err
            assert out
    one, two = (load(folder / name)[1] for name in ("one", "two"))
    assert (one.ranks, two.ranks, two.complete, two.missing) == (1, 2, True, ())
    assert all(case.samples for case in (*one.cases, *two.cases))
    return one, two


def cases(report: Report) -> list[dict[str, Any]]:
    return [case.model_dump(exclude=MEASURED) for case in report.cases]


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter's kernels run on a CPU")
def test_two_ranks_write_the_bench_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (TESTS.parent, TESTS))))
    words = ("ssd", "--shape", "1x16x16x1", "--chunk-size", "128", "--seq", "40,50,60", "--cells", "2x40")
    one, two = of_both(tmp_path, (str(TESTS / "bench_without_gpu.py"),), *words)
    assert len({case.place for case in one.cases}) == 4
    assert cases(one) == cases(two)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_two_gpus_write_the_bench_of_one_but_for_times(tmp_path: Path) -> None:
    words = ("gdn", "--shape", "qwen3.5-9b", "--seq", "1k,4k", "--impl", "unfused,fused")
    one, two = of_both(tmp_path, MODULE, *words)
    assert cases(one) == cases(two)
