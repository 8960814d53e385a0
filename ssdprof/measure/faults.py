"""Classifies errors in kernels: the status of the case, an unusable GPU, or an interrupt."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from ssdprof.errors import MissingCapabilityError
from ssdprof.kernels import UnsupportedError
from ssdprof.measure.call import UnfitError
from ssdprof.schema import Fault

T = TypeVar("T")


def status_of(error: Exception, device: torch.device, culprit: str) -> tuple[Fault, str]:
    """The status of a case whose implementation raised an error, and the reason.

    culprit: the name of the implementation.  Raises what `refuse_if_interrupted` and `refuse_if_lost` raise.
    """
    if isinstance(error, UnfitError):
        return error.status, str(error)
    if isinstance(error, UnsupportedError):
        return "refused", str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out of memory", first_line(error)
    refuse_if_interrupted(error)
    refuse_if_lost(device, culprit, error)
    return "failed", type_and_message(error)


def blaming(device: torch.device, culprit: str, work: Callable[[], T]) -> T:
    """Call `work`.  Raises MissingCapabilityError with the culprit's name if `work` makes the GPU unusable."""
    try:
        return work()
    except Exception as error:
        refuse_if_lost(device, culprit, error)
        raise


def refuse_if_lost(device: torch.device, culprit: str, error: Exception) -> None:
    """Raises MissingCapabilityError if the GPU is unusable for this process.

    After a fault in one kernel, all later CUDA calls fail, and other implementations would be blamed."""
    if not _answers(device):
        raise MissingCapabilityError(
            f"{culprit} left the GPU unusable for this process: {first_line(error)}",
            "Nothing can be measured after that.  Leave it out, and please report it.",
        ) from error


def refuse_if_interrupted(error: Exception) -> None:
    """Raises KeyboardInterrupt if the error was caused by one.

    If a signal arrives during a callback from C code or from a class body, CPython raises a SystemError or
    RuntimeError from the KeyboardInterrupt.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        cause = cause.__cause__


def _answers(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def type_and_message(error: BaseException) -> str:
    """ "RuntimeError: CUDA error: an illegal memory access was encountered"."""
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """The first line of the message that is not empty, or where an error without a message was raised.

    Errors of compilers and of CUDA may fill pages.
    """
    lines = (line for line in str(error).splitlines() if line.strip())
    return next(lines, None) or f"no message, raised {_where(error)}"


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else "outside of Python"
