"""A recorded bench, and a machine that measures it."""

from __future__ import annotations

from pathlib import Path

import pytest
from reproduced.made import RECORDED
from reproducing import measuring

from ssdprof.bench.schema import BenchReport, dump
from ssdprof.bench.schema import load as load_bench
from ssdprof.errors import ExitCode


@pytest.fixture
def recorded() -> BenchReport:
    return load_bench(RECORDED.read_text(encoding="utf-8"))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, recorded: BenchReport) -> dict[str, BenchReport]:
    """A machine that measures "kernels": the reports that its commands write.  Without reports there is no GPU."""
    machine = {"kernels": recorded}

    def run(words: list[str], _seconds: float) -> int:
        if "kernels" not in machine:
            return ExitCode.MISSING_CAPABILITY
        Path(words[words.index("--out") + 1]).write_text(dump(machine["kernels"]), encoding="utf-8")
        return ExitCode.OK

    monkeypatch.setattr(measuring, "run_within", run)
    return machine
