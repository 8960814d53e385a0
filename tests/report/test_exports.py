"""Exports of a report for other programs, read back with independent parsers."""

import csv
import io
from collections.abc import Callable
from pathlib import Path

import cases
import junitparser
import pytest
from cases import CALL_US, answers, bench, cell, failed, in_calls, prefill, report
from cases import two_layers as small
from lxml import etree
from report.test_contents import result

from ssdprof.core import pairs
from ssdprof.core.base import EXACT_FP32
from ssdprof.core.case import Case
from ssdprof.core.conditions import parse_change
from ssdprof.core.report import Report
from ssdprof.report import exports, markdown
from ssdprof.report.document import compose
from ssdprof.store import reports

SCHEMA = etree.XMLSchema(etree.parse(Path(__file__).with_name("JUnit.xsd")))
FUSED = "layer 0, 131,072 tokens, fused, exact, fp32 states"
PREFILL = "prefill, model convolution and norm, 1,024 tokens, fused, exact, fp32 states"


def ending(word: str, reason: str = "") -> Report:
    """With another result of fused, exact, in layer 0."""

    def change(case: Case) -> Case:
        wrong = result(word, "fused", EXACT_FP32, (0,))(case)
        return wrong.changed(reason=reason) if reason and wrong != case else wrong

    return small(change=change)


def rows(found: Report) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(exports.csv(found))))


def parsed(found: Report) -> dict[str, junitparser.TestCase]:
    """The test cases by name, after validation against the schema."""
    text = exports.junit(found).encode()
    SCHEMA.assertValid(etree.fromstring(text))
    suites = list(junitparser.JUnitXml.fromstring(text))
    for suite in suites:
        counts = (suite.tests, suite.failures, suite.errors, suite.skipped)
        suite.update_statistics()  # counts them itself
        assert counts == (suite.tests, suite.failures, suite.errors, suite.skipped)
    return {case.name: case for suite in suites for case in suite}


def errors(found: Report) -> list[str]:
    return [line for line in exports.workflow_commands(found) if line.startswith("::error")]


def test_each_call_of_a_layer_has_a_name_of_its_own():
    """Chunks and decode steps of one size would overwrite each other in the view of a CI system."""
    found = in_calls(report(layers=(0, 9), seqlens=(24,)))
    assert len(parsed(found)) == len(found.cases) + 1
    name = "layer 9, 8 tokens, chunk 2 of 3 of 24 tokens, fused, exact, fp32 states"
    assert name in parsed(found)
    assert {row["call"] for row in rows(found)} == {
        f"chunk {number} of 3 of 24 tokens" for number in (1, 2, 3)
    }


# --- JUnit


@pytest.mark.parametrize("word", ["inaccurate", "nonfinite", "failed", "out of memory", "refused"])
def test_junit_of_a_case_that_did_not_pass(word):
    found = parsed(ending(word, "head 5 is <over> its \x1b[1mbudget & more"))
    assert (found[FUSED].classname, len(found)) == ("ssdprof.fused", 8 + 1)
    (answer,) = found[FUSED].result
    is_wrong = word in ("inaccurate", "nonfinite")
    assert isinstance(answer, junitparser.Failure if is_wrong else junitparser.Error)
    assert answer.type == word
    # what is outside of the budget comes first
    assert answer.message.endswith(r"head 5 is <over> its \x1b[1mbudget & more")
    assert sum(not test.is_passed for test in found.values()) == 1
    assert parsed(small())[FUSED].time == pytest.approx((500 + CALL_US) * 1e-6)


def test_a_spreadsheet_computes_nothing():
    formula = "=HYPERLINK(1)"
    one = report(layers=(0,), precisions=(EXACT_FP32,)).cases[0]
    one = cases.with_task(one, dims=one.dims and one.dims.changed(words=formula))
    made = one.changed(implementation="@SUM(1)", reason="+1", variant="-1")
    (row,) = csv.DictReader(
        io.StringIO(exports.csv(report(layers=(0,)).changed(cases=(made,), id=formula)))
    )
    found = [row[name] for name in ("implementation", "reason", "kernel", "dimensions", "report")]
    assert [text[:2] for text in found] == ["'@", "'+", "'-", "'=", "'="]
    assert float(row["device time [µs]"]) > 0


def test_junit_skips_what_does_not_count():
    whole = ending("refused")
    asked = tuple(one for one in whole.requested if one[1] == "unfused")
    assert parsed(whole.changed(requested=asked))[FUSED].is_skipped
    fla, *ours = cell()
    assert parsed(bench(failed(fla, "refused"), *ours))[fla.name].is_skipped, "another library's"


def test_junit_of_gates_and_of_a_run_that_is_not_whole():
    found = parsed(small(conditions=cases.gates("speedup:2.2", "rms:9"), complete=False))
    (answer,) = found["speedup:2.2"].result
    assert answer.type == "gate"
    assert answer.message == f"speedup:2.2: {FUSED}: 2x"
    assert found["rms:9"].is_passed
    (whole,) = found["all requested cases are present"].result
    assert whole.message == "this run did not reach its end"
    for empty in (small(cases=()), prefill(cases=())):
        (whole,) = parsed(empty)["all requested cases are present"].result
        assert whole.message == "Nothing was compared."


