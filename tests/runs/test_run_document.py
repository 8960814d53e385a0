"""The JSON report: a dumped report loads and follows the published schema, and anything else is refused."""

import json
import math
from pathlib import Path

import jsonschema
import pytest
from report.make import failed, make_report
from ssdprof.runs import document as run_document
from test_schemas import keeps_to

from ssdprof.errors import BadInputError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
REPORTS = {
    "gpu": lambda: make_report(),
    "cpu": lambda: make_report(gpu=False),
    "nan": lambda: make_report(layers=(9,), change=lambda case: failed(case, "nonfinite")),
    "partial": lambda: make_report(state="partial", cases=()),
}


def no_constants(name):
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_keeps_to_the_published_schema(name):
    document = json.loads(run_document.dump(REPORTS[name]()), parse_constant=no_constants)
    keeps_to("report-v2", json.dumps(document))


@pytest.mark.parametrize("name", ["gpu", "cpu", "partial"])
def test_what_is_dumped_loads(name):
    report = REPORTS[name]()
    assert run_document.load(run_document.dump(report)) == report


def test_nan_survives():
    deviation = run_document.load(run_document.dump(REPORTS["nan"]())).cases[0].accuracy[0].vs_oracle
    assert math.isnan(deviation.rms_ratio)
    assert deviation.max_abs == math.inf
    assert deviation.first_nonfinite == (0, 777, 5, 9)


@pytest.mark.parametrize("change", [{"schema_version": 3}, {"state": "done"}, {"surprise": 1}, {"cases": [{}]}])
def test_the_schema_refuses_another_document(change):
    document = {**json.loads(run_document.dump(make_report(layers=(0,)))), **change}
    with pytest.raises(jsonschema.ValidationError):
        keeps_to("report-v2", json.dumps(document))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema_version": 2, "cases": [', "not JSON"),
        ("[]", "no schema_version"),
        ("{}", "no schema_version"),
        ('{"schema_version": 3}', "schema version 3; this ssdprof reads version 2"),
        ('{"schema_version": 1}', "schema version 1; this ssdprof reads version 2"),
        ('{"schema_version": 2}', "damaged at ssdprof_version"),
        ('{"schema_version": 2, "cells": []}', "a result of ssdprof bench and not a run"),
        ('{"prefill_version": 1}', "a result of ssdprof prefill and not a run"),
    ],
)
def test_what_is_no_report_is_refused(text, message):
    with pytest.raises(BadInputError, match=message) as caught:
        run_document.load(text)
    assert caught.value.hint
    assert caught.value.exit_code == 2


def test_a_timing_on_a_failed_case_is_refused():
    document = json.loads(run_document.dump(make_report(layers=(0,))))
    document["cases"][0]["status"] = "inaccurate"
    with pytest.raises(BadInputError, match=r"damaged at cases\.0.*a timing belongs only to a case that passed"):
        run_document.load(json.dumps(document))
