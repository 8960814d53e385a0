"""`ssdprof schemas` prints the schema of every --json, and the commands' output follows them."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
from report.make import failed, make_report
from typer.testing import CliRunner

from ssdprof.bench import schema as bench_schema
from ssdprof.cli import app
from ssdprof.commands.schemas import documents, schemas
from ssdprof.errors import BadInputError
from ssdprof.runs import REPORT, document
from ssdprof.schema import SCHEMA_VERSION

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def schema_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed("schemas", name))
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def keeps_to(name: str, text: str) -> None:
    jsonschema.validate(json.loads(text), schema_of(name), cls=jsonschema.Draft202012Validator)


def printed(*words: str) -> str:
    return CliRunner().invoke(app, words, prog_name="ssdprof", catch_exceptions=False).stdout


def test_the_list_has_every_schema_and_an_unknown_name_is_refused() -> None:
    lines = printed("schemas").splitlines()
    assert [line.split()[0] for line in lines] == list(documents())
    assert f"report-v{SCHEMA_VERSION}" in documents()
    with pytest.raises(BadInputError, match="There is no schema 'report'") as caught:
        schemas("report")
    assert "report-v2" in caught.value.hint


def test_every_command_that_prints_json_has_a_schema() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    printing = {name for name, one in commands.items() if any("--json" in parameter.opts for parameter in one.params)}
    assert {words.split()[0] for one in documents().values() for words in one.printed_by} == printing


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("models", "models --json"),
        ("doctor", "doctor --json"),
        ("dry-run", "run demo --layers first:2 --dry-run --json"),
        ("dry-run", "capture demo-gdn --dry-run --json"),
        ("capture", "capture demo --seq 8 --layers first:1 --out captures --json"),
        ("runs", "runs --json"),
        ("report-v2", "export --json"),
        ("report-v2", "accuracy --states fp32 --json"),
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


def test_recorded_results_keep_to_the_schemas() -> None:
    keeps_to("stalls-v3", (RESULTS / "h200-granite-4.0-h-1b-128k-stalls" / "stalls.json").read_text(encoding="utf-8"))
    keeps_to("report-v2", (RESULTS / "h200-granite-4.0-h-1b-128k" / "report.json").read_text(encoding="utf-8"))
    keeps_to("prefill-v1", (RESULTS / "h200-prefill" / "qwen3.5-9b.json").read_text(encoding="utf-8"))
    bench = (Path(__file__).parent / "bench" / "data" / "gdn-16k.json").read_text(encoding="utf-8")
    keeps_to("bench-v2", bench_schema.dump(bench_schema.load(bench)))


@pytest.mark.parametrize("name", documents())
def test_a_schema_refuses_an_empty_document_of_another_kind(name: str) -> None:
    for text in ("7", '{"surprise": 1}', '[{"surprise": 1}]'):
        with pytest.raises(jsonschema.ValidationError):
            keeps_to(name, text)
