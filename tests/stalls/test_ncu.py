"""The command line of ncu, the environment of its child process, and the meaning of its errors."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ssdprof.errors import ExitCode, MissingCapabilityError, SsdprofError
from ssdprof.schema import EXACT_FP32, PrecisionRecord
from ssdprof.schema.stalls import Refusal
from ssdprof.stalls import collect, ncu


def test_the_command_line_is_exactly_this() -> None:
    command = ncu.command(
        ncu.Program(Path("/n/ncu"), "2025.3.1"),
        Path("out/r.ncu-rep"),
        ["_a_kernel", "_b.kernel", "_a_kernel"],
        3,
        ["py", "t"],
    )
    assert command == (
        "/n/ncu", "--config-file", "off", "-f", "-o", "out/r.ncu-rep",
        "--target-processes", "application-only",
        "--nvtx", "--nvtx-include", "ssdprof/",
        "-k", r"regex:^(_a_kernel|_b\.kernel)$", "-c", "3",
        "--section", "LaunchStats", "--section", "Occupancy", "--section", "SpeedOfLight",
        "--section", "SpeedOfLight_RooflineChart", "--section", "SpeedOfLight_HierarchicalTensorRooflineChart",
        "--section", "MemoryWorkloadAnalysis", "--section", "MemoryWorkloadAnalysis_Tables",
        "--section", "SchedulerStats", "--section", "WarpStateStats",
        "--section", "SourceCounters",
        "--import-source", "yes", "--clock-control", "none", "--cache-control", "all",
        "--replay-mode", "kernel", "--check-exit-code", "yes",
        "py", "t",
    )  # fmt: skip


def test_the_target_gets_the_layer_and_nothing_else() -> None:
    job = collect.Job(
        folder=Path("/c"),
        cache=Path("/k"),
        layer=3,
        seqlen=1024,
        implementation="fused",
        precision=PrecisionRecord(intermediates="relaxed", state_dtype="fp16"),
    )
    assert collect.target(job, Path("/t/launched.json")) == (
        sys.executable, "-P", "-m", "ssdprof.stalls.target", "/c", "--layer", "3", "--seqlen", "1024",
        "--implementation", "fused", "--intermediates", "relaxed", "--state-dtype", "fp16",
        "--launched", "/t/launched.json",
    )  # fmt: skip


def test_no_secret_reaches_the_child() -> None:
    secrets = {
        "HF_TOKEN": "hf_a", "HUGGING_FACE_HUB_TOKEN": "hf_b", "AWS_SECRET_ACCESS_KEY": "c", "GITHUB_PAT": "d",
        "NVIDIA_API_KEY": "e", "CONDA_TOKEN": "f", "PYTHON_KEYRING_PASSWORD": "g", "OPENAI": "h",
    }  # fmt: skip
    harmless = {"PATH": "/bin", "LD_LIBRARY_PATH": "/l", "CUDA_VISIBLE_DEVICES": "1", "PYTHONPATH": ".", "HOME": "/h"}
    passed = ncu.clean_environment(secrets | harmless | {"TRITON_DISABLE_LINE_INFO": "1"})
    assert not secrets.keys() & passed.keys()
    assert harmless.items() <= passed.items()
    assert passed["TRITON_DISABLE_LINE_INFO"] == "0"
    assert passed["CUDA_INJECTION64_PATH"] == "none"


@pytest.mark.parametrize(
    ("output", "message", "hint"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "hardware counters", "SYS_ADMIN"),
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "hardware counters", "NVreg_Restrict"),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", "sandboxed", "kernel driver"),
        ("==ERROR== Cuda driver is not compatible with Nsight Compute.", "do not fit", "driver"),
        ("==ERROR== Profiling failed because a driver resource was unavailable.", "Another profiler", "DCGM"),
        ("==ERROR== Failed to connect to process 17", "attach", "LD_PRELOAD"),
        ("==WARNING== No kernels were profiled.", "profiled no kernel", "Triton"),
        ("==PROF== Connected\n==ERROR== The moon is full.\n", "The moon is full.", "doctor"),
        ("Error: there is no layer 3\n==ERROR== The application returned an error code (1).", "returned an error", ""),
    ],
)
def test_every_complaint_has_its_sentence(output: str, message: str, hint: str) -> None:
    error = ncu.explain(output, 1)
    assert message in error.message
    assert hint in error.hint
    assert error.exit_code == ExitCode.MISSING_CAPABILITY
    assert "\n" not in error.message


def test_complaints_do_not_share_a_sentence() -> None:
    assert len({complaint.message for complaint in ncu.COMPLAINTS}) == len(ncu.COMPLAINTS)


def test_a_machine_without_ncu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu, "find_ncu", lambda: None)
    with pytest.raises(MissingCapabilityError, match="ncu is not installed") as raised:
        ncu.find()
    assert "--from" in raised.value.hint


def test_the_version_is_read_and_an_old_one_refused() -> None:
    assert ncu.check_version("Copyright (c)\nVersion 2025.3.1.0 (build 36398880) (public-release)") == "2025.3.1.0"
    with pytest.raises(MissingCapabilityError, match=r"2022\.4\.1 is too old: it must be 2023\.1 or newer"):
        ncu.check_version("Version 2022.4.1 (build 1)")
    with pytest.raises(MissingCapabilityError, match="does not report its version"):
        ncu.check_version("hello")


def test_find_asks_the_program_for_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ncu"
    program.write_text("#!/bin/sh\necho 'Version 2020.1.0 (build 1)'\n")
    program.chmod(0o755)
    monkeypatch.setattr(ncu, "find_ncu", lambda: str(program))
    with pytest.raises(MissingCapabilityError, match="too old"):
        ncu.find()
    program.write_text("#!/bin/sh\necho 'Version 2025.3.1.0 (build 1)'\n")
    assert ncu.find() == ncu.Program(program, "2025.3.1.0")
    program.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(MissingCapabilityError, match=r"does not run: .*[^.]\.$"):
        ncu.find()


def test_a_run_that_takes_too_long_is_stopped_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    start = time.monotonic()
    with pytest.raises(MissingCapabilityError, match="longer than 1 s") as raised:
        ncu.run(["sh", "-c", f"sleep 60 & echo $! > {pid}; wait"], timeout_s=1, environ=os.environ)
    assert time.monotonic() - start < 20
    assert "--timeout" in raised.value.hint
    child = int(pid.read_text())
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(child)], capture_output=True, text=True).stdout.strip()
    assert state == "" or state.startswith("Z")


def test_a_run_that_fails_is_explained_and_one_that_works_returns_its_output() -> None:
    with pytest.raises(MissingCapabilityError, match="exit code 3"):
        ncu.run(["sh", "-c", "echo oh; exit 3"], timeout_s=30, environ=os.environ)
    with pytest.raises(MissingCapabilityError, match="hardware counters"):
        ncu.run(["sh", "-c", "echo '==ERROR== ERR_NVGPUCTRPERM'"], timeout_s=30, environ=os.environ)
    assert ncu.run(["sh", "-c", "echo fine"], timeout_s=30, environ=os.environ) == "fine\n"


def test_a_profile_without_a_report_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ssdprof.schema import Launch
    from ssdprof.schema.stalls import Launched

    launched = Launched(
        implementation="fused", variant="hopper", launch_count=1, launches=(Launch(kernel="_k", config={}),)
    )
    monkeypatch.setattr(ncu, "run", lambda *_args, **_kwargs: "==WARNING== No kernels were profiled.")
    with pytest.raises(MissingCapabilityError, match="profiled no kernel"):
        collect.profile(job(tmp_path), launched, ncu.Program(Path("ncu"), "1"), tmp_path / "r.ncu-rep")


def job(folder: Path) -> collect.Job:
    return collect.Job(
        folder=folder, cache=folder / "cache", layer=0, seqlen=1, implementation="fused", precision=EXACT_FP32
    )


def test_kernels_are_compiled_into_a_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that was compiled elsewhere may lack line information."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "/home/someone/.triton")
    monkeypatch.setattr(collect, "target", lambda *_: ["sh", "-c", f"echo $TRITON_CACHE_DIR > {tmp_path}/said; exit 1"])
    with pytest.raises(MissingCapabilityError):
        collect.launch(job(tmp_path))
    assert (tmp_path / "said").read_text().strip() == str(tmp_path / "cache")


@pytest.mark.parametrize("code", [ExitCode.BAD_INPUT, ExitCode.MISSING_CAPABILITY])
def test_a_refusal_of_the_target_keeps_its_words_and_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: ExitCode
) -> None:
    refusal = Refusal(message="fused: no.", hint="Try another.", exit_code=code).model_dump_json()
    monkeypatch.setattr(collect, "target", lambda _, file: ["sh", "-c", f"echo '{refusal}' > {file}; exit 1"])
    with pytest.raises(SsdprofError) as raised:
        collect.launch(job(tmp_path))
    assert (raised.value.message, raised.value.hint) == ("fused: no.", "Try another.")
    assert raised.value.exit_code == code


@pytest.mark.parametrize(("written", "code", "told"), [("", 0, "fused ended its process"), ("{}", 3, "exit code 3")])
def test_a_target_that_ends_early_or_late_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, code: int, told: str
) -> None:
    """A kernel may end its process before or after its launches are known."""

    def target(_job: collect.Job, file: Path) -> list[str]:
        if written:
            file.write_text(written)
        return ["sh", "-c", f"exit {code}"]

    monkeypatch.setattr(collect, "target", target)
    with pytest.raises(MissingCapabilityError, match=told):
        collect.launch(job(tmp_path))


@pytest.mark.usefixtures("users_folder")
def test_a_file_of_the_user_hides_no_module_of_the_target(tmp_path: Path) -> None:
    (tmp_path / "statistics.py").write_text("raise SystemExit('a script of the user')")
    words = (*collect.target(job(tmp_path), tmp_path / "launched.json")[:4], "--help")
    assert "usage:" in ncu.run(words, timeout_s=120, environ=collect._environment(job(tmp_path)))


def test_a_target_that_says_nothing_is_explained_by_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "target", lambda *_: ["sh", "-c", "echo 'ImportError: no torch'; exit 1"])
    with pytest.raises(MissingCapabilityError, match="ImportError: no torch"):
        collect.launch(job(tmp_path))
