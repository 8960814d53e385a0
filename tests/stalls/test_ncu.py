"""How ncu is called, the process that it profiles, and the meaning of its errors; without ncu and
without a GPU.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from captured import layer, store, store_layers
from kernels.kernel_cases import SSDCase

from ssdprof import kernels, operators
from ssdprof.core.base import EXACT_FP32
from ssdprof.core.stalls import Launched
from ssdprof.core.target import Serving
from ssdprof.errors import BadInputError, ExitCode, MissingCapabilityError, SsdprofError
from ssdprof.kernels import UnsupportedError
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation
from ssdprof.operators.implementations import required
from ssdprof.stalls import ncu, profiled


def job(folder: Path) -> ncu.Job:
    return ncu.Job(
        folder=folder,
        cache=folder / "cache",
        layer=0,
        seqlen=1,
        implementation="fused",
        precision=EXACT_FP32,
    )


def test_the_command_line_is_exactly_this():
    words = r"""
        /n/ncu --config-file off -f -o out/r.ncu-rep --target-processes application-only
        --nvtx --nvtx-include ssdprof/ -k regex:^(_a_kernel|_b\.kernel)$ -c 3
        --section LaunchStats --section Occupancy --section SpeedOfLight
        --section SpeedOfLight_RooflineChart
        --section SpeedOfLight_HierarchicalTensorRooflineChart
        --section MemoryWorkloadAnalysis --section MemoryWorkloadAnalysis_Tables
        --section SchedulerStats --section WarpStateStats --section SourceCounters
        --import-source yes --clock-control none --cache-control all --replay-mode kernel
        --check-exit-code yes py t
    """
    kernels = ["_a_kernel", "_b.kernel", "_a_kernel"]
    command = ncu.command("/n/ncu", Path("out/r.ncu-rep"), kernels, 3, ["py", "t"])
    assert list(command) == words.split()


def test_no_secret_reaches_the_child():
    secrets = {
        "HF_TOKEN": "hf_a",
        "HUGGING_FACE_HUB_TOKEN": "hf_b",
        "AWS_SECRET_ACCESS_KEY": "c",
        "GITHUB_PAT": "d",
        "NVIDIA_API_KEY": "e",
        "CONDA_TOKEN": "f",
        "PYTHON_KEYRING_PASSWORD": "g",
        "OPENAI": "h",
    }
    harmless = {
        "PATH": "/bin",
        "LD_LIBRARY_PATH": "/l",
        "CUDA_VISIBLE_DEVICES": "1",
        "PYTHONPATH": ".",
        "HOME": "/h",
    }
    passed = ncu.clean_environment(secrets | harmless | {"TRITON_DISABLE_LINE_INFO": "1"})
    assert not secrets.keys() & passed.keys()
    assert harmless.items() <= passed.items()
    assert (passed["TRITON_DISABLE_LINE_INFO"], passed["CUDA_INJECTION64_PATH"]) == ("0", "none")


@pytest.mark.parametrize(
    ("output", "message", "hint"),
    [
        (
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission",
            "hardware counters",
            "SYS_ADMIN",
        ),
        (
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission",
            "hardware counters",
            "NVreg_Restrict",
        ),
        (
            "==ERROR== Failed to initialize the profiler: LibraryNotLoaded",
            "sandboxed",
            "kernel driver",
        ),
        ("==ERROR== Cuda driver is not compatible with Nsight Compute.", "do not fit", "driver"),
        (
            "==ERROR== Profiling failed because a driver resource was unavailable.",
            "Another profiler",
            "DCGM",
        ),
        ("==ERROR== Failed to connect to process 17", "attach", "LD_PRELOAD"),
        ("==WARNING== No kernels were profiled.", "profiled no kernel", "Triton"),
        ("==PROF== Connected\n==ERROR== The moon is full.\n", "The moon is full.", "doctor"),
        (
            "Error: there is no layer 3\n==ERROR== The application returned an error code (1).",
            "returned an error",
            "",
        ),
    ],
)
def test_every_error_of_ncu_has_its_sentence(output, message, hint):
    error = ncu.explain(output, 1)
    assert message in error.message
    assert hint in error.hint
    assert error.exit_code == ExitCode.MISSING_CAPABILITY
    assert "\n" not in error.message


def test_find_asks_the_program_for_its_version(tmp_path, monkeypatch):
    program = tmp_path / "ncu"
    monkeypatch.setattr(ncu, "find_ncu", lambda: str(program) if program.is_file() else None)
    with pytest.raises(MissingCapabilityError, match="ncu is not installed") as raised:
        ncu.find()
    assert "--from" in raised.value.hint
    for script, words in (
        (
            "echo 'Version 2022.4.1 (build 1)'",
            r"is ncu 2022\.4\.1, which is too old: it must be 2023\.1 or newer",
        ),
        ("echo hello", "does not report its version"),
        ("exit 1", r"does not run: .*[^.]\.$"),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        with pytest.raises(MissingCapabilityError, match=words):
            ncu.find()
    program.write_text(
        "#!/bin/sh\necho 'Copyright (c)\nVersion 2025.3.1.0 (build 36398880) (public-release)'\n"
    )
    assert ncu.find() == (str(program), "2025.3.1.0")


def run(script: str, timeout_s: float = 30) -> str:
    return ncu.run(["sh", "-c", script], timeout_s=timeout_s, environ=os.environ)


def test_a_run_that_takes_too_long_is_stopped_with_its_children(tmp_path):
    """A child would keep the pipe open that it writes to."""
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(MissingCapabilityError, match="longer than 1 s") as raised:
        run(f"sleep 600 > {pipe} & wait", timeout_s=1)
    assert "--timeout" in raised.value.hint
    os.set_blocking(reader, True)
    with open(reader, "rb") as ended:
        assert ended.read() == b""


def test_a_run_that_fails_is_explained_and_one_that_works_returns_its_output():
    with pytest.raises(MissingCapabilityError, match="exit code 3"):
        run("echo oh; exit 3")
    with pytest.raises(MissingCapabilityError, match="hardware counters"):
        run("echo '==ERROR== ERR_NVGPUCTRPERM'")
    assert run("echo fine") == "fine\n"


def test_kernels_are_compiled_into_a_folder_of_their_own(tmp_path, monkeypatch):
    """A kernel that was compiled elsewhere may lack line information."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "/home/someone/.triton")
    monkeypatch.setattr(
        ncu, "target", lambda *_: ["sh", "-c", f"echo $TRITON_CACHE_DIR > {tmp_path}/said; exit 1"]
    )
    with pytest.raises(MissingCapabilityError):
        ncu.launch(job(tmp_path))
    assert (tmp_path / "said").read_text().strip() == str(tmp_path / "cache")


