"""The whole pipeline on a GPU, with the installed ncu."""

from pathlib import Path

import pytest
import torch
from captured import store_layers
from command_line import passing
from documented_kernels import write_example
from kernels.kernel_cases import SSDCase

import ssdprof
from ssdprof.core.stalls import StallReport
from ssdprof.environment.toolchain import find_ncu
from ssdprof.jobs.options import StallsOptions
from ssdprof.jobs.stalls import profile
from ssdprof.progress import Watcher

OURS = {file.name for file in Path(ssdprof.__file__).parent.joinpath("kernels").rglob("*.py")}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ncu,
    pytest.mark.skipif(find_ncu() is None, reason="needs Nsight Compute"),
]


@pytest.mark.parametrize("gate", [False, True], ids=["hopper if there is one", "portable"])
def test_both_designs_are_profiled_and_every_check_holds(tmp_path, gate):
    case = SSDCase(
        seqlen=16384,
        heads=16,
        headdim=64,
        dstate=128,
        chunk_size=256,
        dtype=torch.bfloat16,
        gate=gate,
    )
    captures = store_layers(tmp_path / "captures", case)
    request = StallsOptions(where=str(captures), layer=5, out=tmp_path / "run")
    folder, report = profile(request, Watcher())
    assert report.missing == ""
    for checks in (report.checks, *(kernel.checks for kernel in report.kernels)):
        assert "failed" not in {status for status, _ in checks.values()}, checks
    assert [kernel.implementation for kernel in report.kernels] == ["unfused"] * 5 + ["fused"]
    assert {
        "chunk_cumsum",
        "bmm_chunk",
        "chunk_state",
        "state_passing.wait",
        "chunk_scan.previous",
        "chunk_scan.current",
        "chunk_scan.residual",
    } <= set(report.kernels[-1].stages)
    # lines are those of callers; the remaining ones come from the compiler, at the kernel's start
    for kernel in report.kernels:
        assert kernel.from_neighbours < 0.1 * kernel.busy_samples, kernel.kernel
        assert {line.file for line in kernel.lines} <= OURS, kernel.kernel
    assert {"unfused.ncu-rep", "fused.ncu-rep", "stalls.json", "stalls.md"} <= {
        file.name for file in folder.iterdir()
    }


def test_stages_of_another_librarys_kernels(tmp_path):
    """The stages of a known version are named; for another version the report says that its files
    are unknown.
    """
    pytest.importorskip("mamba_ssm")
    case = SSDCase(
        seqlen=4096, heads=16, headdim=64, dstate=128, chunk_size=256, dtype=torch.bfloat16
    )
    captures = store_layers(tmp_path / "captures", case)
    request = StallsOptions(
        where=str(captures),
        layer=5,
        implementations=("mamba_ssm",),
        timeout_s=600,
        out=tmp_path / "run",
    )
    _, report = profile(request, Watcher())
    assert report.missing == ""
    assert {kernel.implementation for kernel in report.kernels} == {"mamba_ssm"}
    assert len(report.kernels) == 5
    stages = {stage.partition(".")[0] for kernel in report.kernels for stage in kernel.stages}
    algorithm = {"chunk_cumsum", "chunk_state", "state_passing", "bmm_chunk", "chunk_scan"}
    for kernel in report.kernels:
        known = {stage.partition(".")[0] for stage in kernel.stages} <= algorithm | {"setup"}
        assert known is not bool(kernel.unlabelled), kernel.kernel
    if not any(kernel.unlabelled for kernel in report.kernels):
        assert algorithm <= stages


@pytest.mark.parametrize(("model", "function"), [("demo", "my_ssd"), ("demo-gdn", "my_gdn")])
def test_the_example_of_the_documents_is_profiled(users_folder: Path, model, function):
    """By line, because the example names no stages."""
    write_example(users_folder)
    name = f"my_kernels:{function}"
    answer = passing(f"stalls {model} --seq 512 --impl fused,{name} --out run --json")
    report = StallReport.model_validate_json(answer.out)
    assert report.missing == ""
    (own,) = (kernel for kernel in report.kernels if kernel.implementation == name)
    assert own.kernel == function.replace("my_", "") + "_scan"
    assert own.busy_samples
    assert {line.file for line in own.lines} == {"my_kernels.py"}
    assert "failed" not in {status for status, _ in own.checks.values()}
