"""The whole pipeline, through the command line, on the demo models and without a GPU."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Answer
from report.pages import Page
from safetensors.torch import load_file, save_file
from ssdprof.schema import SLICES, RunReport
from ssdprof.schema.outcome import outcome
from test_schemas import keeps_to

from ssdprof import kernels, runs
from ssdprof.checkpoint.names import DEMO_FOLDERS
from ssdprof.kernels import UnsupportedError, registry

pytestmark = pytest.mark.usefixtures("in_empty_folder")

DEMO = DEMO_FOLDERS["demo"]
SEQ = ("--seq", "40")
ONE_LAYER = ("--layers", "1")
ONE_PRECISION = ("--dtypes", "exact", "--states", "fp32")


@pytest.fixture(scope="module", params=DEMO_FOLDERS)
def demo_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one `ssdprof run` of a demo at every precision, and the two output streams of the run."""
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        answer = Answer("run", request.param, *SEQ, *ONE_LAYER, "--save-captures")
    assert answer.code == 0, answer.err
    (folder / "stdout").write_text(answer.out)
    (folder / "stderr").write_text(answer.err)
    return folder


@pytest.fixture
def in_demo_run(in_empty_folder: None, demo_run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: ARG001
    """That folder as the current one, instead of an empty one."""
    monkeypatch.chdir(demo_run)
    return demo_run


demo_alone = pytest.mark.parametrize(
    "demo_run", ["demo", pytest.param("demo-gdn", marks=pytest.mark.slow)], indirect=True
)


def latest() -> RunReport:
    return runs.read(None)[1]


def test_a_run_prints_its_report_and_keeps_it(in_demo_run: Path) -> None:
    report = latest()
    assert report.state == "complete"
    assert outcome(report).passed
    assert [layer.index for layer in report.captured_layers] == [1]
    compared = {(case.implementation, str(case.precision)) for case in report.cases}
    assert compared == {
        ("unfused", "exact, fp32 states"),
        ("fused", "exact, fp32 states"),
        ("unfused", "exact, bf16 states"),  # the baseline of the relaxed ones
        ("unfused", "relaxed, bf16 states"),
        ("fused", "relaxed, bf16 states"),
    }
    assert all(case.timing is None for case in report.cases)
    assert report.command[:2] == ("ssdprof", "run") or report.command
    shown = (in_demo_run / "stdout").read_text()
    assert report.checkpoint.repo_id in shown
    assert "fused" in shown
    assert "no GPU" in shown
    assert shown.splitlines()[-1].startswith("PASSED: all 5 cases")
    assert len(shown.splitlines()) <= 24
    (tensor,) = [one for one in report.cases[1].accuracy if one.tensor == "out"]
    assert len(tensor.vs_oracle.along) == min(SLICES, report.prompts[0].seqlen)
    assert tensor.vs_oracle.scale_max_abs > tensor.vs_oracle.max_abs
    assert report.run_id in (in_demo_run / "stderr").read_text()


@pytest.mark.usefixtures("in_demo_run")
def test_accuracy_reads_the_latest_run() -> None:
    answer = Answer("accuracy", "--dtypes", "relaxed")
    assert answer.code == 0
    assert "relaxed" in answer.out
    assert latest().run_id in answer.err
    shown = RunReport.model_validate_json(Answer("accuracy", "--states", "bf16", "--json").out)
    assert {case.precision.state_dtype for case in shown.cases} == {"bf16"}


@pytest.mark.usefixtures("in_demo_run")
def test_export_writes_what_a_job_attaches(tmp_path: Path) -> None:
    file = tmp_path / "report.md"
    answer = Answer("export", "--format", "markdown", "-o", str(file))
    assert answer.code == 0
    assert answer.out == ""
    assert file.read_text().startswith("## ")
    before = file.read_bytes()
    again = Answer("export", "-o", str(file))
    assert again.code == 2
    assert "--force" in again.err
    assert file.read_bytes() == before
    assert Answer("export", "-o", str(file), "--force").code == 0
    assert Answer("export").out.strip() == Answer("export", "-o", "-").out.strip() == before.decode().strip()


@pytest.mark.usefixtures("in_demo_run")
def test_export_writes_a_page_that_needs_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    answer = Answer("export", "--format", "html", "-o", str(file))
    assert (answer.code, answer.out) == (0, "")
    page = Page(file.read_text())
    assert page.asked == ["data:,"]
    assert latest().run_id in page.words
    assert "Error along the prompt" in page.words
    assert Answer("export", "--json", "--format", "html").code == 2


@pytest.mark.usefixtures("in_demo_run")
def test_the_run_is_listed() -> None:
    (row,) = json.loads(Answer("runs", "--json").out)
    assert (row["name"], row["model"]) == (latest().run_id, latest().checkpoint.repo_id)
    assert (row["verdict"], row["gpu"]) == ("passed", None)


@pytest.mark.usefixtures("in_demo_run")
def test_the_json_keeps_to_the_published_schema() -> None:
    document = json.loads(Answer("export", "--format", "json").out)
    assert json.loads(Answer("export", "--json").out) == document
    for words in (["--json"], ["--format", "json"], ["--json", "--format", "json"]):
        answer = Answer("export", *words, "-o", "report.json", "--force")
        assert (answer.code, answer.out) == (0, "")
        assert json.loads(Path("report.json").read_text()) == document
    Path("report.json").unlink()
    assert Answer("export", "--json", "--format", "markdown").code == 2
    keeps_to("report-v2", json.dumps(document))
    assert RunReport.model_validate(document) == latest()


def test_stored_captures_are_replayed(in_demo_run: Path) -> None:
    (captures,) = in_demo_run.glob("runs/*/captures")
    answer = Answer("run", str(captures), "--out", "again", *ONE_PRECISION, "--json")
    assert answer.code == 0, answer.err
    again = RunReport.model_validate_json(answer.out)
    before = [case for case in latest().cases if case.precision in {case.precision for case in again.cases}]
    assert [case.accuracy for case in again.cases] == [case.accuracy for case in before]
    shutil.rmtree("again")


@pytest.mark.usefixtures("in_empty_folder")
@pytest.mark.parametrize("command", ["run", "capture"])
def test_a_file_in_the_place_of_the_folder_is_bad_input(command: str) -> None:
    Path("file").write_text("")
    answer = Answer(command, "demo", "--seq", "16", "--out", "file")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == "error: The folder file cannot be made: a file is in its place. hint: Name another folder."


@pytest.mark.usefixtures("in_empty_folder")
def test_a_capture_prints_its_folder_on_one_line() -> None:
    folder = "/".join(["a [bold]long name" * 3] * 3)
    answer = Answer("capture", "demo", "--seq", "16", "--layers", "first:1", "--out", folder)
    assert (answer.code, answer.out) == (0, f"{folder}\n")


def test_options_of_a_model_do_not_go_with_stored_captures(in_demo_run: Path) -> None:
    (captures,) = in_demo_run.glob("runs/*/captures")
    answer = Answer("run", str(captures), "--seq", "16")
    assert answer.code == 2
    assert "stored captures" in answer.err


def damage(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def flip_a_byte(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def change_the_version(folder: Path) -> None:
    manifest = folder / "manifest.json"
    content = json.loads(manifest.read_text()) | {"schema_version": 99}
    manifest.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (flip_a_byte, "bytes of"),
        (lambda folder: damage(folder, lambda tensors: tensors.pop(min(tensors))), "lacks the tensor"),
        (change_the_version, "schema version 99"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "damaged"),
    ],
    ids=["flipped byte", "missing tensor", "schema version", "manifest"],
)
def test_a_damaged_capture(demo_run: Path, harm: Callable[[Path], Any], words: str) -> None:
    (captures,) = demo_run.glob("runs/*/captures")
    shutil.copytree(captures, "captures")
    harm(Path("captures"))
    answer = Answer("run", "captures", *ONE_PRECISION)
    assert answer.code == 2, answer.err
    assert words in answer.err
    assert answer.out == ""
    assert not list(Path().glob("runs/*"))


@demo_alone
def test_captures_that_were_broken_off(demo_run: Path) -> None:
    (captures,) = demo_run.glob("runs/*/captures")
    shutil.copytree(captures, "captures")
    manifest = json.loads(Path("captures/manifest.json").read_text()) | {"complete": False}
    Path("captures/manifest.json").write_text(json.dumps(manifest))
    answer = Answer("run", "captures", *ONE_PRECISION)
    assert answer.code == 1
    assert "PARTIAL: the replayed capture was interrupted" in " ".join(answer.out.split())
    assert not latest().capture_complete
    assert Answer("accuracy").code == Answer("export").code == 1
    Path("captures/manifest.json").write_text(json.dumps(manifest | {"layers": []}))
    answer = Answer("run", "captures")
    assert (answer.code, "holds no layer" in answer.err) == (2, True)


def test_capture_goes_to_the_assets_cache_or_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", "assets")
    answer = Answer("capture", "demo", *SEQ, *ONE_LAYER)
    assert answer.code == 0, answer.err
    assert Path(answer.out.replace("\n", "")).is_relative_to(Path.cwd() / "assets")
    told = Answer("capture", "demo", *SEQ, *ONE_LAYER, "--out", "here", "--json")
    assert json.loads(told.out)["manifest"]["complete"]
    again = Answer("capture", "demo", *SEQ, *ONE_LAYER, "--out", "here")
    assert (again.code, "--force" in again.err) == (2, True)
    assert Answer("capture", "demo", *SEQ, *ONE_LAYER, "--out", "here", "--force").code == 0


def test_several_lengths_and_layers() -> None:
    answer = Answer("run", "demo", "--seq", "20,33", "--layers", "every:2", *ONE_PRECISION, "--json")
    assert answer.code == 0, answer.err
    report = RunReport.model_validate_json(answer.out)
    assert [prompt.seqlen for prompt in report.prompts] == [20, 33]
    assert [layer.index for layer in report.captured_layers] == [0, 3]
    assert {(case.layer.index, case.dims.seqlen) for case in report.cases} == {(0, 20), (0, 33), (3, 20), (3, 33)}


def test_a_random_prompt_says_what_it_is_worth() -> None:
    answer = Answer("run", "demo", *SEQ, *ONE_LAYER, *ONE_PRECISION, "--prompt", "random", "--json")
    assert answer.code == 0
    assert any("random tokens" in note for note in RunReport.model_validate_json(answer.out).notes)


def test_weights_that_are_nan_are_found_and_fail() -> None:
    shutil.copytree(DEMO, "model")
    damage(Path("model"), lambda tensors: tensors["model.layers.1.mamba.in_proj.weight"].fill_(torch.nan))
    answer = Answer("run", "model", *SEQ, *ONE_LAYER, *ONE_PRECISION, "--json")
    assert answer.code == 1
    report = RunReport.model_validate_json(answer.out)
    assert {case.status for case in report.cases} == {"nonfinite"}
    (out,) = (found for found in report.cases[0].accuracy if found.tensor == "out")
    assert out.vs_oracle.first_nonfinite is not None
    for command in ("accuracy", "export"):
        answer = Answer(command)
        assert answer.code == 1
        assert "FAILED: the model's inputs, not the kernels. In layer 1" in " ".join(answer.out.split())


@pytest.fixture
def fused_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise UnsupportedError("fused: no such state size")

    fused = replace(kernels.get("ssd", "fused"), plan=refuse, run=refuse)
    monkeypatch.setitem(registry._implementations, ("ssd", "fused"), fused)


@pytest.mark.usefixtures("fused_refuses")
def test_a_refused_implementation_is_no_pass_unless_it_was_left_out() -> None:
    run = ("run", "demo", *SEQ, *ONE_LAYER, *ONE_PRECISION)
    answer = Answer(*run)
    assert answer.code == 1
    assert "REFUSED: fused (exact, fp32 states) in layer 1: fused: no such state size." in " ".join(answer.out.split())
    assert {case.status for case in latest().cases} == {"passed", "refused"}
    assert Answer("accuracy").code == Answer("export").code == 1
    left_out = Answer(*run, "--implementations", "unfused")
    assert left_out.code == 0
    assert {case.implementation for case in latest().cases} == {"unfused"}
    assert Answer("export").code == 0


def test_an_implementation_that_there_is_not_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ssdprof.pipeline.run.load", lambda *_: pytest.fail("loaded"))
    answer = Answer("run", "demo", *SEQ, "--implementations", "unfused,quick")
    assert (answer.code, "'quick'" in answer.err) == (2, True)
    assert not list(Path("runs").glob("*"))


@demo_alone
def test_a_dry_run_says_what_a_run_would_say(in_demo_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan on stdout, and the error of the run with its exit code."""
    monkeypatch.setattr("ssdprof.pipeline.model.load_model", lambda *_, **__: pytest.fail("loaded"))
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
    config = json.loads(Path("unusable/config.json").read_text())
    Path("unusable/config.json").write_text(json.dumps(config | {"hidden_act": "frobnicate"}))
    monkeypatch.setattr("ssdprof.pipeline.limits.device", lambda: torch.device("cpu"))
    for words, code in {
        ("demo", "--seq", "4k"): 3,
        ("demo", *SEQ, "--implementations", "quick"): 2,
        (str(captures), "--seq", "16"): 2,
        (str(captures), "--save-captures"): 2,
        (str(captures), "--layers", "7"): 2,
        ("broken",): 2,
        ("large",): 2,
        ("./unusable", *SEQ): 2,
        ("no/such/model/here",): 2,
    }.items():
        run, dry = Answer("run", *words, "--out", "never"), Answer("run", *words, "--dry-run")
        assert (run.code, dry.code) == (code, code), words
        assert words == ("broken",) or dry.err == run.err
    assert "4,096 tokens" in Answer("run", "demo", "--seq", "4k", "--dry-run").out
    assert "at most 256" in Answer("run", "large", "--dry-run").err
    shutil.rmtree("broken")
    shutil.rmtree("large")
    shutil.rmtree("unusable")


def test_a_dry_run_of_an_operator_that_cannot_be_replayed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssdprof.pipeline.run.unready", lambda _: "its kernels are not written")
    run, dry = Answer("run", "demo", *SEQ), Answer("run", "demo", *SEQ, "--dry-run")
    assert (run.code, dry.code, dry.err) == (2, 2, run.err)
    assert "can be captured, but not be replayed yet, because its kernels are not written" in dry.err
    assert Answer("capture", "demo", *SEQ, "--dry-run").code == 0


@demo_alone
def test_a_dry_run_of_stored_captures_names_their_files(in_demo_run: Path) -> None:
    (captures,) = in_demo_run.glob("runs/*/captures")
    answer = Answer("run", str(captures), "--dry-run", "--json")
    assert answer.code == 0, answer.err
    (file,) = json.loads(answer.out)["files"]
    assert (captures / file["name"]).stat().st_size == file["size_bytes"]
    assert json.loads(answer.out)["download_bytes"] == 0
    assert "40 tokens" in Answer("run", str(captures), "--dry-run").out
    assert "1 token\n" in Answer("run", "demo", "--seq", "1", "--dry-run").out


def test_a_config_that_claims_absurd_sizes() -> None:
    shutil.copytree(DEMO, "model")
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps(config | {"mamba_n_heads": 10**9, "hidden_size": 32 * 10**9}))
    answer = Answer("run", "model", *SEQ)
    assert answer.code == 2, answer.err
    assert answer.err.startswith("error: ")


def test_a_gpu_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the required memory and what would fit."""
    monkeypatch.setattr("ssdprof.pipeline.limits.free_bytes", lambda: 1 << 20)
    answer = Answer("run", "demo", *SEQ)
    assert answer.code == 3
    assert "and 1.00 MiB are free" in answer.err
    assert "take a smaller model" in answer.err


def test_a_full_disk_ends_a_run_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    answer = Answer("run", "demo", *SEQ, *ONE_LAYER, *ONE_PRECISION)
    assert answer.code == 3
    assert "disk is full" in answer.err


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the command line in a separate process."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "ssdprof", *words],
            # a shell's background job ignores Ctrl-C, and so would its children
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    for _ in range(1200):
        if condition():
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    pytest.fail("nothing happened for a minute")


def layers_done(report: RunReport) -> int:
    """Number of layers with their last case; unfused comes before it."""
    return len({case.layer for case in report.cases if case.implementation == "fused"})


def test_interrupted_before_the_first_case(running: Callable[..., subprocess.Popen[str]]) -> None:
    """No run is kept that could become the latest one."""
    process = running("run", "demo", "--seq", "300")
    wait_for(lambda: any(Path("runs").glob("*/.lock")), process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert not list(Path("runs").glob("*"))
    assert runs.latest() is None


def interrupt_a_run(running: Callable[..., subprocess.Popen[str]], folder: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a run that got a signal after its first layer.

    On a busy machine a run can end before the signal arrives.  Then another run is started.
    """
    for _ in range(3):
        process = running("run", "demo", "--seq", "300", *ONE_PRECISION, "--out", folder)
        wait_for(lambda: Path(folder, "report.json").exists() and layers_done(runs.read(folder)[1]) >= 1, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        if runs.read(folder)[1].state == "partial":
            return process.returncode, out, err
        shutil.rmtree(folder)
    pytest.fail(f"three runs had ended before a signal reached them; the last one: {process.returncode} {out} {err}")


def test_interrupted(running: Callable[..., subprocess.Popen[str]]) -> None:
    """The report is valid and marked as partial, and no command treats it as passed."""
    code, out, err = interrupt_a_run(running, "run")
    assert (code, out) == (130, ""), err
    assert "marked as partial" in err
    assert "Traceback" not in err
    report = runs.read("run")[1]
    assert report.state == "partial"
    assert len(report.captured_layers) < 4
    assert {case.layer for case in report.cases} <= set(report.captured_layers)
    assert all(case.status == "passed" for case in report.cases)
    for command in ("export", "accuracy"):
        answer = Answer(command, "run")
        assert answer.code == 1
        assert "PARTIAL" in answer.out


@pytest.mark.slow
def test_killed(running: Callable[..., subprocess.Popen[str]]) -> None:
    process = running("run", "demo", "--seq", "300", *ONE_PRECISION, "--out", "run")
    wait_for(lambda: Path("run/report.json").exists() and layers_done(runs.read("run")[1]) >= 1, process)
    process.kill()
    process.wait()
    report = runs.read("run")[1]
    assert report.state == "partial"
    assert report.cases


@pytest.mark.slow
def test_progress_and_data_do_not_mix(running: Callable[..., subprocess.Popen[str]]) -> None:
    process = running("run", "demo", *SEQ, *ONE_LAYER, *ONE_PRECISION, "--json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    RunReport.model_validate_json(out)
    for noise in ("Warning", "falling back", "Loading weights"):
        assert noise not in err
