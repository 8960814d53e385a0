"""`ssdprof stalls` as a user calls it, on a machine without a GPU."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from captured import LAYERS, layer, store_layers
from cases import report as run_report
from command_line import Answer, ending, passing
from kernels.kernel_cases import SSDCase
from stalls import synthetic

from ssdprof.core.base import EXACT_FP32
from ssdprof.core.case import Launch
from ssdprof.core.report import Report
from ssdprof.core.stalls import Launched, StallReport
from ssdprof.errors import BadInputError, ExitCode, MissingCapabilityError, SsdprofError
from ssdprof.jobs import documents
from ssdprof.jobs import stalls as stalls_job
from ssdprof.jobs.options import ModelOptions, RunOptions, StallsOptions
from ssdprof.progress import Watcher
from ssdprof.stalls import ncu
from ssdprof.stalls.facts import analyse
from ssdprof.store.reports import HEADER, dump

Jobs = list[tuple[str, int]]  # (implementation, layer)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """A report that was recorded elsewhere."""
    monkeypatch.setattr(
        "ssdprof.commands.measuring.read",
        lambda path: synthetic.report(synthetic.kernel(), name=path.name),
    )
    return tmp_path / "a.ncu-rep"


def test_a_report_from_elsewhere_is_shown_and_json_is_the_whole_record(elsewhere: Path):
    answer = passing(f"stalls --from {elsewhere}")
    assert "_kernel: 2.00 µs in one kernel." in answer.out
    answer = Answer(f"stalls --from {elsewhere} --json")
    assert StallReport.model_validate(json.loads(answer.out)).kernels[0].duration_us == 2.0
    assert str(elsewhere.parent) not in answer.out
    assert Answer(f"stalls --from {elsewhere} --json").out == answer.out


# --- the whole job, with stand-ins for the GPU and for ncu


@pytest.fixture
def captured(tmp_path) -> Path:
    return store_layers(tmp_path / "captures", SSDCase(seqlen=64, dtype=torch.bfloat16))


def pretended(name: str, *kernels: str) -> Launched:
    facts = {"registers": 96, "spills": 0, "shared_bytes": 1024, "warps_pct": 31.0}
    launches = tuple(Launch(kernel=one, config={}, **facts) for one in kernels)
    return Launched(
        implementation=name,
        variant="v",
        precision=EXACT_FP32,
        launch_count=len(kernels),
        launches=launches,
    )


@pytest.fixture
def gpu(monkeypatch) -> Jobs:
    """A machine with a GPU that launches nothing; returns the jobs that it received."""
    jobs = []

    def launch(job: ncu.Job, **_) -> Launched:
        jobs.append((job.implementation, job.layer))
        return pretended(job.implementation, f"_{job.implementation}")

    def profile(job: ncu.Job, launched: Launched, _program: str, file: Path, **_) -> float:
        assert launched.implementation == job.implementation
        file.write_text(job.implementation)
        return 1.0

    def read(path: Path) -> object:
        return synthetic.report(synthetic.kernel(function=f"_{path.read_text()}"), name=path.name)

    monkeypatch.setattr(stalls_job, "require_gpu", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(ncu, "launch", launch)
    monkeypatch.setattr(ncu, "profile", profile)
    monkeypatch.setattr(ncu, "find", lambda: ("ncu", "2025.3.1.0"))
    monkeypatch.setattr(stalls_job, "read", read)
    return jobs


@pytest.fixture
def launches(gpu: Jobs, monkeypatch) -> Callable[[Any], None]:
    """Sets what the launch of every implementation but `fused` gives: an error, or an
    implementation's launches.
    """
    usual = ncu.launch

    def put(outcome: Launched | Exception):
        def launch(job: ncu.Job, **options) -> Launched:
            if isinstance(outcome, Exception) and job.implementation != "fused":
                raise outcome
            return outcome if isinstance(outcome, Launched) else usual(job, **options)

        monkeypatch.setattr(ncu, "launch", launch)

    return put


def test_stored_captures_are_profiled_and_everything_is_kept(captured: Path, gpu: Jobs, tmp_path):
    out = tmp_path / "out"
    answer = passing(f"stalls {captured} --out {out} --json")
    assert gpu == [("unfused", 5), ("fused", 5)]  # the middle layer
    report = StallReport.model_validate_json(answer.out)
    assert [kernel.implementation for kernel in report.kernels] == ["unfused", "fused"]
    assert (report.dims.dtype, report.ncu, report.command[0]) == ("bf16", "2025.3.1.0", "ssdprof")
    kept = out / "stalls"
    assert {"unfused.ncu-rep", "fused.ncu-rep", "stalls.json", "stalls.md"} <= {
        file.name for file in kept.iterdir()
    }
    assert (kept / "stalls.json").read_text() == answer.out
    text = (kept / "stalls.md").read_text()
    title = "ssdprof stalls, ibm-granite/granite-4.0-h-small, layers.5, 64 tokens, "
    for words in ("ncu 2025.3.1.0", "layers.5 (layer 5)", title, report.created):
        assert words in text


def test_layers_libraries_and_own_kernels_are_profiled_by_name(captured: Path, gpu: Jobs, tmp_path):
    words = "fused,mamba_ssm,published=checkout,my_module:kernel"
    answer = passing(f"stalls {captured} --out {tmp_path}/o --layer 7 --impl {words} --json")
    assert gpu == [(name, 7) for name in words.split(",")]
    report = StallReport.model_validate_json(answer.out)
    assert [kernel.implementation for kernel in report.kernels] == words.split(",")
    files = {file.name for file in (tmp_path / "o" / "stalls").glob("*.ncu-rep")}
    assert files == {
        "fused.ncu-rep",
        "mamba_ssm.ncu-rep",
        "published-checkout.ncu-rep",
        "my_module-kernel.ncu-rep",
    }


def test_a_library_that_cannot_be_profiled_is_left_out_and_named(
    captured: Path, gpu: Jobs, launches: Callable[[Any], None], tmp_path
):
    launches(
        SsdprofError(
            "mamba_ssm cannot be imported: no.", "pip install it.", ExitCode.MISSING_CAPABILITY
        )
    )
    answer = passing(f"stalls {captured} --out {tmp_path}/o --impl mamba_ssm,fused")
    assert "mamba_ssm is left out: mamba_ssm cannot be imported: no." in answer.shown
    assert gpu == [("fused", 5)]
    alone = ending(3, f"stalls {captured} --out {tmp_path}/p --impl mamba_ssm")
    assert "cannot be imported" in alone.err


@pytest.mark.parametrize(
    ("name", "outcome", "told", "code"),
    [
        # the exit code of a user's kernel that crashes reports a failed kernel, not a missing
        # capability
        (
            "my_module:kernel",
            ncu.explain("", -11),
            "my_module:kernel cannot be profiled.",
            ExitCode.GATE_FAILED,
        ),
        ("published=x", ncu.explain("", -11), "A process of the profile failed (SIGSEGV).", 3),
        ("unfused", ncu.explain("", -11), "A process of the profile failed (SIGSEGV).", 3),
        (
            "unfused",
            SsdprofError("N must be a power of two.", "No.", ExitCode.BAD_INPUT),
            "N must be a power",
            2,
        ),
        (
            "my_module:kernel",
            pretended("my_module:kernel"),
            "my_module:kernel launches no Triton kernel",
            2,
        ),
    ],
)
def test_an_implementation_that_cannot_be_profiled_is_named(
    captured: Path, launches: Callable[[Any], None], tmp_path, name, outcome, told, code
):
    launches(outcome)
    answer = ending(code, f"stalls {captured} --out {tmp_path}/o --impl {name}")
    words = answer.err
    assert told in words
    assert ("'ssdprof run' shows" in words) == (name == "my_module:kernel")
    assert not (tmp_path / "o").exists()


def test_what_was_found_before_is_not_replaced_unasked_and_a_layer_that_is_not_there_is_named(
    captured: Path, gpu: Jobs, tmp_path
):
    command = f"stalls {captured} --out {tmp_path}/o --impl fused"
    (tmp_path / "o").mkdir()  # an empty folder of the user stays
    assert "(2, 64), (5, 64), (7, 64)" in ending(ExitCode.BAD_INPUT, f"{command} --layer 4").err
    assert not gpu
    assert (tmp_path / "o").exists()
    passing(command)
    assert "--force" in ending(ExitCode.BAD_INPUT, command).err
    assert len(gpu) == 1
    passing(f"{command} --force")


def test_where_ncu_cannot_work_triton_is_asked(captured: Path, gpu: Jobs, tmp_path, monkeypatch):
    def none():
        raise MissingCapabilityError("ncu is not on this machine.", "Install it.")

    monkeypatch.setattr(ncu, "find", none)
    answer = ending(ExitCode.MISSING_CAPABILITY, f"stalls {captured} --out {tmp_path}/o")
    assert len(gpu) == 2
    for words in ("No stalls: ncu is not on this machine. Install it.", "_fused", "96", "31%"):
        assert words in answer.out


# --- stalls of a run


def keep(folder: Path, report: Report):
    folder.mkdir(parents=True)
    (folder / HEADER).write_text(dump(report))


def test_a_record_can_be_read_again_and_one_that_cannot_is_refused(tmp_path):
    report = analyse([synthetic.report(synthetic.kernel())])
    file = tmp_path / "stalls.json"
    file.write_text(documents.dump_stalls(report))
    assert documents.load_stalls(file) == report
    for text, words in (
        ("[]", "no JSON object"),
        ("{}", "not a document of ssdprof"),
        ('{"stalls_version": 4}', "damaged: ssdprof_version is missing"),
        ('{"stalls_version": 99}', "version 99; this ssdprof reads version 4"),
    ):
        file.write_text(text)
        with pytest.raises(BadInputError, match=words):
            documents.load_stalls(file)


def test_a_run_profiles_its_middle_layer(captured: Path, gpu: Jobs, tmp_path):
    layers = tuple(map(layer, LAYERS))
    run = run_report(command=("ssdprof", "run", str(captured)))
    keep(tmp_path / "run", run.changed(processes=(run.first.changed(captured=layers),)))
    asked = StallsOptions(where=str(tmp_path / "run"))
    _, report = stalls_job.profile(asked, Watcher())
    assert gpu == [("unfused", 5), ("fused", 5)]
    assert report.layer == layers[1]
    assert (tmp_path / "run" / "stalls" / "stalls.json").is_file()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"cast": ("bf16", "fp16")}, "cast from bf16 to fp16"),
        ({"tensor_parallel": 2}, "first of 2 tensor-parallel ranks"),
    ],
)
def test_a_run_of_other_inputs_than_the_models_has_no_stalls_of_its_own(
    tmp_path, monkeypatch, changed, words
):
    monkeypatch.chdir(tmp_path)
    keep(tmp_path / "runs" / "a", run_report(**changed))
    assert words in ending(ExitCode.BAD_INPUT, "stalls a").err


def test_a_layer_of_a_run_is_captured_again(tmp_path):
    """The middle one at the longest prompt, unless others are asked for."""
    run = run_report(layers=(0, 9, 18), seqlens=(1024, 2048))
    run = run.changed(processes=(run.first.changed(captured=run.captured[:3]),))
    file = tmp_path / "prompt.txt"
    file.write_text("Before the run.")
    os.utime(file, (0, 0))
    command = RunOptions(model="demo", prompt_file=file, chunk=256, decode=2)

    def again(**asked) -> ModelOptions:
        request = stalls_job._of_run(run, StallsOptions(**asked))
        return stalls_job._captured_again(command, run, request)

    assert [
        (one.layers, one.seqlens, one.prompt_file, one.chunk, one.decode)
        for one in (again(), again(layer=0, seqlen=1024))
    ] == [("9", (2048,), file, None, 0), ("0", (1024,), file, None, 0)]
    for asked in ({"layer": 3}, {"seqlen": 3}):
        with pytest.raises(BadInputError, match="no such layer or prompt") as caught:
            again(**asked)
        assert caught.value.hint == "Its prompts have 1024, 2048 tokens, its layers are 0, 9, 18."
    file.write_text("After it.")
    with pytest.raises(BadInputError, match="has changed since the run"):
        again()
