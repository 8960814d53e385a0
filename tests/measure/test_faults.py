"""A fault that makes the GPU unusable names the kernel; any other error is unchanged."""

import re
from collections.abc import Callable

import pytest
import torch

from ssdprof.errors import MissingCapabilityError
from ssdprof.measure import first_run as faults

GPU = torch.device("cuda")


def faulty() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")


def raising(error: Exception | None) -> Callable[[torch.device], None]:
    def synchronize(_: torch.device) -> None:
        if error is not None:
            raise error

    return synchronize


@pytest.mark.parametrize(
    ("error", "lost"), [(None, False), (RuntimeError("CUDA error"), True)], ids=["answers", "lost"]
)
def test_a_gpu_that_cannot_be_waited_for_is_lost(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, lost: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", raising(error))
    assert faults._answers(GPU) is not lost
    assert faults._answers(torch.device("cpu"))


def test_the_culprit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", raising(RuntimeError("CUDA error")))
    with pytest.raises(
        MissingCapabilityError, match=r"^fused left the GPU unusable for this process: CUDA error: an il"
    ):
        faults.blaming(GPU, "fused", faulty)


def test_an_error_that_leaves_the_gpu_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", raising(None))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        faults.blaming(GPU, "fused", faulty)
    assert faults.blaming(GPU, "fused", lambda: 3) == 3


def test_an_error_without_a_message_says_where_it_was_raised() -> None:
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError
    assert re.fullmatch(
        r"RuntimeError: no message, raised in test_faults\.py, line \d+", faults.type_and_message(caught.value)
    )
    assert faults.first_line(RuntimeError()) == "no message, raised outside of Python"


def test_empty_lines_before_a_message_are_left_out() -> None:
    assert faults.first_line(RuntimeError("\n  \nptxas failed\nand more")) == "ptxas failed"
