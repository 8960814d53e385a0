"""A whole bench on a machine without a GPU: kernels in the interpreter, and a stopwatch with invented numbers."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import call
from fakes import noting, pretend_gpu
from typer.testing import CliRunner

from ssdprof import kernels
from ssdprof.jobs.run import run
from ssdprof.jobs.model import load
# TODO ssdprof.bench.schema: BenchReport
from ssdprof.cli import app
from ssdprof.environment.machine import kernels_hash
from ssdprof.kernels import registry
from ssdprof.kernels._triton import INTERPRETED
# TODO ssdprof.measure: rehearsal
from ssdprof.operators.generate import Cell

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="only the interpreter's kernels run on a CPU")


@pytest.fixture(autouse=True)
def pretended_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_gpu(monkeypatch)
    monkeypatch.chdir(tmp_path)


def bench(*words: str) -> tuple[int, str, str]:
    return call("bench", "ssd", "--shape", "1x16x16x1", "--chunk-size", "128", *words)


def test_from_words_to_a_file() -> None:
    code, out, err = bench("--seq", "40,50", "--cells", "2x40", "--min-speedup", "3", "--out", "result.json", "--json")
    assert code == 0, err
    report = load(out)
    assert report == load(Path("result.json").read_text())
    assert (report.state, report.baseline) == ("complete", "unfused")
    assert report.kernels == kernels_hash("ssd")
    assert [cell.tokens for cell in report.cells] == ["1 x 40", "1 x 50", "2 x 40"]
    for cell in report.cells:
        unfused, fused = cell.cases
        assert (unfused.chunk_size, fused.chunk_size, fused.variant) == (128, None, "interpreter")
        over = fused.over("unfused")
        assert over is not None
        assert over.device_ratio == 3
        assert cell.checked is None
        assert fused.plan
    assert report.matched_with == "unfused"


def test_outputs_are_matched_with_another_one_than_the_baseline_and_at_several_chunk_sizes() -> None:
    words = [
        "--seq",
        "40",
        "--match-with",
        "fused",
        "--chunk-size",
        "16,32",
        "--check",
        "short",
        "--clock",
        "warm",
        "--json",
    ]
    code, out, err = bench(*words)
    assert code == 0, err
    report = load(out)
    assert (report.baseline, report.matched_with) == ("unfused", "fused")
    unfused, fused = report.cells[0].cases
    assert fused.timing is not None
    assert fused.timing.warm is not None
    assert fused.timing.warm.median_us == 50
    assert [trial.chunk_size for trial in unfused.trials] == [16, 32]
    (tensor, states) = unfused.accuracy
    assert tensor.vs_baseline is not None
    assert tensor.vs_baseline.against == "fused exact, fp32 states"
    assert 0 < tensor.vs_baseline.matches[2].match_pct <= 100
    assert states.vs_baseline is not None
    assert fused.accuracy[0].vs_baseline is None


@pytest.mark.slow
def test_gdn_and_its_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, cost in (("unfused", 300.0), ("fused", 100.0), ("recurrent", 50.0)):
        monkeypatch.setitem(registry._implementations, ("gdn", name), noting(name, cost, "gdn"))
    words = ["bench", "gdn", "--shape", "1/2x16x16", "--seq", "1,40", "--batch", "2", "--packed", "3x4-9", "--json"]
    result = CliRunner().invoke(app, words, prog_name="ssdprof", catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    report = load(result.stdout)
    assert report.kernels == kernels_hash("gdn")
    assert [(cell.tokens, [case.implementation for case in cell.cases]) for cell in report.cells] == [
        ("2 x 1", ["unfused", "fused", "recurrent"]),
        ("2 x 40", ["unfused", "fused"]),
        ("3 packed x 4-9", ["unfused", "fused"]),
    ]
    assert {case.status for cell in report.cells for case in cell.cases} == {"passed"}
    decoding = report.cells[0].cases
    assert decoding[1].variant == "recurrent", "fused takes it too"
    over = decoding[2].over("unfused")
    assert over is not None
    assert over.device_ratio == 6


def test_an_interrupted_bench_leaves_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = run._Cells.measure

    def interrupted(self: run._Cells, cell: Cell, *rest: object) -> object:
        if cell.tokens.seqlen == 40:
            raise KeyboardInterrupt
        return measure(self, cell, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(run._Cells, "measure", interrupted)
    code, _, err = bench("--seq", "20,40", "--out", "result.json")
    assert code == 130
    assert err.endswith("interrupted: Kept in result.json, marked as partial: 1 of 2 cells.")
    kept = load(Path("result.json").read_text())
    assert (kept.state, len(kept.cells)) == ("partial", 1)


@pytest.mark.slow
def test_short_checks_are_shared_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "CHECKED_SEQLEN", 16)
    compared = []
    judge = run.judge

    def counting(entries, **rest):  # type: ignore[no-untyped-def]
        compared.append(entries[0].call.inputs.x.shape[:2])
        return judge(entries, **rest)

    monkeypatch.setattr(run, "judge", counting)
    code, out, _ = bench("--seq", "20,40", "--check", "short", "--json")
    assert code == 0
    assert compared == [(1, 16)]
    assert [cell.checked for cell in load(out).cells] == [16, 16]


def test_what_does_not_fit_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    monkeypatch.setattr(run._Cells, "measure", full)
    code, out, err = bench("--seq", "20", "--json")
    report = load(out)
    assert (code, "Nothing was compared." in err) == (1, True)
    assert report.cells == ()
    assert [one.reason for one in report.left_out] == ["out of memory: CUDA out of memory."]


def test_a_spent_budget_leaves_cells_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    measure = run._Cells.measure

    def slowly(self: run._Cells, cell: Cell, *rest: object) -> object:
        measured = measure(self, cell, *rest)  # type: ignore[arg-type]
        clock[0] += 100
        return measured

    monkeypatch.setattr(run.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(run._Cells, "measure", slowly)
    code, out, err = bench("--seq", "20,40,60", "--budget", "150", "--min-speedup", "2", "--json")
    report: BenchReport = load(out)
    assert [cell.tokens for cell in report.cells] == ["1 x 20", "1 x 40"]
    assert [one.cell for one in report.left_out] == ["1x16x16x1, 1 x 60, bf16"]
    assert code == 1
    assert "left out: the budget of 150 s was spent" in err


def test_a_cell_whose_first_call_eats_the_budget_is_left_out_and_says_whose(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiling(*_: object) -> object:
        time.sleep(5)
        raise AssertionError("the bench was over")

    plain = kernels.get("ssd", "unfused")
    monkeypatch.setitem(registry._implementations, ("ssd", "unfused"), replace(plain, run=compiling))
    code, out, _ = bench("--seq", "20", "--budget", "1", "--json")
    assert code == 1  # nothing was compared
    (one,) = load(out).left_out
    assert one.reason == "the budget of 1 s was spent in the first call of unfused exact, fp32 states, chunk 128"


def test_a_first_call_that_takes_too_long_is_a_failure_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiling(*_: object) -> object:
        time.sleep(5)
        raise AssertionError("the call was broken off")

    plain = kernels.get("ssd", "fused")
    monkeypatch.setitem(registry._implementations, ("ssd", "fused"), replace(plain, run=compiling))
    code, out, err = bench("--seq", "40", "--first-call", "1", "--json")
    assert code == 1
    unfused, fused = load(out).cells[0].cases
    assert (unfused.status, fused.status) == ("passed", "failed")
    assert "its first call was stopped after 1 s" in err


@pytest.mark.parametrize(("least", "code"), [("3.01", 1), pytest.param("3", 0, marks=pytest.mark.slow)])
def test_the_gate_is_the_exit_code(least: str, code: int) -> None:
    ended, out, err = bench("--seq", "20", "--min-speedup", least, "--markdown")
    assert ended == code
    assert "**Fused over unfused" in out
    assert ("GATE FAILED: min-speedup 3.01: " in err) == bool(code)


def test_a_match_that_the_bench_records_is_gated() -> None:
    ended, out, err = bench("--seq", "20", "--min-match", "0:100", "--json")
    assert (ended, err.count("GATE FAILED")) == (0, 0)
    assert load(out).gates.min_match == {"0": 100}
    assert bench("--seq", "20", "--min-match", "1e-4:99")[0] == 2


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch, users_folder: Path) -> None:
    """A user's kernels in the current directory, not rehearsed in a separate process here."""
    monkeypatch.setattr(rehearsal, "_rehearsed", lambda *_: rehearsal.Verdict(status="passed"))
    (users_folder / "own_kernels.py").write_text(
        "from fakes import RAN\n"
        "from ssdprof.measure.oracle import oracle_output\n"
        "def quick(inputs):\n    RAN.append(('quick', 50.0))\n    return oracle_output(inputs)\n"
        "def wrong(inputs):\n    out, states = quick(inputs)\n    return 2 * out, states\n"
    )


