"""The first run of a call: its status, the culprit of a fault, peaks, and the number of outputs in
memory.
"""

from collections.abc import Callable

import pytest
import torch
from measure.conftest import random_inputs

from ssdprof.errors import MissingCapabilityError
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.measure import first_run as module
from ssdprof.measure.first_run import Call, forget_peak, peak_bytes, run_and_measure

GPU = torch.device("cuda")


def faulty() -> SSDOutput:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")


def call_of(inputs: SSDInputs, run: Callable[[], SSDOutput] = faulty) -> Call:
    plan = Plan(variant="portable", launches=1, config={})
    scan = Implementation(operator="ssd", name="scan", run=lambda *_: run(), plan=lambda *_: plan)
    return Call(implementation=scan, inputs=inputs, precision=Precision(), label="scan exact")


def test_an_error_becomes_a_status_and_a_reason():
    output, fields = call_of(random_inputs()).first_run()
    assert (fields["status"], output, fields["variant"]) == ("failed", None, "portable")
    within = call_of.__code__.co_firstlineno + 2
    raised = faulty.__code__.co_firstlineno + 1
    where = f"test_first_run.py:{within} in <lambda>, test_first_run.py:{raised} in faulty"
    message = "CUDA error: an illegal memory access was encountered"
    assert fields["reason"] == f"RuntimeError: {message} ({where})"


def test_an_interrupt_that_c_code_made_another_error_of_is_still_one():
    def interrupted() -> SSDOutput:
        raise SystemError("returned a result with an exception set") from KeyboardInterrupt()

    with pytest.raises(KeyboardInterrupt):
        call_of(random_inputs(), interrupted).first_run()


@pytest.mark.parametrize("lost", [False, True])
def test_a_gpu_that_cannot_be_waited_for_is_lost(monkeypatch, lost):
    """Its culprit is named; an error that leaves the GPU is not touched."""

    def synchronize(_: torch.device):
        if lost:
            raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert module._answers(torch.device("cpu"))
    assert module.blaming(GPU, "fused", lambda: 3) == 3
    with pytest.raises(
        MissingCapabilityError if lost else RuntimeError, match="illegal memory access"
    ) as caught:
        module.blaming(GPU, "fused", faulty)
    assert str(caught.value).startswith("fused left the GPU unusable") == lost


def test_an_error_without_a_message_says_where_it_was_raised():
    """With the frames of an installed package, the first ones and the last one."""
    source = "lambda step, n: step(step, n - 1) if n else next(iter(()))"
    step = eval(compile(source, "/venv/lib/python3.11/site-packages/fla.py", "eval"))
    with pytest.raises(StopIteration) as caught:
        step(step, 9)
    assert module.type_and_message(caught.value.with_traceback(caught.tb.tb_next)) == (
        "StopIteration: no message, raised in fla.py, line 1 (fla.py:1 in <lambda>, "
        "fla.py:1 in <lambda>, fla.py:1 in <lambda>, fla.py:1 in <lambda>, ..., "
        "fla.py:1 in <lambda>)"
    )
    assert module.first_line(RuntimeError()) == "no message, raised outside of Python"
    assert (
        module.first_line(RuntimeError("\n  \nhttps://user:pass@host\nand")) == "https://...@host"
    )


# --- memory


def test_outputs_fill_half_of_the_free_memory(monkeypatch):
    output_bytes = 2 * 100 * 4 * 32 * 2 + 2 * 4 * 32 * 16 * 4
    monkeypatch.setattr(module, "free_memory", lambda _device: 10 * output_bytes)
    assert call_of(random_inputs(batch=2)).outputs_that_fit == 5


@pytest.mark.gpu
def test_workspace_is_the_peak_beyond_the_outputs_and_the_longer_peak_survives():
    size = 64 << 20

    def run() -> SSDOutput:
        workspace = torch.zeros(4 * size, dtype=torch.uint8, device=GPU)
        return SSDOutput(*workspace[: 2 * size].clone().split(size))

    forget_peak(GPU)
    before = torch.cuda.memory_allocated(GPU)
    torch.zeros(10 * size, dtype=torch.uint8, device=GPU)
    _output, measured, late = run_and_measure(run, GPU)
    assert not late
    assert measured == pytest.approx(4 * size, rel=0.05)
    assert peak_bytes(GPU) == pytest.approx(before + 10 * size, rel=0.05)
