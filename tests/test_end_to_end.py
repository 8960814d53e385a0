"""The whole of ssdprof, through the command line, on the demo models and without a GPU."""

import json
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import tiny_models
import torch
from checkpoint.folders import edit_json
from command_line import DEMOS, Answer, ending, latest, passing
from report.pages import Page
from torchrun import Start, starting, wait_for

from ssdprof.checkpoint.names import DEMO_FOLDERS
from ssdprof.core.outcome import Outcome
from ssdprof.core.report import Report
from ssdprof.store import reports

pytestmark = pytest.mark.usefixtures("in_empty_folder")

DEMO = DEMO_FOLDERS["demo"]
SEQ = "--seq 40"
ONE_LAYER = "--layers 1"
ONE_PRECISION = "--dtypes exact --states fp32"
FAST = f"{SEQ} {ONE_LAYER} {ONE_PRECISION}"


@pytest.fixture(scope="module", params=DEMOS)
def demo_run(request, tmp_path_factory) -> Path:
    """A folder with one `ssdprof run` of a demo at every precision, and the two output streams of
    the run.
    """
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        answer = passing(f"run {request.param} {SEQ} {ONE_LAYER} --save-captures")
    (folder / "stdout").write_text(answer.out)
    (folder / "stderr").write_text(answer.err)
    return folder


@pytest.fixture
def in_demo_run(in_empty_folder: None, demo_run: Path, monkeypatch) -> Path:
    """That folder as the current one, instead of an empty one."""
    monkeypatch.chdir(demo_run)
    return demo_run


demo_alone = pytest.mark.parametrize("demo_run", DEMOS, indirect=True)


def read(document: str) -> Report:
    return Report.model_validate_json(document)


def test_a_run_prints_its_report_and_keeps_it(in_demo_run: Path):
    report = latest()
    assert report.complete
    assert Outcome(report).passed
    assert [layer.index for layer in report.captured] == [1]
    compared = {(case.implementation, str(case.precision)) for case in report.cases}
    assert compared == {
        ("unfused", "exact, fp32 states"),
        ("fused", "exact, fp32 states"),
        ("unfused", "exact, bf16 states"),  # the baseline of the relaxed ones
        ("unfused", "relaxed, bf16 states"),
        ("fused", "relaxed, bf16 states"),
    }
    assert all(case.time_us is None for case in report.cases)
    assert len((in_demo_run / "stdout").read_text().splitlines()) <= 24
    assert f"Kept in runs/{report.id}." in (in_demo_run / "stderr").read_text()
    (row,) = json.loads(Answer("runs --json").out)
    assert (row["name"], row["model"]) == (report.id, report.target)
    assert (row["kind"], row["verdict"], row["state"], row["gpu"]) == (
        "run",
        "passed",
        "complete",
        None,
    )
    assert report.id in Answer("runs").out


@pytest.mark.slow
@pytest.mark.parametrize("name", [*tiny_models.KDA, *tiny_models.IN_MEMORY])
def test_a_kda_model_of_every_type_runs_from_its_folder(name):
    tiny_models.build(name).save_pretrained(name)
    passing(f"run {name} --prompt random --seq 24 --layers first:1 {ONE_PRECISION}")
    assert Outcome(latest()).passed
    assert [layer.operator for layer in latest().captured] == ["kda"]


@pytest.mark.usefixtures("in_demo_run")
def test_export_writes_what_a_job_attaches(tmp_path):
    file = tmp_path / "report.md"
    assert passing(f"export --format markdown -o {file}").out == ""
    assert file.read_text().startswith("## ")
    before = file.read_bytes()
    assert "--force" in ending(2, f"export -o {file}").err
    assert file.read_bytes() == before
    passing(f"export -o {file} --force")
    ending(2, "export --json --format html")
    assert (
        Answer("export").out.strip() == Answer("export -o -").out.strip() == before.decode().strip()
    )
    html = tmp_path / "report.html"
    passing(f"export --format html -o {html}")
    page = Page(html.read_text())
    assert page.asked == ["data:,"]  # it needs nothing else
    assert latest().id in page.words
    assert "Error by position" in page.words


def test_stored_captures_are_replayed(in_demo_run: Path):
    (captures,) = in_demo_run.glob("runs/*/captures")
    answer = passing(f"run {captures} --out again {ONE_PRECISION} --json")
    again = {case.name: case.accuracy for case in read(answer.out).cases}
    before = {case.name: case.accuracy for case in latest().cases}
    assert again == {name: before[name] for name in again}
    shutil.rmtree("again")


@demo_alone
def test_captures_that_were_broken_off(demo_run: Path):
    (captures,) = demo_run.glob("runs/*/captures")
    shutil.copytree(captures, "captures")
    manifest = Path("captures/manifest.json")
    edit_json(manifest, complete=False)
    answer = ending(1, f"run captures {ONE_PRECISION}")
    assert "PARTIAL: the replayed capture was interrupted" in answer.shown
    assert not latest().capture_complete
    assert Answer("accuracy").code == Answer("export").code == 1
    edit_json(manifest, layers=[])
    assert "holds no layer" in ending(2, "run captures").err


