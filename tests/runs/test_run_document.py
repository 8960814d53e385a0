"""The JSON report: a dumped report loads and follows the published schema, and anything else is refused."""

import json
import math
from pathlib import Path

import jsonschema
import pytest
from report.make import failed, make_report

from ssdprof.errors import BadInputError
from ssdprof.runs import document as run_document
from ssdprof.schema import SCHEMA_VERSION

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
    schema = json.loads(run_document.SCHEMA_FILE.read_text(encoding="utf-8"))
    document = json.loads(run_document.dump(REPORTS[name]()), parse_constant=no_constants)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema, cls=jsonschema.Draft202012Validator)


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
        jsonschema.validate(document, json.loads(run_document.SCHEMA_FILE.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema_version": 1, "cases": [', "not JSON"),
        ("[]", "no schema_version"),
        ("{}", "no schema_version"),
        ('{"schema_version": 3}', "schema version 3; this ssdprof reads versions 1 and 2"),
        ('{"schema_version": 1}', "damaged at ssdprof_version"),
        ('{"schema_version": 1, "cases": 7}', "damaged at"),
        ('{"schema_version": 1, "cases": [{"dims": {}}]}', "damaged at"),
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


def test_a_report_of_version_1_is_read_as_one_of_version_2():
    """A committed report from before operators had records: its sizes get their operator's name and words."""
    text = (RESULTS / "h200-mamba2-2.7b-128k" / "report.json").read_text(encoding="utf-8")
    old, report = json.loads(text), run_document.load(text)
    assert old["schema_version"] == 1
    assert report.schema_version == SCHEMA_VERSION
    assert len(report.cases) == len(old["cases"])
    dims, before = report.cases[0].dims, old["cases"][0]["dims"]
    assert (dims.operator, dims.sizes["dstate"], dims.seqlen) == ("ssd", before["dstate"], before["seqlen"])
    assert str(dims) == "80 heads x 64, state 128, 1 group, chunk 256, bf16"
    assert report.cases[0].timing.device_median_us == old["cases"][0]["timing"]["device_median_us"]
