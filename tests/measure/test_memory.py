"""Peaks, and how many outputs are held."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.measure import memory
from ssdprof.measure.memory import forget_peak, outputs_that_fit, peak_bytes, run_and_measure


def test_outputs_fill_half_of_the_free_memory(
    make_inputs: Callable[..., SSDInputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(batch=2)
    output_bytes = 2 * 100 * 4 * 32 * 2 + 2 * 4 * 32 * 16 * 4
    monkeypatch.setattr(memory, "_free_bytes", lambda _device: 10 * output_bytes)
    assert outputs_that_fit(inputs) == 5


def test_without_a_gpu_there_is_no_peak() -> None:
    output = SSDOutput(torch.zeros(1), torch.zeros(1))
    assert run_and_measure(lambda: output, torch.device("cpu")) == (output, None)


@pytest.mark.gpu
def test_workspace_is_the_peak_beyond_the_outputs_and_the_longer_peak_survives() -> None:
    device, mebibyte = torch.device("cuda"), 1 << 20

    def run() -> SSDOutput:
        workspace = torch.zeros(8 * mebibyte, dtype=torch.uint8, device=device)
        out = torch.zeros(2 * mebibyte, dtype=torch.uint8, device=device)
        return SSDOutput(out + workspace[: len(out)], torch.zeros(mebibyte, dtype=torch.uint8, device=device))

    forget_peak(device)
    before = torch.cuda.memory_allocated(device)
    torch.zeros(100 * mebibyte, dtype=torch.uint8, device=device)
    _output, measured = run_and_measure(run, device)
    assert measured is not None
    assert (measured.peak_bytes, measured.workspace_bytes) == (12 * mebibyte, 9 * mebibyte)
    assert peak_bytes(device) == before + 100 * mebibyte
