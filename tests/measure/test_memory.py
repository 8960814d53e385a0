"""Peaks, and the number of outputs in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.measure import first_run as memory
from ssdprof.measure.first_run import forget_peak, outputs_that_fit, peak_bytes, run_and_measure


def test_outputs_fill_half_of_the_free_memory(
    make_inputs: Callable[..., SSDInputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(batch=2)
    output_bytes = 2 * 100 * 4 * 32 * 2 + 2 * 4 * 32 * 16 * 4
    monkeypatch.setattr(memory, "free_memory", lambda _device: 10 * output_bytes)
    assert outputs_that_fit(inputs) == 5


def test_without_a_gpu_there_is_no_peak() -> None:
    output = SSDOutput(torch.zeros(1), torch.zeros(1))
    assert run_and_measure(lambda: output, torch.device("cpu")) == (output, None)


@pytest.mark.gpu
def test_workspace_is_the_peak_beyond_the_outputs_and_the_longer_peak_survives() -> None:
    device, size = torch.device("cuda"), 64 << 20

    def run() -> SSDOutput:
        workspace = torch.zeros(4 * size, dtype=torch.uint8, device=device)
        return SSDOutput(workspace[:size].clone(), workspace[:size].clone())

    forget_peak(device)
    before = torch.cuda.memory_allocated(device)
    torch.zeros(10 * size, dtype=torch.uint8, device=device)
    _output, measured = run_and_measure(run, device)
    assert measured is not None
    assert measured.peak_bytes == pytest.approx(6 * size, rel=0.05)
    assert measured.workspace_bytes == pytest.approx(4 * size, rel=0.05)
    assert peak_bytes(device) == pytest.approx(before + 10 * size, rel=0.05)
