"""CUDA events, typed."""

from __future__ import annotations

from typing import Protocol, cast

import torch


class CudaEvent(Protocol):
    def record(self) -> None:
        """On the current stream."""

    def synchronize(self) -> None:
        """Wait until the GPU has passed it."""

    def elapsed_time(self, end_event: CudaEvent, /) -> float:
        """Milliseconds from this event to the other."""


def cuda_event() -> CudaEvent:
    """An event that can be timed."""
    return cast(CudaEvent, torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
