"""The published schemas are current and complete, and the commands' output follows them."""

import json
from pathlib import Path

import jsonschema
import pytest
import typer
from report.make import failed, make_report
from ssdprof.bench import schema as bench_schema
from ssdprof.commands.schemas import documents
from ssdprof.runs import REPORT, document
from typer.testing import CliRunner

from ssdprof.cli import app
from ssdprof.pipeline import stall_files
from ssdprof.schema import SCHEMA_VERSION, published

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def keeps_to(name: str, text: str) -> None:
    schema = json.loads((published.FOLDER / name).read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)


def printed(*words: str) -> str:
    return CliRunner().invoke(app, words, prog_name="ssdprof", catch_exceptions=False).stdout


def test_the_published_schemas_are_the_generated_ones() -> None:
    generated = {name: published.as_text(one.schema) for name, one in documents().items()}
    there = {file.name: file.read_text(encoding="utf-8") for file in published.FOLDER.iterdir()}
    assert there == generated, "write them anew: python -m ssdprof.commands.schemas"
    assert document.SCHEMA_FILE.name == f"report-v{SCHEMA_VERSION}.json"


def test_every_command_that_prints_json_has_a_schema() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    printing = {name for name, one in commands.items() if any("--json" in parameter.opts for parameter in one.params)}
    assert {words.split()[0] for one in documents().values() for words in one.printed_by} == printing


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("models.json", "models --json"),
        ("doctor.json", "doctor --json"),
        ("dry-run.json", "run demo --layers first:2 --dry-run --json"),
        ("dry-run.json", "capture demo-gdn --dry-run --json"),
        ("capture.json", "capture demo --seq 8 --layers first:1 --out captures --json"),
        ("runs.json", "runs --json"),
        ("report-v2.json", "export --json"),
        ("report-v2.json", "accuracy --states fp32 --json"),
    ],
)
def test_what_a_command_prints_keeps_to_its_schema(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, change in (("a", lambda case: case), ("b", lambda case: failed(case, "nonfinite"))):
        (tmp_path / "runs" / folder).mkdir(parents=True)
        text = document.dump(make_report(layers=(9,), change=change))
        (tmp_path / "runs" / folder / REPORT).write_text(text)
    keeps_to(name, printed(*words.split()))


def test_recorded_results_keep_to_the_schemas_once_they_are_read() -> None:
    stalls = stall_files.load(RESULTS / "h200-granite-4.0-h-1b-128k-stalls" / "stalls.json")
    keeps_to("stalls-v2.json", stall_files.dump(stalls))
    bench = bench_schema.load((RESULTS / "bench-ssd-h200.json").read_text(encoding="utf-8"))
    keeps_to("bench-v2.json", bench_schema.dump(bench))


@pytest.mark.parametrize("name", documents())
def test_a_schema_refuses_an_empty_document_of_another_kind(name: str) -> None:
    for text in ("7", '{"surprise": 1}', '[{"surprise": 1}]'):
        with pytest.raises(jsonschema.ValidationError):
            keeps_to(name, text)
