"""`ssdprof schemas` prints the schema of every --json, and the commands' output follows them."""

import json
from pathlib import Path
from typing import Any

import cases
import jsonschema
import pytest
import typer
from command_line import Answer

from ssdprof.cli import app
from ssdprof.commands.stored import SCHEMAS, schema
from ssdprof.core.report import Report
from ssdprof.errors import BadInputError
from ssdprof.store import reports

pytestmark = pytest.mark.usefixtures("in_empty_folder")


def keeps_to(name: str, document: Any) -> None:
    jsonschema.validate(document, schema(name), cls=jsonschema.Draft202012Validator)


def test_every_schema_is_listed_and_printed():
    lines = Answer("schemas").out.splitlines()
    assert [line.split()[0] for line in lines] == list(SCHEMAS)
    for name in SCHEMAS:
        jsonschema.Draft202012Validator.check_schema(json.loads(Answer(f"schemas {name}").out))
        assert schema(name.partition("-v")[0]) == schema(name)
    with pytest.raises(BadInputError, match="There is no schema 'reports'") as caught:
        schema("reports")
    assert "report-v4" in caught.value.hint


def test_every_command_that_prints_json_has_a_schema():
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    printing = {
        name
        for name, one in commands.items()
        if any("--json" in parameter.opts for parameter in one.params)
    }
    assert {
        words.split()[0]
        for printed, _ in SCHEMAS.values()
        for words in printed.split(", ")
        if words
    } == printing


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("models", "models --json"),
        ("doctor", "doctor --json"),
        ("dry-run", "run demo --layers first:2 --dry-run --json"),
        ("dry-run", "capture demo-gdn --dry-run --json"),
        ("capture", "capture demo --seq 8 --layers first:1 --out captures --json"),
        ("runs", "runs . --json"),
        ("comparison", "compare run.json other.json --fail-if time:base+3% --json"),
        ("report-v4", "accuracy run.json --json"),
    ],
)
def test_what_a_command_prints_follows_its_schema(name: str, words: str):
    Path("run.json").write_text(reports.dump(cases.report()))
    Path("other.json").write_text(reports.dump(cases.report(layers=(0,), change=cases.failed)))
    keeps_to(name, json.loads(Answer(words).out))


@pytest.mark.parametrize(
    "report",
    [cases.report(), cases.bench(), cases.prefill(), cases.answers()],
    ids=lambda one: one.kind,
)
def test_a_report_of_any_kind_is_exported_as_its_document(report: Report):
    Path("report.json").write_text(reports.dump(report))
    document = json.loads(Answer("export report.json --json").out)
    keeps_to("report-v4", document)
    assert Report.model_validate(document) == report
