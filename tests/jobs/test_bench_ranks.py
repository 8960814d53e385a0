"""`torchrun -m ssdprof bench` as a user starts it: two processes, kernels in the interpreter, a fake timer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrun import MODULE, starting

from ssdprof.core.report import Report
from ssdprof.kernels.device import INTERPRETED
from ssdprof.store.reports import load

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
