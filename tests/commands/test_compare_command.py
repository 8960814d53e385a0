"""`ssdprof compare` as users and CI jobs call it: files in, a report and an exit code out."""

import json
from collections.abc import Callable
from pathlib import Path

import cases
import pytest
from command_line import Answer, ending, passing
from test_schemas import keeps_to

from ssdprof.core.case import Case
from ssdprof.core.report import Report
from ssdprof.store import reports

FUSED = "layer 0, 131,072 tokens, fused, exact, fp32 states"

pytestmark = pytest.mark.usefixtures("in_empty_folder")


def compare(code: int, words: str) -> Answer:
    return ending(code, f"compare {words}")


def run(change: Callable[[Case], Case] = lambda case: case, **fields) -> Report:
    return cases.two_layers(change=change, **fields)


def kept(name: str, report: Report):
    folder = Path("runs", name)
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(reports.dump(report.changed(id=name)))


@pytest.fixture(autouse=True)
def runs_in_folder(in_empty_folder: None):
    kept("base", run())
    kept("same", run())
    kept("slow", run(cases.slowed(1.05, lambda case: case.implementation == "fused")))


def test_exit_code_and_rows():
    compare(0, "base slow")  # without conditions
    held = compare(0, "base same --fail-if time:base+3% --fail-if match:base-0.1")
    assert held.err == ""
    assert "PASSED: no case violates time:base+3% or match:base-0.1." in held.out
    broken = compare(1, "base slow --fail-if time:base+3% --fail-if match:base-0.1")
    assert f"FAILED: time:base+3%: {FUSED}: 1.05 times BASE's time [1.043, 1.057]" in broken.err
    assert "match" not in broken.err
    assert f"FAILED: time:base+3%: {FUSED}: 1.05 times" in broken.shown
    assert "unfused, exact" not in broken.err


def test_a_gate_does_not_pass_because_nothing_was_compared():
    kept("others", run(layers=(3,)))
    for words in ("base others", "base others --json"):
        assert compare(1, words).err == "FAILED: nothing was compared: no case is in both"


def test_json_and_markdown():
    told = json.loads(compare(0, "base slow --json").out)
    keeps_to("comparison", told)
    assert len(told["pairs"]) == 8
    failed = compare(1, "base slow --format markdown -o compare.md --fail-if time:base+3%")
    assert failed.out == ""
    text = Path("compare.md").read_text()
    assert text.startswith(
        "## ssdprof compare: BASE base, NEW slow\n\n**FAILED: time:base+3%: layer 0"
    )
    assert "| layer 9, 131,072 tokens | fused" in text
    assert "--force" in compare(2, "base slow --format markdown -o compare.md").err
    compare(0, "base slow --format markdown -o compare.md --force")
    compare(0, "base slow --format json -o compare.json")
    compare(2, "base slow --json --format markdown")


def test_stages_that_were_profiled_in_both_stand_side_by_side():
    text = (Path(__file__).parents[1] / "stalls" / "data" / "demo" / "stalls.json").read_text()
    for name, us in (("base", "6.016"), ("slow", "12.032")):
        (folder := Path("runs", name, "stalls")).mkdir()
        (folder / "stalls.json").write_text(
            text.replace('"duration_us":6.016', f'"duration_us":{us}')
        )
    rows = [" ".join(line.split()) for line in compare(0, "base slow").out.splitlines()]
    assert "chunk_cumsum 6.02 µs 17.1% 12.0 µs 29.2%" in rows
    assert "ticket" not in compare(0, "base same").out


def test_a_path_is_named_as_it_is():
    """Square brackets and colons are not markup."""
    assert compare(0, "base slow -o 'a [bold]b:x:.md'").err == "Wrote a [bold]b:x:.md."


def test_settings_hold_the_conditions():
    Path("ssdprof.toml").write_text(
        '[compare]\nfail-if = ["time:base+3%"]\nsmallest-difference = "10%"\n'
    )
    assert "8 no difference within 10%" in compare(1, "base slow").shown
    assert "8 no difference." in compare(0, "base same --smallest-difference 0%").shown
    compare(0, "base slow --fail-if time:base+20%")


def test_conditions_on_times_need_a_gpu():
    """Those of the settings file are not judged without one; the others are."""
    kept("cpu", run(gpu=False))
    refused = compare(3, "base cpu --fail-if time:base+3%")
    assert "--fail-if time:base+3% needs an NVIDIA GPU" in refused.err
    Path("ssdprof.toml").write_text('[compare]\nfail-if = ["speedup:base-3%", "rms:base+5%"]\n')
    waived = "speedup:base-3% of the settings file is not judged: NEW's machine has no GPU."
    assert compare(0, "base cpu").err == waived


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("base nothing", "nothing is not a "),
        ("base same --fail-if tme:base+3%", "Did you mean time?"),
        ("base same --smallest-difference much", "not a percentage"),
        ("base same -o no/where.md", "There is no folder"),
        ("base ssdprof.txt", "not valid JSON"),
        ("base picture.json", "picture.json is not valid JSON: it is not UTF-8. hint: "),
        ("base cells.json", "cells.json"),
    ],
)
def test_what_is_refused(words, complaint):
    Path("ssdprof.txt").write_text("no report")
    Path("picture.json").write_bytes(b"\x89PNG")
    Path("cells.json").write_text('{"cells": []}')
    answer = compare(2, words)
    assert answer.out == ""
    assert complaint in answer.err


@pytest.mark.parametrize(
    ("words", "file", "named"),
    [
        ("export base", "x.foo", ".md, .html, .htm, .json, .xml, .csv"),
        ("export base", "x.htlm", ".md, .html"),
        ("compare base same", "x.foo", ".md, .html, .htm, .json,"),
        ("compare base same", "x.xml", ".md, .html, .htm, .json,"),  # has no JUnit
    ],
)
def test_a_suffix_without_a_format_is_refused(words, file, named):
    refused = ending(2, f"{words} -o {file}")
    assert refused.out == ""
    assert f"{file}: no possible format has the suffix {Path(file).suffix}." in refused.err
    assert f"End the name with one of {named}" in refused.err
    assert not Path(file).exists()
    passing(f"{words} -o {file} --format markdown")
