"""`ssdprof export` of prefill times, in every format."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import junitparser
import pytest
from command_line import call
from lxml import etree
from report.make_prefill import FUSED, UNFUSED, found, report
from typer.testing import CliRunner

from ssdprof.cli import app
from ssdprof.runs import prefill_file
from ssdprof.schema import Gates
from ssdprof.schema.prefill import PrefillReport

pytestmark = pytest.mark.usefixtures("in_empty_folder")

SCHEMA = etree.XMLSchema(etree.parse(Path(__file__).with_name("JUnit.xsd")))
ROW = "prefill, bundled surroundings, 1,024 tokens, fused, exact, fp32 states"
REFUSED = FUSED.model_copy(
    update={"implementation": "mamba_ssm", "version": "2.3", "status": "refused", "reason": "no", "call": None}
    | {"speedup": None}
)
DONE = report(prefill=found(UNFUSED, FUSED, REFUSED))
SLOW = DONE.model_copy(update={"gates": Gates(min_speedup=2.5)})
BROKEN = f"min-speedup 2.5: {ROW}: 2x over unfused"


def export(done: PrefillReport, *words: str) -> tuple[int, str, str]:
    Path("prefill.json").write_text(prefill_file.dump(done))
    return call("export", "prefill.json", *words)


def test_csv_has_a_row_for_each_implementation_and_the_parts_of_its_time() -> None:
    code, out, _ = export(DONE, "--format", "csv")
    assert code == 0
    unfused, fused, refused = csv.DictReader(io.StringIO(out))
    assert (fused["tokens"], fused["batch"], fused["surroundings"], fused["layers"]) == ("1024", "1", "bundled", "40")
    assert (float(fused["call time [µs]"]), float(fused["call time, high [µs]"])) == (1000, 1010)
    assert (fused["speedup, call [x]"], fused["speedup predicted [x]"], fused["baseline"]) == ("2.0", "1.18", "unfused")
    assert (unfused["speedup, call [x]"], unfused["operator, GPU time [µs]"]) == ("", "600.0")
    assert (fused["mixer, GPU time [µs]"], fused["MLP, GPU time [µs]"]) == ("600.0", "")
    assert (refused["status"], refused["call time [µs]"], refused["kernel"]) == ("refused", "", "hopper 2.3")


def junit(done: PrefillReport) -> tuple[int, dict[str, junitparser.TestCase]]:
    code, out, _ = export(done, "--format", "junit")
    SCHEMA.assertValid(etree.fromstring(out.encode()))
    return code, {case.name: case for suite in junitparser.JUnitXml.fromstring(out.encode()) for case in suite}


def test_junit_has_a_test_for_each_prefill_and_for_the_gate() -> None:
    code, tests = junit(DONE)
    assert (code, tests[ROW].is_passed, tests[ROW].time) == (0, True, 0.001)
    assert tests[ROW.replace("fused", "mamba_ssm")].is_skipped
    code, tests = junit(SLOW)
    (failure,) = tests["min-speedup 2.5"].result
    assert (code, failure.message) == (1, BROKEN)
    code, tests = junit(DONE.model_copy(update={"state": "partial"}))
    (error,) = tests["all requested cases are present"].result
    assert (code, error.message) == (1, "The command did not reach its end.")


def test_github_action_benchmark() -> None:
    smaller = {one["name"]: one for one in json.loads(export(DONE, "--format", "benchmark-action")[1])}
    assert smaller[f"{ROW}: call time"]["value"] == 1000
    assert smaller[f"{ROW}: call time"]["extra"].startswith("prefill ibm-granite/")
    assert not any("mamba_ssm" in name for name in smaller), "it has no number that may stand in a series"
    bigger = {one["name"]: one["value"] for one in json.loads(export(DONE, "--format", "benchmark-action-bigger")[1])}
    assert bigger == {f"{ROW}: speedup, call": 2.0}


def test_a_step_of_github_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT"):
        monkeypatch.setenv(name, name)
    code, out, _ = export(SLOW, "--format", "github")
    assert code == 1
    assert f"::GATE FAILED: {BROKEN}" in out
    assert "2.00x [1.99, 2.01]" in Path("GITHUB_STEP_SUMMARY").read_text()
    outputs = dict(line.split("=", 1) for line in Path("GITHUB_OUTPUT").read_text().splitlines())
    assert (outputs["passed"], outputs["least-speedup"], outputs["least-match"]) == ("false", "2", "")
    assert export(DONE, "--format", "github")[0] == 0


def test_documents() -> None:
    code, out, _ = export(DONE, "--json")
    assert (code, PrefillReport.model_validate_json(out)) == (0, DONE)
    code, out, _ = export(DONE)
    assert (code, out.startswith("## ssdprof prefill, ibm-granite/")) == (0, True)
    code, out, err = export(SLOW, "--format", "html", "-o", "prefill.html")
    assert (code, out) == (1, "")
    assert f"GATE FAILED: {BROKEN}" in err
    page = Path("prefill.html").read_text()
    assert page.count("Prefill time, all 40 layers") == 1
    assert f"FAILED: {BROKEN}." in page


def test_a_failed_case_ends_with_its_name() -> None:
    wrong = FUSED.model_copy(update={"status": "nonfinite", "reason": "NaN", "call": None, "speedup": None})
    code, _, err = export(report(prefill=found(UNFUSED, wrong)))
    assert (code, err) == (1, f"{ROW}: nonfinite: NaN")
    code, _, err = export(report(prefill=found(lengths=())))
    assert (code, err) == (1, "Nothing was timed.")


def test_a_file_of_another_kind_is_refused() -> None:
    Path("broken.json").write_text('{"prefill_version": 7}')
    result = CliRunner().invoke(app, ["export", "broken.json"], prog_name="ssdprof")
    assert result.exit_code == 2
    assert "broken.json: The file is not a result of ssdprof prefill: " in " ".join(result.stderr.split())
