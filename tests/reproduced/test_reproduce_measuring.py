"""The commands that run, the results that are kept, and the results after an early end."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import reproduce
import within
from report.make import failed, make_report
from reproduced.made import DOCUMENT, H200, RECORDED, document, means
from reproducing import measuring, reports
from reproducing import published as documents
from reproducing.result import load, typed
from reproducing.values import values

from ssdprof import cli
from ssdprof.bench.schema import BenchReport, LeftOut, dump
from ssdprof.errors import BadInputError, ExitCode, MissingCapabilityError, SsdprofError
from ssdprof.schema import Asked, Participant


def test_a_result_is_written_and_rendered_again(
    tmp_path: Path, measured: dict[str, BenchReport], capsys: pytest.CaptureFixture[str]
) -> None:
    left_out = LeftOut(cell="mamba2-2.7b, 1 x 9", reason="the budget of 5 s was spent")
    measured["kernels"] = measured["kernels"].model_copy(update={"left_out": (left_out,)})
    assert reproduce.reproduce("test", document(), budget=60, out=tmp_path) == ExitCode.OK
    page = (tmp_path / "test.md").read_text(encoding="utf-8")
    for words in (
        f"Quoted from H200; measured on {H200}.",
        "| It is faster |",
        "- It is faster: It says so.",
        "nobody can",
        "kernels: mamba2-2.7b, 1 x 9: the budget of 5 s was spent",
    ):
        assert words in page
    assert re.search(r"\| 1 x 999 +\| +\| 2 +\| not measured", page)
    assert "times as fast" in (tmp_path / "test.svg").read_text(encoding="utf-8")
    file = tmp_path / "test.json"
    assert reproduce.again("test", document(), file, check=True) == ExitCode.OK
    (tmp_path / "test.md").write_text("old", encoding="utf-8")
    assert reproduce.again("test", document(), file, check=True) == ExitCode.GATE_FAILED
    assert "test.md is not what its result says" in capsys.readouterr().err
    assert reproduce.again("test", document(), file, check=False) == ExitCode.OK
    assert (tmp_path / "test.md").read_text(encoding="utf-8") == page


def test_a_claim_that_does_not_hold_is_a_result(tmp_path: Path, measured: dict[str, BenchReport]) -> None:
    assert measured
    claim = {"words": "W", "quoted": "Q", "holds": "least > 1000"}
    assert reproduce.reproduce("test", document(claim=[claim]), budget=60, out=tmp_path) == ExitCode.OK
    assert json.loads((tmp_path / "test.json").read_text())["claims"][0]["verdict"] == "outside"


@pytest.mark.parametrize(("status", "code"), [("inaccurate", 1), ("nonfinite", 1), ("failed", 1), ("refused", 0)])
@pytest.mark.parametrize("implementation", ["fused", "published"])
def test_exit_code_1_is_for_wrong_outputs_of_ours(
    tmp_path: Path, measured: dict[str, BenchReport], status: str, code: int, implementation: str
) -> None:
    report = measured["kernels"]
    changed = {"status": status, "reason": "off by 7", "timing": None, "speedups": (), "over_exact": None}
    first = report.cells[0]
    cases = tuple(one.model_copy(update=changed if one.implementation == implementation else {}) for one in first.cases)
    cells = (first.model_copy(update={"cases": cases}), *report.cells[1:])
    measured["kernels"] = report.model_copy(update={"cells": cells, "peers": {"published": "1"}})
    expected = code if implementation == "fused" else ExitCode.OK
    assert reproduce.reproduce("test", document(), budget=60, out=tmp_path) == expected
    page = (tmp_path / "test.md").read_text(encoding="utf-8")
    assert ("## Wrong outputs" in page) == bool(expected)
    assert "off by 7" in page
    assert reproduce.again("test", document(), tmp_path / "test.json", check=False) == expected


@pytest.mark.parametrize("kind", ["library", "own"])
def test_a_library_that_fails_as_the_baseline_of_a_run_is_no_wrong_output(kind: Literal["library", "own"]) -> None:
    """The run fails, because it has no baseline.  The exit code of wrong outputs is only about our outputs."""
    report = make_report()
    first, second, *rest = report.cases
    theirs = failed(first, "failed", "not ours").model_copy(update={"implementation": "theirs"})
    other = Participant(name="theirs", kind=kind, source="1", precisions=(first.precision,))
    asked = Asked(implementations=(), precisions=(), layers=(), others=(other,))
    cases = (theirs, failed(second, "inaccurate", "off by 7"), *rest)
    report = report.model_copy(update={"cases": cases, "asked": asked, "baseline": "theirs"})
    wrong = [one.rpartition(": ")[2] for one in reports.wrong(report)]
    assert wrong == (["off by 7"] if kind == "library" else ["not ours", "off by 7"])
    assert list(reports.missing(report).values()) == ["failed: not ours", "inaccurate: off by 7"]


def test_without_a_gpu_nothing_is_measured(tmp_path: Path, measured: dict[str, BenchReport]) -> None:
    measured.clear()
    with pytest.raises(MissingCapabilityError, match="exit code 3"):
        reproduce.reproduce("test", document(), budget=60, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_the_budget_does_not_reach_is_named(
    monkeypatch: pytest.MonkeyPatch, recorded: BenchReport, tmp_path: Path
) -> None:
    now, given = [0.0], []

    def run(words: list[str], seconds: float) -> int:
        now[0] += 30.0
        given.append(seconds)
        Path(words[words.index("--out") + 1]).write_text(dump(recorded), encoding="utf-8")
        return ExitCode.OK

    monkeypatch.setattr(measuring, "time", SimpleNamespace(monotonic=lambda: now[0]))
    measures = [DOCUMENT["measure"][0] | {"name": name, "share": 0.5} for name in ("kernels", "second", "third")]
    *_, (found, missing) = measuring.measure(document(measure=measures), means(tmp_path, seconds=65), run)
    assert given == [32.5, 17.5]
    assert list(found) == ["kernels", "second"]
    assert missing == {"measurement third": "the budget of 65 s was spent"}


def test_the_published_kernel_needs_a_checkout(recorded: BenchReport, tmp_path: Path) -> None:
    def run(words: list[str], _seconds: float) -> int:
        Path(words[words.index("--out") + 1]).write_text(dump(recorded), encoding="utf-8")
        return ExitCode.GATE_FAILED

    stated = document(
        measure=[DOCUMENT["measure"][0] | {"commands": ["ssdprof bench ssd --impl published --out {out}"]}]
    )
    *_, (found, missing) = measuring.measure(stated, means(tmp_path), run)
    assert (list(found), missing) == (["kernels"], {"the published kernel": "--published names no checkout of it"})
    *_, (found, missing) = measuring.measure(stated, means(tmp_path, published=tmp_path), run)
    assert (list(found), missing) == (["kernels"], {})


def test_a_script_that_fails_ends_its_measurement(tmp_path: Path) -> None:
    """Exit code 1 of a script is not a verdict."""
    ran: list[list[str]] = []

    def run(words: list[str], _seconds: float) -> int:
        ran.append(words)
        return ExitCode.GATE_FAILED

    commands = ["python make_random_checkpoint.py x {scratch}/x", "ssdprof run {scratch}/x"]
    stated = document(measure=[DOCUMENT["measure"][0] | {"commands": commands}])
    with pytest.raises(MissingCapabilityError, match=r"make_random_checkpoint\.py .* ended with exit code 1"):
        list(measuring.measure(stated, means(tmp_path), run))
    assert len(ran) == 1


def test_a_command_that_fails_does_not_take_the_others_with_it(recorded: BenchReport, tmp_path: Path) -> None:
    """A report that the failed command wrote before is kept too."""

    def run(words: list[str], _seconds: float) -> int:
        if "--broken" in words:
            return ExitCode.BAD_INPUT
        Path(words[words.index("--out") + 1]).write_text(dump(recorded), encoding="utf-8")
        return cli.INTERRUPTED if "--half" in words else ExitCode.OK

    base = DOCUMENT["measure"][0]
    measures = [
        base,
        base | {"name": "broken", "commands": ["ssdprof bench ssd --broken"]},
        base | {"name": "half", "commands": ["ssdprof bench ssd --half --out {out}"]},
    ]
    *_, (found, missing) = measuring.measure(document(measure=measures), means(tmp_path), run)
    assert list(found) == ["kernels", "half"]
    assert missing == {
        "measurement broken": "`ssdprof bench ssd --broken` ended with exit code 2",
        "measurement half": "`ssdprof bench ssd --half --out {out}` ended with exit code 130",
    }


def test_commands_get_their_words(tmp_path: Path) -> None:
    places = {"out": "o.json", "budget": "60", "scratch": "s", "folder": "f"}
    words = measuring.words_of("ssdprof bench ssd --impl fused,published --out {out}", places, tmp_path)
    assert words[:3] == [sys.executable, "-m", "ssdprof"]
    assert words[5:] == ["--impl", f"fused,published={tmp_path}", "--out", "o.json"]
    assert measuring.words_of("python a.py {scratch}/x", places, None) == [
        sys.executable,
        str(reproduce.HERE / "a.py"),
        "s/x",
    ]
    assert measuring.words_of("ssdprof bench ssd --impl fused,published", places, None)[5:] == ["--impl", "fused"]
    with pytest.raises(BadInputError, match="no program"):
        measuring.words_of("rm -r {scratch}", places, None)


def test_what_was_measured_before_an_interruption_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recorded: BenchReport
) -> None:
    """The report of the interrupted measurement is kept too, and no other measurement begins."""
    ran = []

    def run(words: list[str], _seconds: float) -> int:
        ran.append(words)
        Path(words[words.index("--out") + 1]).write_text(dump(recorded), encoding="utf-8")
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "run_within", run)
    second = DOCUMENT["measure"][0] | {"name": "second"}
    with pytest.raises(KeyboardInterrupt):
        reproduce.reproduce("test", document(measure=[*DOCUMENT["measure"], second]), budget=60, out=tmp_path)
    content = json.loads((tmp_path / "test.json").read_text())
    assert (list(content["reports"]), len(ran)) == (["kernels"], 1)
    assert content["missing"] == dict.fromkeys(("measurement kernels", "measurement second"), measuring.INTERRUPTED)
    assert {file.name for file in tmp_path.iterdir()} == {"test.json", "test.md", "test.svg"}


def test_an_interruption_reaches_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Even if only this process is interrupted.  The process waits until the command has ended."""
    monkeypatch.setattr(within, "TO_NOTICE_S", 0.1)
    ready, kept = tmp_path / "ready", tmp_path / "kept"
    script = (
        "import time, pathlib, sys\n"
        "try:\n    pathlib.Path(sys.argv[1]).touch(); time.sleep(60)\n"
        "except KeyboardInterrupt:\n    pathlib.Path(sys.argv[2]).touch()\n"
    )

    def interrupt() -> None:
        while not ready.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        within.run_within([sys.executable, "-c", script, str(ready), str(kept)], 60)
    assert kept.exists()


