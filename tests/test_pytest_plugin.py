"""A kernel's repository has the verdict in its own tests, by a fixture of the package."""

import pytest
from torchrun import python

TESTS = """
import pytest
import torch

from ssdprof.kernels import SSDInputs
from ssdprof.kernels.ssd.reference import ssd_chunked


def my_ssd(inputs):
    exact = ssd_chunked(inputs, torch.float64)
    return exact.out.to(inputs.x.dtype), exact.final_states.float()


def wrong(inputs):
    out, states = my_ssd(inputs)
    return 2 * out, states


@pytest.fixture
def inputs():
    x, dt = torch.randn(1, 20, 2, 16).bfloat16(), torch.rand(1, 20, 2)
    B, C = torch.randn(2, 1, 20, 1, 16).bfloat16()
    return SSDInputs(x=x, dt=dt, A=-torch.ones(2), B=B, C=C)


@pytest.mark.ssdprof(laws="quick")
@pytest.mark.parametrize("kernel", [my_ssd, wrong])
def test_my_kernel(inputs, kernel, ssdprof_judge):
    report = ssdprof_judge(inputs, kernel)
    assert report.report.laws == "quick"
    assert {law.name for law in report.cases[-1].probes} == {"causality", "cut in two"}
"""


@pytest.mark.slow
def test_a_kernel_is_judged_in_the_tests_of_an_empty_repository(tmp_path):
    (tmp_path / "test_my_kernel.py").write_text(TESTS)
    done = python("-m", "pytest", "--strict-markers", "-p", "no:xdist", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert "FAILED: 1 of 2 cases: wrong (exact, fp32 states) inaccurate" in done.stdout
    assert "out, head" in done.stdout
