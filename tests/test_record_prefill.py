"""The script that records prefill times: how runs share a budget, and interruptions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import record_prefill


@pytest.mark.parametrize(
    ("left_s", "allowed_s"),
    [
        (400, 160),  # reduced by the limits of the later ones
        (250, 130),  # its own limit has priority
        (90, 90),
    ],
)
def test_a_run_gets_its_limit_and_what_later_ones_do_not_need(left_s: float, allowed_s: float) -> None:
    first, *later = record_prefill.RUNS
    assert [run.limit_s for run in record_prefill.RUNS] == [130, 90, 150]
    assert record_prefill.allowance(first, later, left_s) == allowed_s


def test_a_command_that_does_not_end_is_interrupted_and_may_write_what_it_has(tmp_path: Path) -> None:
    waiting, written = tmp_path / "waiting", tmp_path / "written"
    program = (
        "import pathlib, time\n"
        "try:\n"
        f"    pathlib.Path({str(waiting)!r}).touch(); time.sleep(100)\n"
        "except KeyboardInterrupt:\n"
        f"    pathlib.Path({str(written)!r}).touch(); raise SystemExit(130)\n"
    )
    assert record_prefill.run_within([sys.executable, "-c", program], -7.0, to_stop_s=10) == 130
    assert written.exists()
