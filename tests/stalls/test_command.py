"""`ssdprof stalls` as a user calls it, on a machine without a GPU."""

import json
from pathlib import Path

import pytest
import torch
from kernels.ssd_cases import Case
from stalls import synthetic
from stalls.captures import store_layers
from typer.testing import CliRunner, Result

from ssdprof.cli import app
from ssdprof.errors import ExitCode, MissingCapabilityError
from ssdprof.pipeline import limits
from ssdprof.pipeline import stalls as stalls_job
from ssdprof.schema.stalls import StallReport
from ssdprof.stalls import ncu
from ssdprof.stalls.analyse import analyse

CSV = '"ID","Kernel Name","gpu__time_duration.sum"\n"","","ns"\n"0","_k","2000"\n'


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["stalls", *words])


@pytest.fixture
def page(tmp_path: Path) -> Path:
    file = tmp_path / "page.csv"
    file.write_text(CSV)
    return file


def test_a_report_from_elsewhere_is_shown(page: Path) -> None:
    result = call("--from", str(page))
    assert result.exit_code == 0
    assert "_k: 2.00 µs in one kernel." in result.stdout


def test_json_is_the_whole_record_and_nothing_else(page: Path) -> None:
    result = call("--from", str(page), "--json")
    report = StallReport.model_validate(json.loads(result.stdout))
    assert report.kernels[0].throughput.duration_us == 2.0
    assert str(page.parent) not in result.stdout
    assert call("--from", str(page), "--json").stdout == result.stdout


def test_markdown_is_written_with_its_pictures_beside_it(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls_job, "from_files", lambda _: analyse([synthetic.report(synthetic.kernel())]))
    file = tmp_path / "out" / "stalls.md"
    file.parent.mkdir()
    assert call("--from", str(page), "--markdown", str(file)).exit_code == 0
    text = file.read_text()
    for picture in file.parent.glob("*.svg"):
        assert picture.name in text
    assert list(file.parent.glob("*.svg"))
    again = call("--from", str(page), "--markdown", str(file))
    assert again.exit_code == ExitCode.BAD_INPUT
    assert "--force" in again.stderr
    assert call("--from", str(page), "--markdown", str(file), "--force").exit_code == 0


@pytest.mark.parametrize("words", [["demo"], ["--layer", "3"], ["--seq", "1k"], ["--out", "x"]])
def test_a_report_from_elsewhere_goes_with_no_model(page: Path, words: list[str]) -> None:
    result = call("--from", str(page), *words)
    assert result.exit_code == ExitCode.BAD_INPUT


def test_without_a_gpu_it_says_so() -> None:
    result = call("demo")
    assert result.exit_code == ExitCode.MISSING_CAPABILITY
    assert "need an NVIDIA GPU" in result.stderr
    assert "--from FILE" in result.stderr


