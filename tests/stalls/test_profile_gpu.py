"""The whole way on a GPU, with the ncu that is there."""

from pathlib import Path

import pytest
import torch
from kernels.ssd_cases import Case
from stalls.captures import store_layers

from ssdprof.environment.checks import find_ncu
from ssdprof.replay import Unwatched
from ssdprof.schema import Precision
from ssdprof.stall_pipeline import StallRequest, profile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ncu,
    pytest.mark.skipif(find_ncu() is None, reason="needs Nsight Compute"),
]


@pytest.mark.parametrize("gate", [False, True], ids=["hopper if there is one", "portable"])
def test_both_designs_are_profiled_and_every_check_holds(tmp_path: Path, gate: bool) -> None:
    case = Case(seqlen=4096, heads=8, headdim=64, dstate=128, chunk_size=256, dtype=torch.bfloat16, gate=gate)
    captures = store_layers(tmp_path / "captures", case)
    request = StallRequest(
        where=str(captures),
        layer=5,
        precision=Precision(intermediates="exact", state_dtype="fp32"),
        out=tmp_path / "run",
    )
    folder, report = profile(request, Unwatched())
    assert report.missing == ""
    checks = [*report.checks, *(check for kernel in report.kernels for check in kernel.checks)]
    assert [check for check in checks if check.status == "failed"] == []
    assert [kernel.implementation for kernel in report.kernels] == ["unfused"] * 5 + ["fused"]
    stages = {stage.name for stage in report.kernels[-1].stages}
    assert {"chunk_cumsum", "bmm_chunk", "chunk_scan.current", "state_passing.wait"} <= stages
    assert {"unfused.ncu-rep", "fused.ncu-rep", "stalls.json", "stalls.md"} <= {file.name for file in folder.iterdir()}