@pytest.mark.parametrize(
    ("written", "code", "error", "told"),
    [
        (
            {"message": "fused: no.", "hint": "Try another.", "exit_code": 2},
            1,
            ExitCode.BAD_INPUT,
            "fused: no.",
        ),
        (
            {"message": "No room.", "hint": "Try less.", "exit_code": 3},
            1,
            ExitCode.MISSING_CAPABILITY,
            "No room.",
        ),
        # a kernel may end its process before or after its launches are known
        (None, 0, ExitCode.MISSING_CAPABILITY, "fused ended its process with exit code 0"),
        ({}, 3, ExitCode.MISSING_CAPABILITY, "exit code 3"),
        (None, 1, ExitCode.MISSING_CAPABILITY, "ImportError: no torch"),
    ],
)
def test_a_target_that_writes_no_launches_is_explained(
    tmp_path, monkeypatch, written, code, error: ExitCode, told
):
    """By what it wrote, else by its last words."""

    def fake(_job: ncu.Job, file: Path) -> list[str]:
        if written is not None:
            file.write_text(json.dumps(written))
        return ["sh", "-c", f"{'echo ImportError: no torch; ' * (code == 1)}exit {code}"]

    monkeypatch.setattr(ncu, "target", fake)
    with pytest.raises(SsdprofError, match=told) as raised:
        ncu.launch(job(tmp_path))
    assert raised.value.exit_code == error
    if written:
        assert raised.value.hint.startswith("Try ")


@pytest.mark.usefixtures("users_folder")
def test_a_file_of_the_user_hides_no_module_of_the_target(tmp_path):
    (tmp_path / "statistics.py").write_text("raise SystemExit('a script of the user')")
    with pytest.raises(SsdprofError, match="manifest"):
        ncu.launch(job(tmp_path))