def test_several_lengths_and_layers_of_a_random_prompt():
    words = f"--seq 20,33 --layers every:2 {ONE_PRECISION} --prompt random"
    answer = passing(f"run demo {words} --json")
    report = read(answer.out)
    assert [prompt.seqlen for prompt in report.prompts] == [20, 33]
    assert [layer.index for layer in report.captured] == [0, 3]
    places = {(case.layer.index, case.seqlen) for case in report.cases if case.layer}
    assert places == {(0, 20), (0, 33), (3, 20), (3, 33)}
    assert any("random tokens" in note for note in report.remarks)


def test_conditions_on_times_need_a_gpu(monkeypatch):
    """Those of the settings file are not judged without one; the others are."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for gate in ("speedup:1.5", "time@call:5"):
        assert "needs an NVIDIA GPU" in ending(3, f"run demo {FAST} --gate {gate}").err
    Path("ssdprof.toml").write_text('gates = ["speedup:1.5", "rms:3"]\n')
    answer = passing(f"run demo {FAST} --gate match@1e-2:99.5%")
    assert "speedup:1.5 of the settings file is not judged: this machine has no GPU." in answer.err
    assert [gate.text for gate in latest().conditions] == ["match@1e-2:99.5%", "rms:3"]
    assert "GATE FAILED: rms:0.1: layer 1" in ending(1, "accuracy --gate rms:0.1").err


@demo_alone
def test_a_dry_run_says_what_a_run_would_say(in_demo_run: Path, monkeypatch):
    """The plan on stdout, and the error of the run with its exit code."""
    monkeypatch.setattr("ssdprof.jobs.plan.load_model", lambda *_, **__: pytest.fail("loaded"))
    (captures,) = in_demo_run.glob("runs/*/captures")
    shutil.copytree(captures, "broken")
    (file,) = Path("broken").glob("*.safetensors")
    file.unlink()
    shutil.copytree(captures, "large")
    manifest = json.loads(Path("large/manifest.json").read_text())
    tensors = manifest["layers"][0]["tensors"]
    for name in {"B", "C", "q", "k"} & tensors.keys():  # the state of SSD, and K of GDN
        tensors[name]["shape"][-1] = 512
    Path("large/manifest.json").write_text(json.dumps(manifest))
    shutil.copytree(DEMO, "unusable")
    edit_json(Path("unusable/config.json"), hidden_act="frobnicate")
    monkeypatch.setattr("ssdprof.jobs.limits.device", lambda: torch.device("cpu"))
    for words, code in {
        "demo --seq 4k": 3,
        f"demo {SEQ} --implementations quick": 2,
        f"{captures} --seq 16": 2,
        f"{captures} --save-captures": 2,
        f"{captures} --layers 7": 2,
        "broken": 2,
        "large": 2,
        f"./unusable {SEQ}": 2,
        "no/such/model/here": 2,
    }.items():
        run = Answer(f"run {words} --out never")
        dry = Answer(f"run {words} --dry-run")
        assert (run.code, dry.code) == (code, code), words
        assert words == "broken" or dry.err == run.err
    assert "4,096 tokens" in Answer("run demo --seq 4k --dry-run").out
    assert "at most 256" in Answer("run large --dry-run").err
    planned = json.loads(Answer(f"run {captures} --dry-run --json").out)
    assert (captures / planned["files"][0]["name"]).stat().st_size == planned["files"][0][
        "size_bytes"
    ]
    assert planned["download_bytes"] == 0
    assert "40 tokens" in Answer(f"run {captures} --dry-run").out
    assert "1 token\n" in Answer("run demo --seq 1 --dry-run").out
    for folder in ("broken", "large", "unusable"):
        shutil.rmtree(folder)


# --- in a process of its own


@pytest.fixture
def start(tmp_path) -> Iterator[Start]:
    with starting(tmp_path) as start:
        yield partial(start, ranks=False)


def a_layer_is_done(folder: str) -> bool:
    return (Path(folder) / reports.HEADER).exists() and any(
        case.implementation == "fused" for case in reports.load(folder)[1].cases
    )


@pytest.mark.slow
def test_interrupted_before_the_first_case(start: Start):
    """No run is kept that could become the latest one."""
    process = start("run demo --seq 300")
    wait_for(lambda: any(Path("runs").glob(f"*/{reports.HEADER}")) or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert not list(Path("runs").glob("*"))
    assert reports.latest("run") is None


@pytest.mark.slow
def test_interrupted(start: Start):
    """The report is valid and marked as partial, and no command treats it as passed.

    On a busy machine a run can end before the signal arrives.  Then another run is started.
    """
    for _ in range(3):
        process = start(f"run demo --seq 150 {ONE_PRECISION} --out run")
        wait_for(lambda process=process: a_layer_is_done("run") or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        report = reports.load("run")[1]
        if not report.complete:
            break
        shutil.rmtree("run")
    assert (process.returncode, out, report.complete) == (130, "", False), err
    assert "marked as partial" in err
    assert "Traceback" not in err
    assert len(report.captured) < 4
    assert {case.layer for case in report.cases} <= set(report.captured)
    assert all(case.result == "passed" for case in report.cases)
    for command in ("export", "accuracy"):
        answer = ending(1, f"{command} run")
        assert "PARTIAL" in answer.out


@pytest.mark.slow
def test_progress_and_data_do_not_mix(start: Start):
    process = start(f"run demo {FAST} --json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    read(out)
    for noise in ("Warning", "falling back", "Loading weights"):
        assert noise not in err
