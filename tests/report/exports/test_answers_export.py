"""Exports of a model's answers for other programs."""

from __future__ import annotations

import csv
import io
import json

import pytest
from report.exports.test_exports import parsed
from report.make import make_report
from report.make_answers import answers

from ssdprof.report.exports import benchmark_action, csv_table, github
from ssdprof.report.exports.exported import from_run
from ssdprof.schema import RunReport
from ssdprof.schema.answers import AnswerGate

ROW = "answers, 1,100 tokens, fused, exact, fp32 states"


def answered(gate: AnswerGate = AnswerGate()) -> RunReport:  # noqa: B008
    """A run of `ssdprof answers`, without comparisons of single operators."""
    return make_report(cases=(), answers=(answers(gate),))


def test_a_row_of_the_whole_model() -> None:
    report = answered()
    band = report.answers[0].cases[0].bands[0]
    (row,) = csv.DictReader(io.StringIO(csv_table.render(from_run(report))))
    assert (row["layer"], row["tokens"], row["implementation"]) == ("all", "1100", "fused")
    assert float(row["KL, mean [nats]"]) == band.kl_mean
    assert float(row["same top token [%]"]) == band.top1_pct
    assert band.perplexity_interval_pct is not None
    assert float(row["change of perplexity, high [%]"]) == band.perplexity_interval_pct.high
    smaller = {one["name"]: one["value"] for one in json.loads(benchmark_action.smaller(from_run(report)))}
    assert smaller == {f"{ROW}: KL, mean": band.kl_mean, f"{ROW}: perplexity": band.perplexity}
    (bigger,) = json.loads(benchmark_action.bigger(from_run(report)))
    assert (bigger["name"], bigger["value"]) == (f"{ROW}: same top token", band.top1_pct)


def test_nothing_is_wrong_with_answers_within_their_limits() -> None:
    report = answered(AnswerGate(max_kl=1.0))
    assert "::error" not in "".join(github.workflow_commands(from_run(report)))
    found = parsed(report)
    assert found.keys() == {ROW, "all requested cases are present", "max-kl 1"}
    assert all(case.is_passed for case in found.values())


@pytest.mark.parametrize(
    ("gate", "name", "why"),
    [
        (AnswerGate(max_kl=1e-6), "max-kl 1e-06", "is above 1e-06"),
        (AnswerGate(min_top1_pct=100), "min-top1 100%", "of positions, below 100%"),
        (AnswerGate(max_perplexity_increase_pct=-50), "max-perplexity-increase -50%", "more than -50%"),
    ],
)
def test_a_limit_that_does_not_hold(gate: AnswerGate, name: str, why: str) -> None:
    report = answered(gate)
    (line,) = [line for line in github.workflow_commands(from_run(report)) if line.startswith("::error")]
    assert "::FAILED: the answers of fused (exact, fp32 states) at 1,100 tokens: " in line
    found = parsed(report)
    assert found["all requested cases are present"].is_passed
    (result,) = found[name].result
    assert result.message.startswith(f"{name}: {ROW}: ")
    assert result.message.endswith(why)
