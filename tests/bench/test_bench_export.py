"""`ssdprof export` of a bench, in the formats for other programs."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import junitparser
import pytest
from command_line import call
from fakes import contender, gated, measured, report
from lxml import etree
from ssdprof.bench.schema import BenchReport, LeftOut, dump
from typer.testing import CliRunner

from ssdprof.cli import app
from ssdprof.kernels.ssd.inputs import SSDOutput

pytestmark = pytest.mark.usefixtures("in_empty_folder")

SCHEMA = etree.XMLSchema(etree.parse(Path(__file__).parents[1] / "report" / "exports" / "JUnit.xsd"))
FUSED = "tiny, bf16, 1 x 40, fused, exact, fp32 states"


def doubled(output: SSDOutput) -> SSDOutput:
    return SSDOutput(output.out * 2, output.final_states)


@pytest.fixture(scope="module")
def done() -> BenchReport:
    """The other library's output is wrong, and ours are right."""
    cases = measured(
        contender("mamba_ssm", lambda _: 1.0, ours=False, spoil=doubled),
        contender("unfused", lambda _: 310.0),
        contender("fused", lambda _: 100.0),
    )
    return report(*cases, baseline="unfused")


def export(done: BenchReport, *words: str) -> tuple[int, str, str]:
    Path("bench.json").write_text(dump(done))
    return call("export", "bench.json", *words)


def junit(done: BenchReport) -> dict[str, junitparser.TestCase]:
    _, out, _ = export(done, "--format", "junit")
    SCHEMA.assertValid(etree.fromstring(out.encode()))
    return {case.name: case for suite in junitparser.JUnitXml.fromstring(out.encode()) for case in suite}


def test_csv_has_a_row_for_each_implementation_in_each_cell(done: BenchReport) -> None:
    code, out, _ = export(done, "--format", "csv")
    assert code == 0
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["implementation"] for row in rows] == ["mamba_ssm", "unfused", "fused"]
    wrong, _, fused = rows
    assert (wrong["status"], wrong["device time [µs]"]) == ("inaccurate", "")
    assert (fused["shape"], fused["inputs"], fused["sequences x tokens"]) == ("tiny", "bf16, contiguous", "1 x 40")
    assert (fused["operator"], fused["tokens"], fused["batch"]) == ("ssd", "40", "1")
    assert (float(fused["device time [µs]"]), float(fused["speedup, device [x]"])) == (100.0, 3.1)
    assert float(fused["output, match against baseline @ 1e-3 [%]"]) == 100.0


def test_junit_excuses_another_library_and_names_a_broken_gate(done: BenchReport) -> None:
    tests = junit(gated(done, min_speedup=2, min_match={"0": 100}))
    assert tests["tiny, bf16, 1 x 40, mamba_ssm, exact, fp32 states"].is_skipped
    assert [test.name for test in tests.values() if not test.is_passed and not test.is_skipped] == []
    late = done.model_copy(update={"left_out": (LeftOut(cell="a cell", reason="no time"),), "state": "partial"})
    tests = junit(gated(late, min_speedup=4))
    (found,) = tests["min-speedup 4"].result
    assert found.text.splitlines() == [
        f"min-speedup 4: {FUSED}: 3.1x over unfused",
        "min-speedup 4: a cell: left out: no time",
    ]
    (whole,) = tests["all requested cases are present"].result
    assert whole.message == "this bench did not reach its end"


def test_a_wrong_kernel_of_ours_fails_the_test_and_the_command(done: BenchReport) -> None:
    wrong = report(*measured(contender("unfused", lambda _: 310.0), contender("fused", lambda _: 1.0, spoil=doubled)))
    assert export(wrong, "--format", "junit")[0] == 1
    assert isinstance(junit(wrong)[FUSED].result[0], junitparser.Failure)
    assert junit(done)[FUSED].is_passed


def test_github_action_benchmark(done: BenchReport) -> None:
    smaller = {one["name"]: one for one in json.loads(export(done, "--format", "benchmark-action")[1])}
    assert smaller[f"{FUSED}: device time"]["value"] == 100.0
    assert smaller[f"{FUSED}: device time"]["extra"] == "bench ssd 2026-01-01T00:00:00+00:00, no GPU"
    assert not any("mamba_ssm" in name for name in smaller), "it has no number that may stand in a series"
    bigger = {one["name"]: one["value"] for one in json.loads(export(done, "--format", "benchmark-action-bigger")[1])}
    assert bigger[f"{FUSED}: speedup, device"] == 3.1
    assert bigger[f"{FUSED}: match @ 1e-3"] == 100.0


def test_a_step_of_github_actions(done: BenchReport, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT"):
        monkeypatch.setenv(name, name)
    code, out, _ = export(gated(done, min_speedup=4), "--format", "github")
    assert code == 1
    assert out.startswith("::error title=ssdprof%3A ssd on drawn inputs::GATE FAILED: min-speedup 4: tiny, bf16")
    assert "**Fused over unfused: tiny" in Path("GITHUB_STEP_SUMMARY").read_text()
    outputs = dict(line.split("=", 1) for line in Path("GITHUB_OUTPUT").read_text().splitlines())
    assert (outputs["passed"], outputs["least-speedup"], outputs["least-match"]) == ("false", "3.1", "100")
    assert export(done, "--format", "github")[0] == 0


def test_documents(done: BenchReport) -> None:
    code, out, _ = export(done, "--json")
    assert (code, json.loads(out)) == (0, json.loads(dump(done)))
    code, out, _ = export(done)
    assert (code, out.startswith("**Fused over unfused")) == (0, True)
    code, out, err = export(done, "--format", "html")
    assert (code, out) == (2, "")
    assert "There is no HTML report of a bench." in err
    code, _, err = export(gated(done, min_speedup=4), "--format", "csv", "-o", "rows.csv")
    assert code == 1
    assert f"GATE FAILED: min-speedup 4: {FUSED}: 3.1x over unfused" in err
    assert Path("rows.csv").read_text().startswith("bench,operator,GPU")
    Path("broken.json").write_text('{"cells": 1}')
    result = CliRunner().invoke(app, ["export", "broken.json"], prog_name="ssdprof")
    assert (result.exit_code, "broken.json: " in " ".join(result.stderr.split())) == (2, True)