# --- the process that ncu profiles


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The calls, in order."""
    seen = []
    monkeypatch.setattr(profiled, "resolve", lambda *_: counting(seen))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: seen.append(f"push {name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("pop"))
    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", None)
    monkeypatch.setattr(profiled, "DEVICE", "cpu")
    return seen


def counting(seen: list[str]) -> Implementation:
    """The fused implementation, which says when it runs."""
    real = kernels.get("ssd", "fused")

    def run(inputs, precision) -> object:
        seen.append("run")
        return real.run(inputs, precision)

    return replace(real, run=run)


@pytest.fixture
def folder(tmp_path) -> Path:
    return store_layers(tmp_path / "captures", SSDCase(seqlen=32, dtype=torch.bfloat16))


def words_for(folder: Path, layer: int, out: Path) -> list[str]:
    wanted = job(folder).model_copy(update={"layer": layer, "seqlen": 32})
    return ["target", wanted.model_dump_json(), str(out)]


def test_one_call_is_profiled_and_those_before_it_are_not(
    folder: Path, calls: list[str], tmp_path, monkeypatch
):
    monkeypatch.setattr("sys.argv", words_for(folder, 5, tmp_path / "launched.json"))
    profiled.main()
    assert calls == ["run", "run", "wait", "push ssdprof", "run", "wait", "pop"]
    # before the first call, nothing was compiled
    assert triton.knobs.runtime.add_stages_inspection_hook is not None
    found = Launched.model_validate_json((tmp_path / "launched.json").read_text())
    assert (found.implementation, found.variant) == ("fused", "interpreter")
    assert found.launch_count == 0  # Triton's interpreter launches nothing


@pytest.mark.usefixtures("calls")
def test_a_layer_that_is_not_there_ends_the_process(folder: Path, tmp_path, monkeypatch):
    inputs = profiled.load(folder, 7, 32, "cpu")
    assert torch.equal(inputs.values, SSDCase(seqlen=32, dtype=torch.bfloat16).inputs().x)
    with pytest.raises(BadInputError, match="no layer 7 of 64 tokens"):
        profiled.load(folder, 7, 64, "cpu")
    monkeypatch.setattr("sys.argv", words_for(folder, 4, tmp_path / "launched.json"))
    with pytest.raises(SystemExit, match=r"Error: .* holds no layer 4 of 32 tokens"):
        profiled.main()
    refusal = json.loads((tmp_path / "launched.json").read_text())
    assert (refusal["exit_code"], refusal["hint"]) == (ExitCode.BAD_INPUT, "Capture it first.")


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (
            UnsupportedError("fused: dstate must be a power of two"),
            "fused: dstate must be",
            ExitCode.BAD_INPUT,
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried"),
            "do not fit into the GPU's memory",
            3,
        ),
        (MissingCapabilityError("There is no such thing here.", "Get one."), "no such thing", 3),
    ],
)
def test_whose_fault_it_is_decides_the_exit_code(error, message, code):
    refusal = profiled.refusal_of(error)
    assert message in refusal["message"]
    assert refusal["message"].endswith(".")
    assert refusal["hint"]
    assert refusal["exit_code"] == code


def test_a_decode_step_is_not_taken_for_a_prompt_of_one_token(tmp_path):
    prompt, step = (
        SSDCase(seqlen=1, dtype=torch.bfloat16, initial_states=states).inputs()
        for states in (False, True)
    )
    (call,) = Serving(decode=1).calls(64)[1:]
    store(tmp_path, [(layer(5), step, call), (layer(5), prompt, None)])
    assert profiled.load(tmp_path, 5, 1, "cpu").initial is None


def test_an_implementation_that_lacks_the_precision_runs_at_the_one_that_is_most_alike(
    folder: Path,
):
    """A library has a fixed set of precisions.  A missing library gives an error."""
    inputs = profiled.load(folder, 2, 32, "cpu")
    both = tuple(Precision.named(f"exact, {states} states") for states in ("bf16", "fp32"))
    library = replace(
        kernels.get("ssd", "fused"), name="them", kind="library", precisions=lambda _: both
    )
    ssd = operators.get("ssd")
    call = profiled.call_at(ssd, library, inputs, Precision())
    assert call.precision.state_dtype == torch.float32
    fixed = replace(library, precisions=lambda dtype: (Precision.named(f"exact, {dtype} states"),))
    call = profiled.call_at(ssd, fixed, inputs, Precision())
    assert call.precision.state_dtype == torch.bfloat16
    found = profiled.warm_up(fixed, call)
    assert (found.implementation, found.precision) == ("them", "exact, bf16 states")
    with pytest.raises(MissingCapabilityError, match="is not there"):
        required(replace(library, absent="It is not there."))