def test_a_report_that_cannot_be_read_does_not_take_the_others_with_it(recorded: BenchReport, tmp_path: Path) -> None:
    def run(words: list[str], _seconds: float) -> int:
        broken = "--broken" in words
        Path(words[words.index("--out") + 1]).write_text("{" if broken else dump(recorded), encoding="utf-8")
        return ExitCode.OK

    broken = DOCUMENT["measure"][0] | {"name": "broken", "commands": ["ssdprof bench ssd --broken --out {out}"]}
    *_, (found, missing) = measuring.measure(document(measure=[broken, *DOCUMENT["measure"]]), means(tmp_path), run)
    assert list(found) == ["kernels"]
    assert "is not a result of ssdprof bench" in missing["measurement broken"]


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MissingCapabilityError, match="file cannot be written to"):
        reproduce.reproduce("test", document(), budget=60, out=tmp_path / "file")


@pytest.mark.parametrize("hash_of", ["", "abc"])
def test_a_recorded_report_takes_the_place_of_a_measurement(
    tmp_path: Path, recorded: BenchReport, hash_of: str
) -> None:
    file = tmp_path / "old.json"
    own = "f" * 64 if not hash_of else ""
    file.write_text(dump(recorded.model_copy(update={"kernels": own})), encoding="utf-8")
    out = tmp_path / "out"
    records = reproduce.recorded(document(), [f"kernels={file}"], hash_of)
    assert reproduce.reproduce("test", document(), budget=60, out=out, records=records) == ExitCode.OK
    page = (out / "test.md").read_text(encoding="utf-8")
    assert f"is the record `old.json` of {recorded.created}, kernels {hash_of or own[:12]}" in page
    assert ("does not hold their hash" in page) == bool(hash_of)
    assert "Measured 2" not in page
    assert reproduce.again("test", document(), out / "test.json", check=True) == ExitCode.OK
    found = load("test", document(), out / "test.json")
    assert found.values == values(document(), {"kernels": recorded})


