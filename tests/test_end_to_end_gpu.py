"""The whole pipeline on a GPU."""

import json
import signal
from pathlib import Path

import pytest
from command_line import ending, passing
from torchrun import starting, wait_for

from ssdprof.core.report import Report
from ssdprof.store import reports

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("in_empty_folder")]


def run(*options: str) -> Report:
    return Report.model_validate_json(passing("run demo", *options, "--json").out)


def test_everything_that_passed_is_timed():
    report = run("--layers first:2 --states all")
    assert report.prompts[0].seqlen == 16384
    assert report.environment.gpu is not None
    assert report.ceilings is not None
    assert report.clocks is not None
    assert report.peak_bytes
    assert len(report.cases) == 24
    for case in report.cases:
        assert case.variant != "interpreter"
        assert case.device_us is not None, case.why
        assert (report.speedup(case) is None) == (
            str(case.precision) in BASELINES and case.implementation == "unfused"
        )


BASELINES = {f"exact, {state} states" for state in ("fp32", "fp16", "bf16")}


def test_segments_and_one_piece_see_the_same_inputs():
    """Accuracy depends on the inputs, which differ only in the rounding of sums in another
    order.
    """
    words = "--seq 4k --layers 3 --dtypes exact --states fp32"
    whole = run(words)
    pieces = run(words, "--segment 1000")
    assert (whole.segment_length, pieces.segment_length) == (4096, 1000)
    # only `out`: the final state of a fast head has few terms, and its rounding error varies by
    # chance
    ours = [
        [
            found.vs_oracle.rms_ratio
            for case in report.cases
            for found in case.accuracy
            if found.tensor == "out"
        ]
        for report in (whole, pieces)
    ]
    assert len(ours[0]) == 2
    assert ours[0] == pytest.approx(ours[1], rel=0.05)


def test_interrupted_while_timing(tmp_path: Path):
    """The first layer is done; the second is being timed."""
    header = tmp_path / "run" / reports.HEADER
    with starting(tmp_path) as start:
        process = start("run demo --seq 64k --out run", ranks=False)
        wait_for(
            lambda: (header.exists() and reports.load("run")[1].cases) or process.poll() is not None
        )
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "marked as partial" in error
    report = reports.load("run")[1]
    assert not report.complete
    assert report.cases


def test_a_small_bench():
    options = "--shape 16x64x128x1 --seq 256 --cells 2x200 --packed 4x16-64 --dtypes all"
    answer = passing("bench ssd", options, "--out cells --json")
    report = reports.load("cells")[1]
    assert report == Report.model_validate(json.loads(answer.out))
    assert (report.complete, report.missing) == (True, ())
    assert list(dict.fromkeys(case.size for case in report.cases)) == [
        "1 x 256",
        "2 x 200",
        "4 packed x 16-64",
    ]
    assert [case.implementation for case in report.cases] == (["unfused"] * 2 + ["fused"] * 2) * 3
    for case in report.cases:
        assert case.result == "passed", case.why
        assert all((case.samples, case.flops, case.workspace_bytes is not None))
        assert all(launch.registers for launch in case.launches)
        assert bool(case.trials) is (case.implementation == "unfused")
        assert case.implementation == "unfused" or report.speedup(case)
    answer = ending(1, "bench ssd", options, "--check short --gate speedup:1000")
    assert "GATE FAILED: speedup:1000" in answer.err
