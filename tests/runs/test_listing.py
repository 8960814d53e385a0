"""The runs in a folder."""

import io
import json
import os
from pathlib import Path

import pytest
from report.make import failed, make_checkpoint, make_report
from rich.console import Console
from ssdprof.runs import REPORT, document
from ssdprof.runs.listing import listed
from ssdprof.schema import Gates
from typer.testing import CliRunner

from ssdprof.cli import app
from ssdprof.report.tables import listing as tables
from ssdprof.report.terminal import SplitTable


def keep(folder, name, **fields):
    (folder / name).mkdir(parents=True)
    (folder / name / REPORT).write_text(document.dump(make_report(layers=(9,), **fields)))


def call(*words):
    return CliRunner().invoke(app, ["runs", *words], prog_name="ssdprof", catch_exceptions=False)


def wrong(status):
    return lambda case: failed(case, status, "why") if case.implementation == "fused" else case


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs"
    keep(folder, "a-whole", created="2026-01-01T00:00:00+00:00", seqlens=(1024, 131_072))
    keep(folder, "b-failed", created="2026-01-03T00:00:00+00:00", change=wrong("inaccurate"), gpu=False)
    keep(folder, "c-refused", created="2026-01-02T00:00:00+00:00", change=wrong("refused"), asked=None)
    keep(folder, "d-partial", created="2026-01-04T00:00:00+00:00", state="partial",
         checkpoint=make_checkpoint(random_weights=True))  # fmt: skip
    keep(folder, "g-gate", created="2025-12-31T00:00:00+00:00", gates=Gates(min_speedup=100))
    (folder / "e-damaged").mkdir()
    (folder / "e-damaged" / REPORT).write_text("{")
    (folder / "f-no-run").mkdir()
    (folder / "a-file").write_text("")
    return folder


def test_each_run_has_its_verdict_the_newest_first(runs):
    found = listed(runs)
    assert [(run.name, run.verdict, run.state) for run in found] == [
        ("d-partial", "incomplete", "partial"),
        ("b-failed", "failed", "complete"),
        ("c-refused", "refused", "complete"),
        ("a-whole", "passed", "complete"),
        ("g-gate", "failed", "complete"),
        ("e-damaged", "unreadable", None),
    ]
    assert "not JSON" in found[-1].reason
    whole = found[3]
    assert (whole.seqlens, whole.layers, whole.gpu, whole.random_weights) == ((1024, 131_072), 1, "NVIDIA H200", False)
    assert whole.cases == 16
    assert (found[1].gpu, found[0].random_weights) == (None, True)


def test_the_table_says_it_in_words(runs):
    file = io.StringIO()
    Console(file=file, width=140).print(SplitTable(tables.runs(listed(runs))))
    text = file.getvalue()
    for words in ("2026-01-04 00:00 UTC", "h-small, random weights", "1,024, 131,072", "incomplete, partial"):
        assert words in text
    assert "e-damaged: " in text


def test_the_command_lists_them_as_a_table_and_as_json(runs):
    assert "a-whole" in call().stdout
    rows = json.loads(call("--json").stdout)
    assert [row["name"] for row in rows] == [run.name for run in listed(runs)]
    elsewhere = json.loads(call(str(runs), "--json").stdout)
    assert [row | {"reason": ""} for row in elsewhere] == [row | {"reason": ""} for row in rows]


def test_no_runs_are_an_empty_list(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = call("--json")
    assert (answer.exit_code, json.loads(answer.stdout)) == (0, [])
    answer = call()
    assert (answer.exit_code, answer.stdout) == (0, "")
    assert "There are no runs in runs." in answer.stderr


def test_a_folder_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = call("nowhere")
    assert answer.exit_code == 2
    assert "nowhere is not a folder" in answer.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_report_without_permission_is_listed(runs):
    Path(runs / "a-whole" / REPORT).chmod(0)
    assert next(run for run in listed(runs) if run.name == "a-whole").verdict == "unreadable"