def test_a_recorded_report_must_be_of_what_is_measured() -> None:
    """Otherwise claims about bf16 would judge a bench in fp16."""
    for subject, right in (("mamba2-2.7b, fp16", True), ("mamba2-2.7b, bf16", False), ("nemotron-3-nano, fp16", False)):
        stated = document(measure=[DOCUMENT["measure"][0] | {"subject": subject}])
        if right:
            assert list(reproduce.recorded(stated, [f"kernels={RECORDED}"], "")) == ["kernels"]
            continue
        with pytest.raises(BadInputError, match=r"is a report of mamba2-2\.7b, fp16") as told:
            reproduce.recorded(stated, [f"kernels={RECORDED}"], "")
        assert told.value.hint == f"Give one of {subject}."


def test_a_recorded_prefill_must_be_of_the_model() -> None:
    stated, folder = documents.load("end-to-end"), reproduce.RECORDS / "h200-prefill"
    assert list(reproduce.recorded(stated, [f"prefill={folder / 'mamba2-2.7b.json'}"], "")) == ["prefill"]
    with pytest.raises(BadInputError, match=r"is a report of qwen3\.5-9b"):
        reproduce.recorded(stated, [f"prefill={folder / 'qwen3.5-9b.json'}"], "")


def test_a_measurement_has_one_recorded_report() -> None:
    with pytest.raises(BadInputError, match="names kernels twice"):
        reproduce.recorded(document(), [f"kernels={RECORDED}"] * 2, "")


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("../published/fig11", "is not a published comparison", "Choose from: "),
        ("scan-002", "scan-002 needs an NVIDIA GPU", "--from renders a result again without one."),
        ("fig11", "fig11 needs an NVIDIA GPU", "and --recorded takes a report that exists."),
        ("--page fig11", "--page is about all results", "Give it alone"),
        ("--page --from x.json", "--page is about all results", "Give it alone"),
        ("fig11 --from x.json --out y", "--from writes into the folder of its result", "Give it alone"),
        ("fig11 --from x.json --recorded chunks=y", "--from writes into the folder of its result", "Give it alone"),
    ],
)
def test_words_that_it_cannot_follow(monkeypatch: pytest.MonkeyPatch, words: str, message: str, hint: str) -> None:
    monkeypatch.setattr("sys.argv", ["reproduce.py", *words.split()])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SsdprofError, match=message) as told:
        reproduce.main()
    assert hint in told.value.hint


@pytest.mark.parametrize("words", ["kernels", "other=x.json"])
def test_what_names_no_measurement_is_refused(words: str) -> None:
    with pytest.raises(BadInputError, match="names no measurement"):
        reproduce.recorded(document(), [words], "")


@pytest.mark.parametrize(
    ("word", "plain"),
    [
        ("/tmp/a b/x.json", "x.json"), ("--out=/tmp/x/y", "--out=y"), ("published=/root/mamba", "published=mamba"),
        ("fused,published=/a/b,unfused", "fused,published=b,unfused"), ("results/x.json", "results/x.json"),
        ("/tmp/x/", "x/"), ("1x128k", "1x128k"),
    ],
)  # fmt: skip
def test_commands_are_stored_without_the_folders_of_the_machine(word: str, plain: str) -> None:
    assert shlex.split(typed(["python", word])) == ["python", plain]