@pytest.mark.usefixtures("own")
def test_an_own_kernel_is_timed_beside_ours() -> None:
    code, out, err = bench("--seq", "40", "--impl", "unfused,own_kernels:quick", "--json")
    assert code == 0, err
    report = load(out)
    unfused, quick = report.cells[0].cases
    assert (unfused.implementation, quick.implementation) == ("unfused", "own_kernels:quick")
    assert (quick.status, quick.chunk_size, report.peers) == ("passed", None, {})
    over = quick.over("unfused")
    assert over is not None
    assert over.device_ratio == 6


@pytest.mark.usefixtures("own")
def test_an_own_kernel_may_be_the_baseline_named_or_not_in_impl() -> None:
    code, out, err = bench("--seq", "40", "--impl", "fused", "--baseline", "own_kernels:quick", "--json")
    assert code == 0, err
    report = load(out)
    assert report.baseline == "own_kernels:quick"
    fused, _ = report.cells[0].cases
    over = fused.over("own_kernels:quick")
    assert over is not None
    assert over.device_ratio == 0.5


@pytest.mark.usefixtures("own")
def test_a_wrong_own_kernel_fails_the_bench_and_has_no_time() -> None:
    code, out, err = bench("--seq", "40", "--impl", "unfused,own_kernels:wrong", "--json")
    assert code == 1
    assert "own_kernels:wrong, exact, fp32 states: inaccurate: out, head" in err
    assert load(out).cells[0].cases[1].timing is None


def test_a_library_that_is_not_there_is_a_sentence_unless_it_is_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    code, out, err = bench("--seq", "40", "--impl", "unfused,mamba_ssm", "--json")
    assert code == 0, err
    report = load(out)
    assert [case.implementation for case in report.cells[0].cases] == ["unfused"]
    assert report.absent[0].startswith("mamba_ssm cannot be imported: ")
    for words in (["--against", "mamba_ssm"], ["--baseline", "mamba_ssm"]):
        code, out, err = bench("--seq", "40", *words)
        assert (code, out) == (3, "")
        assert "mamba_ssm cannot be imported" in err