@pytest.mark.parametrize("name", ["fusde", "reference", "fused,nowhere=here"])
def test_an_unknown_implementation_is_named(name: str) -> None:
    result = call("demo", "--impl", name)
    assert result.exit_code == ExitCode.BAD_INPUT
    assert "Choose from: unfused, fused" in result.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "not an ncu report"), (b"junk" * 99, "not an ncu report"), (b"NVR\0\2\0\0\0\x08\x07", "zero ranges")],
)
def test_a_file_that_is_no_report_has_its_sentence(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "a.ncu-rep"
    file.write_bytes(content)
    result = call("--from", str(file))
    assert result.exit_code == ExitCode.BAD_INPUT
    assert words in result.stderr


def test_a_missing_file_has_its_sentence(tmp_path: Path) -> None:
    result = call("--from", str(tmp_path / "gone.ncu-rep"))
    assert result.exit_code == ExitCode.BAD_INPUT
    assert "cannot be read" in result.stderr


# --- the whole pipeline, with stand-ins for the GPU and for ncu


@pytest.fixture
def captured(tmp_path: Path) -> Path:
    return store_layers(tmp_path / "captures", Case(seqlen=64, dtype=torch.bfloat16))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """A machine with a GPU that launches nothing; returns the jobs that it received."""
    from ssdprof.schema import Launch
    from ssdprof.schema.stalls import Launched
    from ssdprof.stalls import collect

    jobs: list[tuple[str, int]] = []

    def launch(job: collect.Job, **_: object) -> Launched:
        jobs.append((job.implementation, job.layer))
        kernel = Launch(kernel=f"_{job.implementation}", config={}, registers=96, spills=0, shared_bytes=1024)
        return Launched(
            implementation=job.implementation, variant="v", launch_count=1, launches=(kernel,), occupancy_pct=(31.0,)
        )

    def profile(job: collect.Job, launched: Launched, _program: ncu.Program, file: Path, **_: object) -> float:
        assert launched.implementation == job.implementation
        file.write_text(job.implementation)
        return 1.0

    def open_report(path: Path) -> object:
        return synthetic.report(synthetic.kernel(function=f"_{path.read_text()}"), name=path.name)

    monkeypatch.setattr(limits, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(collect, "launch", launch)
    monkeypatch.setattr(collect, "profile", profile)
    monkeypatch.setattr(stalls_job.ncu, "find", lambda: ncu.Program(Path("ncu"), "2025.3.1.0"))
    monkeypatch.setattr(stalls_job, "open_report", open_report)
    return jobs


def test_stored_captures_are_profiled_and_everything_is_kept(
    captured: Path, gpu: list[tuple[str, int]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = call(str(captured), "--out", str(out), "--json")
    assert result.exit_code == 0, result.output
    assert gpu == [("unfused", 5), ("fused", 5)]  # the middle layer
    report = StallReport.model_validate_json(result.stdout)
    assert [kernel.implementation for kernel in report.kernels] == ["unfused", "fused"]
    assert report.subject is not None
    assert report.subject.dims.dtype == "bf16"
    assert {"unfused.ncu-rep", "fused.ncu-rep", "stalls.json", "stalls.md"} <= {
        file.name for file in (out / "stalls").iterdir()
    }
    assert (out / "stalls" / "stalls.json").read_text() == result.stdout
    assert report.recorded is not None
    assert report.recorded.ncu == "2025.3.1.0"
    assert report.recorded.command[0] == "ssdprof"
    text = (out / "stalls" / "stalls.md").read_text()
    assert "ncu 2025.3.1.0" in text
    assert "layers.5 (layer 5)" in text
    assert "ssdprof stalls, x, layers.5, 64 tokens, " in text
    assert report.recorded.created in text


def test_one_layer_and_implementation_can_be_chosen(captured: Path, gpu: list[tuple[str, int]], tmp_path: Path) -> None:
    assert call(str(captured), "--out", str(tmp_path / "o"), "--layer", "7", "--impl", "fused").exit_code == 0
    assert gpu == [("fused", 7)]


def test_libraries_and_own_kernels_are_profiled_by_name(
    captured: Path, gpu: list[tuple[str, int]], tmp_path: Path
) -> None:
    words = "fused,mamba_ssm,published=checkout,my_module:kernel"
    result = call(str(captured), "--out", str(tmp_path / "o"), "--impl", words, "--json")
    assert result.exit_code == 0, result.output
    assert [name for name, _ in gpu] == words.split(",")
    report = StallReport.model_validate_json(result.stdout)
    assert [kernel.implementation for kernel in report.kernels] == words.split(",")
    files = {file.name for file in (tmp_path / "o" / "stalls").glob("*.ncu-rep")}
    assert files == {"fused.ncu-rep", "mamba_ssm.ncu-rep", "published-checkout.ncu-rep", "my_module-kernel.ncu-rep"}


def test_a_library_that_cannot_be_profiled_is_left_out_and_named(
    captured: Path, gpu: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ssdprof.errors import SsdprofError
    from ssdprof.stalls import collect

    pretended = collect.launch

    def launch(job: collect.Job, **options: float) -> object:
        if job.implementation == "mamba_ssm":
            raise SsdprofError("mamba_ssm cannot be imported: no.", "pip install it.", ExitCode.MISSING_CAPABILITY)
        return pretended(job, **options)

    monkeypatch.setattr(collect, "launch", launch)
    result = call(str(captured), "--out", str(tmp_path / "o"), "--impl", "mamba_ssm,fused")
    assert result.exit_code == 0, result.output
    assert "mamba_ssm is left out: mamba_ssm cannot be imported: no." in " ".join(result.stdout.split())
    assert gpu == [("fused", 5)]
    alone = call(str(captured), "--out", str(tmp_path / "p"), "--impl", "mamba_ssm")
    assert alone.exit_code == ExitCode.MISSING_CAPABILITY
    assert "cannot be imported" in alone.stderr


@pytest.mark.usefixtures("gpu")
def test_an_implementation_without_triton_kernels_is_bad_input(
    captured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ssdprof.schema.stalls import Launched
    from ssdprof.stalls import collect

    nothing = Launched(implementation="my_module:kernel", variant="own", launch_count=0, launches=())
    monkeypatch.setattr(collect, "launch", lambda *_, **__: nothing)
    result = call(str(captured), "--out", str(tmp_path / "o"), "--impl", "my_module:kernel")
    assert result.exit_code == ExitCode.BAD_INPUT
    assert "my_module:kernel launches no Triton kernel" in result.stderr


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("word", ["my_module:kernel", "published=x", "fused"])
def test_an_own_kernel_that_ends_its_process_is_named(
    captured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """The exit code reports a failed kernel, not a missing capability.  Other implementations keep their exit code."""
    from ssdprof.stalls import collect

    def crash(*_args: object, **_kwargs: object) -> None:
        raise ncu.explain("", -11)

    monkeypatch.setattr(collect, "launch", crash)
    result = call(str(captured), "--out", str(tmp_path / "o"), "--impl", word)
    told = " ".join(result.stderr.split())
    assert "A process of the profile failed (SIGSEGV)." in told
    own = word == "my_module:kernel"
    assert result.exit_code == (ExitCode.GATE_FAILED if own else ExitCode.MISSING_CAPABILITY)
    assert ("my_module:kernel cannot be profiled." in told and "'ssdprof run' shows" in told) == own


def test_what_was_found_before_is_not_replaced_unasked(
    captured: Path, gpu: list[tuple[str, int]], tmp_path: Path
) -> None:
    words = (str(captured), "--out", str(tmp_path / "o"), "--impl", "fused")
    assert call(*words).exit_code == 0
    again = call(*words)
    assert again.exit_code == ExitCode.BAD_INPUT
    assert "--force" in again.stderr
    assert len(gpu) == 1
    assert call(*words, "--force").exit_code == 0


@pytest.mark.usefixtures("gpu")
def test_an_implementation_that_refuses_the_layer_is_bad_input(
    captured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ssdprof.errors import SsdprofError
    from ssdprof.stalls import collect

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise SsdprofError("fused: dstate must be a power of two.", "Name another --impl.", ExitCode.BAD_INPUT)

    monkeypatch.setattr(collect, "launch", refuse)
    result = call(str(captured), "--out", str(tmp_path / "o"))
    assert result.exit_code == ExitCode.BAD_INPUT
    assert "dstate must be a power of two" in result.stderr
    assert not (tmp_path / "o").exists()


def test_a_layer_that_is_not_there_is_named(captured: Path, gpu: list[tuple[str, int]], tmp_path: Path) -> None:
    result = call(str(captured), "--out", str(tmp_path / "o"), "--layer", "4")
    assert result.exit_code == ExitCode.BAD_INPUT
    assert "(2, 64), (5, 64), (7, 64)" in result.stderr
    assert not gpu
    assert not (tmp_path / "o").exists()


def test_where_ncu_cannot_work_triton_is_asked(
    captured: Path, gpu: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> Path:
        raise MissingCapabilityError("ncu is not on this machine.", "Install it.")

    monkeypatch.setattr(stalls_job.ncu, "find", none)
    result = call(str(captured), "--out", str(tmp_path / "o"))
    assert result.exit_code == ExitCode.MISSING_CAPABILITY
    assert len(gpu) == 2
    assert "No stalls: ncu is not on this machine. Install it." in result.stdout
    assert "_fused" in result.stdout
    assert "96" in result.stdout
    assert "31%" in result.stdout


def test_stalls_of_a_run_are_part_of_its_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from report.make import make_report as run_report

    from ssdprof import runs
    from ssdprof.pipeline import stall_files

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "a"
    with runs.opened(folder, "m") as opened:
        opened.write(run_report())
    without = CliRunner().invoke(app, ["export", str(folder)]).stdout
    assert "stall" not in without
    (folder / stall_files.FOLDER).mkdir()
    stall_files.write(folder / stall_files.FOLDER, analyse([synthetic.report(synthetic.kernel())]))
    printed = CliRunner().invoke(app, ["export", str(folder)]).stdout
    assert printed.startswith(without.rstrip("\n"))
    assert "stages and stall reasons" in printed
    assert ".svg" not in printed
    result = CliRunner().invoke(app, ["export", str(folder), "-o", "report.md"])
    assert result.exit_code == 0, result.output
    assert "](report-kernel.svg)" in Path("report.md").read_text()
    assert Path("report-kernel.svg").is_file()


@pytest.mark.parametrize(
    ("text", "words"), [("{", "damaged"), ("[]", "damaged"), ('{"stalls_version": 99}', "version 99"), ("{}", "None")]
)
def test_a_record_that_cannot_be_read_is_refused(tmp_path: Path, text: str, words: str) -> None:
    from ssdprof.errors import BadInputError
    from ssdprof.pipeline import stall_files

    (tmp_path / "stalls.json").write_text(text)
    with pytest.raises(BadInputError, match=words):
        stall_files.load(tmp_path / "stalls.json")


def test_a_record_can_be_read_again(tmp_path: Path) -> None:
    from ssdprof.pipeline import stall_files

    report = analyse([synthetic.report(synthetic.kernel())])
    (tmp_path / "stalls.json").write_text(stall_files.dump(report))
    assert stall_files.load(tmp_path / "stalls.json") == report


def test_a_run_profiles_its_middle_layer(captured: Path, gpu: list[tuple[str, int]], tmp_path: Path) -> None:
    from report.make import make_report as run_report

    from ssdprof.pipeline.request import CaptureRequest, ModelRequest
    from ssdprof.progress import Unwatched
    from ssdprof.schema import LayerRef

    layers = tuple(LayerRef(index=i, name=f"layers.{i}", operator="ssd") for i in (2, 5, 7))
    run = run_report().model_copy(update={"captured_layers": layers})
    asked = CaptureRequest(model=ModelRequest(model=str(captured)))
    (tmp_path / "run").mkdir()
    report = stalls_job.profile_run(asked, tmp_path / "run", run, Unwatched())
    assert gpu == [("unfused", 5), ("fused", 5)]
    assert report.subject is not None
    assert (tmp_path / "run" / "stalls" / "stalls.json").is_file()


@pytest.mark.usefixtures("gpu")
def test_a_run_whose_inputs_were_cast_has_no_stalls_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from report.make import make_report as run_report

    from ssdprof import runs
    from ssdprof.schema import Asked, Cast

    monkeypatch.chdir(tmp_path)
    asked = Asked(implementations=(), precisions=(), layers=(), cast=Cast(source="bf16", to="fp16"))
    with runs.opened(tmp_path / "runs" / "a", "m") as opened:
        opened.write(run_report().model_copy(update={"asked": asked}))
    result = call("a")
    assert result.exit_code == ExitCode.BAD_INPUT
    assert "cast from bf16 to fp16" in " ".join(result.stderr.split())


@pytest.mark.usefixtures("gpu")
def test_a_run_of_a_share_of_the_heads_has_no_stalls_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from report.make import make_report as run_report

    from ssdprof import runs
    from ssdprof.schema import Asked

    monkeypatch.chdir(tmp_path)
    asked = Asked(implementations=(), precisions=(), layers=(), tensor_parallel=2)
    with runs.opened(tmp_path / "runs" / "a", "m") as opened:
        opened.write(run_report().model_copy(update={"asked": asked}))
    result = call("a")
    assert result.exit_code == ExitCode.BAD_INPUT
    assert "first of 2 tensor-parallel ranks" in " ".join(result.stderr.split())


def test_a_run_on_a_machine_without_a_gpu_keeps_its_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(
        app, ["run", "demo", "--seq", "64", "--layers", "first:1", "--dtypes", "exact", "--states", "fp32", "--stalls"]
    )
    assert result.exit_code == 0, result.output
    assert "No stalls: Warp stalls need an NVIDIA GPU" in result.stderr
