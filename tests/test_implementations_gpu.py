"""A user's kernel on a GPU: timed if it is right; other kernels can use the GPU after its fault or
hang.
"""

import re
from pathlib import Path

import pytest
import torch
from command_line import Answer
from documented_kernels import write_example

from ssdprof.core.case import Case
from ssdprof.core.report import Report
from ssdprof.store import reports

pytestmark = pytest.mark.gpu

FAULTY = """
import torch
import triton
import triton.language as tl
from ssdprof.kernels import get
from ssdprof.kernels.precision import Precision


@triton.jit
def write(p, offset):
    tl.store(p + offset, 1.0)


@triton.jit
def wait(p):
    while tl.load(p, volatile=True) == 0:
        pass


def right(inputs):
    return get("ssd", "unfused").run(inputs, Precision())


def illegal(inputs):
    out, states = right(inputs)
    write[(1,)](states, 1 << 45)
    return out, states


def beyond(inputs):
    out, states = right(inputs)
    write[(1,)](states, states.numel())
    return out, states


def hanging(inputs):
    out, states = right(inputs)
    wait[(1,)](torch.zeros(1, device=out.device))
    return out, states
"""


def call(command: str) -> tuple[int, str]:
    answer = Answer(command)
    return answer.code, answer.shown


@pytest.fixture(autouse=True)
def here(users_folder: Path) -> Path:
    return users_folder


def newest() -> tuple[Report, dict[str, Case]]:
    report = reports.load(None, "run")[1]
    return report, {case.implementation: case for case in report.cases}


@pytest.mark.parametrize(("model", "function"), [("demo", "my_ssd"), ("demo-gdn", "my_gdn")])
def test_the_example_of_the_documents_is_timed(here: Path, model: str, function: str):
    write_example(here)
    name = f"my_kernels:{function}"
    words = f"--seq 512 --layers 0 --dtypes exact --impl unfused,fused,{name}"
    code, shown = call(f"run {model} {words}")
    assert code == 0, shown
    report, found = newest()
    case = found[name]
    assert case.result == "passed", case.why
    assert case.device_us is not None, case.why
    assert report.speedup(case) is not None
    assert case.baseline == "unfused"
    assert [launch.kernel for launch in case.launches] == [function.replace("my_", "") + "_scan"]
    assert case.workspace_bytes is not None


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("illegal", r"illegal memory access"),
        (
            "beyond",
            r"it writes out of bounds, behind a tensor of shape \(1, .*\) that it allocates",
        ),
        ("hanging", r"its first call was stopped after 20 s"),
    ],
)
def test_a_faulty_kernel_is_named_and_the_others_are_timed(here: Path, function: str, reason: str):
    (here / "faulty_kernels.py").write_text(FAULTY)
    name = f"faulty_kernels:{function}"
    words = "--seq 512 --layers 0 --dtypes exact --first-call 20"
    code, shown = call(f"run demo {words} --impl {name},unfused,fused,faulty_kernels:right")
    assert code == 1
    _, found = newest()
    assert re.search(reason, found[name].why), found[name].why
    assert found[name].device_us is None
    for other in ("unfused", "fused", "faulty_kernels:right"):
        assert found[other].result == "passed", found[other].why
        assert found[other].device_us is not None, found[other].why
    assert name in shown
    torch.cuda.synchronize()


@pytest.mark.parametrize("function", ["right", "illegal"])
def test_a_bench_judges_an_own_kernel_too(here: Path, function: str):
    (here / "faulty_kernels.py").write_text(FAULTY)
    words = f"--shape 16x64x128x1 --seq 512 --impl unfused,faulty_kernels:{function}"
    code, shown = call(f"bench ssd {words}")
    assert code == (0 if function == "right" else 1), shown
    assert f"faulty_kernels:{function}" in shown