# --- CSV


NOT_FINITE = ("elements not finite", "rms error [relative]", "largest error")


def test_csv_of_failures_and_of_nothing():
    (row,) = (
        row
        for row in rows(ending("refused", 'no "such", size\nat all'))
        if row["status"] != "passed"
    )
    assert row["reason"] == 'no "such", size\nat all'
    assert row["device time [µs]"] == row["output, largest error"] == ""
    (row,) = (row for row in rows(ending("nonfinite")) if row["status"] != "passed")
    assert [row[f"output, {name}"] for name in NOT_FINITE] == ["3", "inf", "inf"]
    (header,) = csv.reader(io.StringIO(exports.csv(small(cases=()))))
    for kind in (small, bench, answers):
        assert header == list(rows(kind())[0])


# --- baselines


@pytest.mark.parametrize("name", ["run-gdn", "bench-ssd", "prefill", "answers"])
def test_a_baseline_has_a_line_for_each_case_and_compares_as_its_report_does(name, tmp_path):
    stored = reports.load(Path(__file__).parents[1] / "goldens" / "reports" / f"{name}.json")[1]
    file = tmp_path / "baseline.json"
    file.write_text(exports.baseline(stored))
    lines = file.read_text().splitlines()
    kept = pairs.compared(stored)
    assert sum(line.startswith('{"implementation"') for line in lines) == len(kept)
    assert max(map(len, lines)) < 4_000
    assert '"samples"' not in file.read_text()
    short = reports.load(file)[1]
    assert [case.result for case in short.cases] == [case.result for case in kept]
    texts = ("time:base+3%", "rms:base+5%", "match:base-0.1", "launches:base+0")
    allowed = list(map(parse_change, texts))
    new = stored.changed(cases=tuple(map(cases.slowed(1.05), stored.cases)))
    found = [
        pairs.compare(("base", base), ("new", new), smallest_difference=0.01, allowed=allowed)
        for base in (stored, short)
    ]
    assert found[0].verdicts.keys() == found[1].verdicts.keys()
    for one, other in zip(found[0].pairs, found[1].pairs, strict=True):
        assert one.verdict == other.verdict
        assert (one.time is None) == (other.time is None)
        assert one.time is None or other.time == pytest.approx(one.time, rel=1e-4)
    for change, offenders in found[0].verdicts.items():
        assert [one.case for one in offenders] == [one.case for one in found[1].verdicts[change]]


# --- GitHub


@pytest.mark.parametrize("make", [small, prefill, bench, answers, lambda: ending("inaccurate")])
def test_a_step_summary_is_one_screen(make: Callable[[], Report]):
    whole = markdown.render(compose(make()))
    text = exports.step_summary(make())
    head, _, table = text.partition("\n### ")
    assert whole.startswith(head)
    assert "| " in table
    assert text.count("\n") <= 40 < whole.count("\n")


def test_without_times_of_calls_the_whole_run_has_its_own():
    (process,) = small().processes
    tests = parsed(small(gpu=False, processes=(process.changed(seconds=12.5),)))
    assert sum(test.time for test in tests.values()) == pytest.approx(12.5)


def test_annotations():
    assert errors(small()) == errors(prefill()) == errors(bench()) == []
    verdict, reason = errors(ending("inaccurate"))
    assert verdict == (
        "::error title=ssdprof%3A ibm-granite/granite-4.0-h-small::FAILED: 1 of 8 cases: fused "
        "(exact, fp32 states) inaccurate in layer 0."
    )
    assert (
        "small::layer 0, 131,072 tokens, fused, exact, fp32 states: inaccurate: out, head 7: "
        "max|ours - oracle| is 1.5, its budget 1;" in reason
    )
    (gate,) = errors(small(conditions=cases.gates("match@0:89%")))
    assert (
        "GATE FAILED: match@0:89%25: layer 0, 131,072 tokens, fused, relaxed, fp32 states: 60%25; "
        in gate
    )
    (line,) = errors(prefill(conditions=cases.gates("speedup:2.5")))
    assert line.endswith(f"::GATE FAILED: speedup:2.5: {PREFILL}: 2x.")
    assert "::PARTIAL: the command did not reach its end." in errors(prefill(complete=False))[0]
    lines = list(
        exports.workflow_commands(small(notes=tuple(f"note {n}\nof many" for n in range(14))))
    )
    assert len(lines) == exports.MOST_ANNOTATIONS
    assert "\n" not in "".join(lines)
    assert "::note 8%0Aof many" in lines[8]
    assert lines[9].endswith("::5 lines more: see the summary of this step.")


def test_outputs_of_a_step_without_a_speed():
    found = exports.outputs(small(gpu=False, conditions=cases.gates("match:100%")))
    assert (found["passed"], found["least-speedup"]) == ("false", "")
    assert found["verdict"].startswith("GATE FAILED: match:100%: layer 0")
    assert "\n" not in "".join(found.values())
