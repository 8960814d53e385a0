"""Exports of a run for other programs, read back with independent parsers."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import get_args

import junitparser
import pytest
from lxml import etree
from report.make import RELAXED_FP32, failed, in_calls, make_report
from typer.testing import CliRunner

from ssdprof import runs
from ssdprof.cli import app
from ssdprof.commands.export_formats import FORMATS, Format
from ssdprof.report import markdown
from ssdprof.report.exports import benchmark_action, csv_table, github, junit
from ssdprof.report.exports.exported import from_run
from ssdprof.schema import EXACT_FP32, Asked, CaseResult, Gates, RunReport, Status

SCHEMA = etree.XMLSchema(etree.parse(Path(__file__).with_name("JUnit.xsd")))
FUSED = "layer 0, 131,072 tokens, fused, exact, fp32 states"


def small(**fields: object) -> RunReport:
    return make_report(**({"layers": (0, 9), "precisions": (EXACT_FP32, RELAXED_FP32)} | fields))  # type: ignore[arg-type]


def ending(status: Status, reason: str = "", layer: int = 0) -> RunReport:
    """Changes the status of fused, exact, in one layer."""

    def change(case: CaseResult) -> CaseResult:
        mine = case.implementation == "fused" and case.precision == EXACT_FP32 and case.layer.index == layer
        return failed(case, status, reason) if mine else case

    return small(change=change)


def parsed(report: RunReport) -> dict[str, junitparser.TestCase]:
    """The test cases by name, after validation against the schema."""
    text = junit.render(from_run(report)).encode()
    SCHEMA.assertValid(etree.fromstring(text))
    suites = list(junitparser.JUnitXml.fromstring(text))
    for suite in suites:
        counts = (suite.tests, suite.failures, suite.errors, suite.skipped)
        suite.update_statistics()  # counts them itself
        assert counts == (suite.tests, suite.failures, suite.errors, suite.skipped)
    return {case.name: case for suite in suites for case in suite}


def test_each_call_of_a_layer_has_a_name_of_its_own() -> None:
    """Chunks and decode steps of one size would overwrite each other in a dashboard."""
    report = in_calls(make_report(layers=(0, 9), seqlens=(8,)), count=3)
    exported = from_run(report)
    names = [row.name for row in exported.rows]
    assert len(set(names)) == len(report.cases) == len(parsed(report)) - 1
    assert "layer 9, 8 tokens, chunk 2 of 3 of 24 tokens, fused, exact, fp32 states" in names
    entries = [entry["name"] for entry in json.loads(benchmark_action.smaller(exported))]
    assert len(set(entries)) == len(entries)
    calls = {row["call"] for row in csv.DictReader(io.StringIO(csv_table.render(exported)))}
    assert calls == {f"chunk {number} of 3 of 24 tokens" for number in (1, 2, 3)}


# --- JUnit


def test_junit_of_a_run_that_passed() -> None:
    tests = parsed(small())
    assert len(tests) == 8 + 1
    assert all(test.is_passed for test in tests.values())
    assert tests[FUSED].classname == "ssdprof.fused"
    assert tests[FUSED].time == pytest.approx((10_040 / 2.4 + 30) * 1e-6)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("inaccurate", junitparser.Failure),
        ("nonfinite", junitparser.Failure),
        ("failed", junitparser.Error),
        ("out of memory", junitparser.Error),
        ("refused", junitparser.Error),
    ],
)
def test_junit_of_a_case_that_did_not_pass(status: Status, kind: type) -> None:
    tests = parsed(ending(status, "head 5 is <over> its \x1b[1mbudget & more"))
    (found,) = tests[FUSED].result
    assert isinstance(found, kind)
    assert (found.type, found.message) == (status, "head 5 is <over> its \ufffd[1mbudget & more")
    assert sum(not test.is_passed for test in tests.values()) == 1


def test_junit_of_a_refusal_that_was_not_asked_for() -> None:
    asked = Asked(implementations=("unfused",), precisions=(EXACT_FP32, RELAXED_FP32), layers=())
    tests = parsed(ending("refused", "no such state size").model_copy(update={"asked": asked}))
    assert tests[FUSED].is_skipped


def test_junit_of_gates_and_of_a_run_that_is_not_whole() -> None:
    tests = parsed(small(gates=Gates(min_speedup=2.5, max_rms_ratio=9), state="partial"))
    (found,) = tests["min-speedup 2.5"].result
    assert found.type == "gate"
    assert found.message == f"min-speedup 2.5: {FUSED}: 2.4x over unfused exact, fp32 states"
    assert tests["max-rms-ratio 9"].is_passed
    (whole,) = tests["all requested cases are present"].result
    assert whole.message == "this run did not reach its end"
    (empty,) = parsed(small(cases=()))["all requested cases are present"].result
    assert empty.message == "Nothing was compared."


# --- CSV


def test_csv_holds_every_number_with_its_unit() -> None:
    report = small()
    rows = list(csv.DictReader(io.StringIO(csv_table.render(from_run(report)))))
    assert len(rows) == len(report.cases)
    row, case = rows[1], report.cases[1]
    assert case.timing is not None
    assert case.speedup is not None
    assert (row["run"], row["GPU"], row["layer"], row["tokens"]) == (report.run_id, "NVIDIA H200", "0", "131072")
    assert (row["implementation"], row["intermediates"], row["states"]) == ("fused", "exact", "fp32")
    assert float(row["device time [µs]"]) == case.timing.device_median_us
    assert float(row["call time, high [µs]"]) == case.timing.call_interval_us.high
    assert float(row["speedup, device [x]"]) == case.speedup.device_ratio
    assert float(row["speedup, call, low [x]"]) == case.speedup.call_interval.low
    assert float(row["output, match against baseline @ 0 [%]"]) == 99.696
    assert float(row["output, match against fp64 @ 1e-2 [%]"]) == 99.98
    assert float(row["final states, rms error [relative]"]) == 8.1e-4
    assert row["dimensions"] == "128 heads x 64, state 128, 1 group, chunk 256, bf16"
    assert rows[0]["speedup, device [x]"] == rows[0]["baseline"] == ""  # the baseline itself
    assert (rows[0]["kernels launched"], rows[1]["kernels launched"]) == ("5", "1")


def test_csv_counts_no_kernels_where_none_was_seen_as_in_the_interpreter() -> None:
    rows = csv.DictReader(io.StringIO(csv_table.render(from_run(make_report(gpu=False)))))
    assert {row["kernels launched"] for row in rows} == {""}


def test_csv_of_failures_and_of_nothing() -> None:
    text = csv_table.render(from_run(ending("refused", 'no "such", size\nat all')))
    row = next(row for row in csv.DictReader(io.StringIO(text)) if row["status"] != "passed")
    assert row["reason"] == 'no "such", size\nat all'
    assert row["device time [µs]"] == row["output, largest error"] == ""
    (header,) = csv.reader(io.StringIO(csv_table.render(from_run(small(cases=())))))
    assert header[:4] == ["run", "model", "GPU", "layer"]


# --- github-action-benchmark


def test_benchmark_action() -> None:
    """By its documentation: an array of objects with name, unit and value; range and extra are optional strings."""
    for render in (benchmark_action.smaller, benchmark_action.bigger):
        entries = json.loads(render(from_run(small())))
        assert len({entry["name"] for entry in entries}) == len(entries)
        for entry in entries:
            assert isinstance(entry["value"], int | float)
            assert all(isinstance(value, str) for name, value in entry.items() if name != "value")
            assert entry.keys() <= {"name", "unit", "value", "range", "extra"}
    smaller = {entry["name"]: entry for entry in json.loads(benchmark_action.smaller(from_run(small())))}
    time = smaller[f"{FUSED}: device time"]
    assert (time["unit"], time["value"], time["range"]) == ("µs", pytest.approx(10_040 / 2.4), "± 20.9")
    bigger = {entry["name"]: entry["value"] for entry in json.loads(benchmark_action.bigger(from_run(small())))}
    assert bigger[f"{FUSED}: speedup, device"] == 2.4
    assert bigger[f"{FUSED}: match @ 1e-3"] == 100.0
    broken = json.loads(benchmark_action.smaller(from_run(ending("nonfinite"))))
    assert FUSED not in str(broken)
    assert len(broken) == len(smaller) - 4


# --- GitHub


@pytest.mark.slow
def test_a_step_summary_keeps_to_the_limit() -> None:
    report = small()
    whole = markdown.render(report)
    assert github.step_summary(from_run(report)) == whole
    large = make_report(layers=range(60), seqlens=tuple(range(1024, 1034)))
    for used in (0, 500_000, 1_040_000, github.SUMMARY_BYTES - 300):
        text = github.step_summary(from_run(large), used)
        assert used + len(text.encode()) <= github.SUMMARY_BYTES
        assert text.startswith("## ssdprof") or used > 1_048_000
        assert "Left out to stay below" in text or "Cut here: a step summary of GitHub holds 1 MiB." in text
    assert github.step_summary(from_run(large), github.SUMMARY_BYTES - 5) == ""


def test_annotations() -> None:
    assert [line for line in github.workflow_commands(from_run(small())) if line.startswith("::error")] == []
    (line,) = (line for line in github.workflow_commands(from_run(ending("inaccurate"))) if line.startswith("::error"))
    assert line == (
        "::error title=ssdprof%3A ibm-granite/granite-4.0-h-small::FAILED: 1 of 8 cases: fused (exact, fp32 states) "
        "inaccurate in layer 0."
    )
    (gate,) = (
        line
        for line in github.workflow_commands(from_run(small(gates=Gates(min_match={"0": 99.9}))))
        if "error" in line
    )
    assert "GATE FAILED: min-match 0:99.9: layer 0, 131,072 tokens, fused, exact, fp32 states: 99.696%25; " in gate


def test_annotations_beyond_the_limit_are_counted() -> None:
    lines = list(github.workflow_commands(from_run(small(notes=tuple(f"note {n}\nof many" for n in range(14))))))
    assert len(lines) == github.MOST_ANNOTATIONS
    assert "\n" not in "".join(lines)
    assert "::note 8%0Aof many" in lines[8]
    assert lines[9].endswith("::5 lines more: see the summary of this step.")


def test_outputs() -> None:
    found = github.outputs(from_run(small()))
    assert found == {
        "passed": "true",
        "verdict": "PASSED: all 8 cases are within the error budget against the fp64 oracle.",
        "run": small().run_id,
        "least-speedup": "2.4",
        "least-match": "99.743",
        "largest-rms-ratio": "1.3397",
    }
    without = github.outputs(from_run(small(gpu=False, gates=Gates(min_match={"1e-3": 100}))))
    assert (without["passed"], without["least-speedup"]) == ("false", "")
    assert without["verdict"].startswith("GATE FAILED: min-match 1e-3:100: layer 0")
    assert all("\n" not in value for value in without.values())


# --- the command


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunReport:
    """A run that `export` reads, with a gate that it breaks."""
    report = small(gates=Gates(min_speedup=2.5))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "read", lambda _: (tmp_path, report))
    return report


def export(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["export", *words], prog_name="ssdprof", catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def test_every_format_is_registered() -> None:
    assert {*FORMATS, "github"} == set(get_args(Format))


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_written_to_stdout_and_to_a_file(format: str) -> None:
    code, out, err = export("--format", format)
    assert code == 1  # the gate
    assert f"GATE FAILED: min-speedup 2.5: {FUSED}" in err
    assert export("--format", format, "-o", "file")[0] == 1
    assert Path("file").read_text().strip() == out.strip()
    assert export("--format", format, "-o", "file")[0] == 2


@pytest.mark.usefixtures("kept")
def test_github_appends_to_the_files_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = export("--format", "github")
    assert (code, "GITHUB_STEP_SUMMARY and GITHUB_OUTPUT" in err) == (2, True)
    for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT"):
        Path(name).write_text("before\n")
        monkeypatch.setenv(name, name)
    code, out, _ = export("--format", "github")
    assert code == 1
    assert out.startswith("::error title=ssdprof%3A ibm-granite/granite-4.0-h-small::GATE FAILED: min-speedup 2.5: ")
    assert Path("GITHUB_STEP_SUMMARY").read_text().startswith("before\n## ssdprof: ")
    lines = Path("GITHUB_OUTPUT").read_text().splitlines()
    assert lines[:2] == ["before", "passed=false"]
    assert export("--format", "github", "-o", "file")[0] == 2
    monkeypatch.setenv("GITHUB_OUTPUT", "no/such/folder")
    code, _, err = export("--format", "github")
    assert (code, "cannot be written" in err) == (3, True)
