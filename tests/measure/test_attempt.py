"""The status and the reason of a call that does not run."""

from collections.abc import Callable

import pytest
import torch

from ssdprof.errors import ExitCode, MissingCapabilityError
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Plan
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.measure import first_run as module
from ssdprof.measure.first_run import Call, FirstRun, first_run


def inputs() -> SSDInputs:
    x, dt, B = torch.zeros(1, 4, 2, 16), torch.zeros(1, 4, 2), torch.zeros(1, 4, 1, 16)
    return SSDInputs(x=x, dt=dt, A=torch.zeros(2), B=B, C=B, chunk_size=16)


def faulty() -> SSDOutput:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")


def attempted(run: Callable[[], SSDOutput] = faulty) -> FirstRun:
    call = Call(
        implementation="scan",
        label="scan exact",
        inputs=inputs(),
        precision=Precision(),
        run=run,
        plan=lambda: Plan(variant="portable", launches=1, config={}),
    )
    return first_run(call)


def test_an_error_becomes_a_status_and_a_reason() -> None:
    tried = attempted()
    assert (tried.status, tried.output, tried.variant) == ("failed", None, "portable")
    assert tried.reason == "RuntimeError: CUDA error: an illegal memory access was encountered"


def test_but_after_one_that_costs_the_gpu_nothing_else_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_answers", lambda _: False)
    with pytest.raises(
        MissingCapabilityError, match="scan left the GPU unusable for this process: CUDA error"
    ) as caught:
        attempted()
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == ExitCode.MISSING_CAPABILITY


def test_an_interrupt_that_c_code_made_another_error_of_is_still_one() -> None:
    def interrupted() -> SSDOutput:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as interrupt:
            raise SystemError("returned a result with an exception set") from interrupt

    with pytest.raises(KeyboardInterrupt):
        attempted(interrupted)
