"""Gates on the rows of a run: the rows that break them, and the run's verdict."""

from __future__ import annotations

from typing import Any

import pytest
from report.make import RELAXED_FP32, failed, make_report, with_steps
from ssdprof.report.verdict import verdict_lines
from ssdprof.runs import document
from ssdprof.schema import EXACT_FP32, Gates
from ssdprof.schema.gating import broken
from ssdprof.schema.outcome import outcome
from ssdprof.schema.rows import of_run
from typer.testing import CliRunner

from ssdprof import runs
from ssdprof.cli import app

HELD = Gates(min_speedup=2.4, min_match={"1e-3": 99.7, "0": 60}, max_rms_ratio=1.5)


def rows_of(**limits: Any) -> dict[str, list[str]]:
    """Gate -> rows that break it, for two layers at two precisions."""
    found: dict[str, list[str]] = {}
    report = make_report(layers=(0, 9), precisions=(EXACT_FP32, RELAXED_FP32))
    for one in broken(of_run(report), Gates.model_validate(limits)):
        found.setdefault(one.gate, []).append(f"{one.row}: {one.found}")
    return found


def test_gates_that_hold() -> None:
    assert rows_of(**HELD.model_dump()) == {}


def test_the_baseline_of_decode_steps_is_not_judged() -> None:
    """It has no speedup and no comparison."""
    report = with_steps(make_report(layers=(0, 9), precisions=(EXACT_FP32, RELAXED_FP32), gates=HELD))
    assert broken(of_run(report), HELD) == ()
    gated = {row.implementation for row in of_run(report) if row.gated}
    assert gated == {"fused", "recurrent"}


@pytest.mark.parametrize(
    ("limits", "gate", "rows"),
    [
        (
            {"min_speedup": 2.62},
            "min-speedup 2.62",
            [
                "layer 0, 131,072 tokens, fused, exact, fp32 states: 2.4x over unfused exact, fp32 states",
                "layer 9, 131,072 tokens, fused, exact, fp32 states: 2.616x over unfused exact, fp32 states",
            ],
        ),
        (
            {"min_match": {"1e-3": 99.75}},
            "min-match 1e-3:99.75",
            [f"layer {layer}, 131,072 tokens, fused, relaxed, fp32 states: 99.743%" for layer in (0, 9)],
        ),
        (
            {"max_rms_ratio": 1.3},
            "max-rms-ratio 1.3",
            [
                "layer 0, 131,072 tokens, fused, relaxed, fp32 states: 1.3283 times the floor",
                "layer 9, 131,072 tokens, fused, relaxed, fp32 states: 1.3397 times the floor",
            ],
        ),
    ],
)
def test_a_gate_names_the_rows_that_break_it(limits: dict[str, Any], gate: str, rows: list[str]) -> None:
    assert rows_of(**limits) == {gate: rows}


def test_a_gate_that_can_judge_nothing_is_broken() -> None:
    (one,) = broken(of_run(make_report(change=lambda case: failed(case, "refused"))), Gates(max_rms_ratio=9))
    assert str(one) == "max-rms-ratio 9: no case passed that it could judge"
    untimed = broken(of_run(make_report(layers=(0,), gpu=False)), Gates(min_speedup=1))
    assert {one.found for one in untimed} == {"not timed"}


def test_a_run_with_a_broken_gate_has_not_passed() -> None:
    report = make_report(layers=(0,), precisions=(EXACT_FP32,), gates=Gates(min_speedup=2.5))
    assert not outcome(report).passed
    verdict = verdict_lines(report)
    assert verdict == (
        "GATE FAILED: min-speedup 2.5: layer 0, 131,072 tokens, fused, exact, fp32 states: 2.4x over unfused exact, "
        "fp32 states.",
        "All 2 cases are within the error budget against the fp64 oracle.",
    )
    assert outcome(make_report(gates=HELD)).passed
    assert document.load(document.dump(report)).gates == Gates(min_speedup=2.5)


def test_the_first_rows_are_named_and_the_others_counted() -> None:
    (line, _) = verdict_lines(make_report(layers=range(9), precisions=(EXACT_FP32,), gates=Gates(min_speedup=9)))
    assert line.count("2.") >= 6
    assert line.endswith("; and 3 cases more.")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("accuracy",), 0, ""),
        (
            ("accuracy", "--min-match", "1e-3:99.9"),
            1,
            "GATE FAILED: min-match 1e-3:99.9: layer 0, 131,072 tokens, fused, ",
        ),
        (("accuracy", "--max-rms-ratio", "1.2", "--json"), 1, "GATE FAILED: max-rms-ratio 1.2: layer 0, "),
        (("accuracy", "--dtypes", "exact", "--min-match", "1e-3:99.9"), 0, ""),
        (("accuracy", "--min-match", "1e-4:99.9"), 2, "Choose from: 0, 1e-3, 1e-2."),
    ],
)
def test_gates_on_accuracy(words: tuple[str, ...], code: int, said: str, monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "read", lambda _: (tmp_path, make_report(layers=(0,))))
    result = CliRunner().invoke(app, words, prog_name="ssdprof", catch_exceptions=False)
    assert result.exit_code == code
    assert said in " ".join(result.stderr.split())
