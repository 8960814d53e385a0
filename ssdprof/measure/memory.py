"""The memory that a call allocates, the peak of the process, and the number of outputs that fit in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ssdprof import operators
from ssdprof.environment.machine import free_memory
from ssdprof.operators import tensors
from ssdprof.operators.operator import Output
from ssdprof.schema import Memory

_peaks_before_reset: dict[int, int] = {}  # device index -> bytes


def run_and_measure(run: Callable[[], Output], device: torch.device) -> tuple[Output, Memory | None]:
    """The call's output and, on a GPU, the peak of its allocations through torch.

    Meant for an implementation's first call, which also allocates memory that later calls reuse.  Waits for the GPU, so
    that an error of a kernel is raised here.
    """
    if device.type != "cuda":
        return run(), None
    torch.cuda.synchronize(device)
    _peaks_before_reset[_index(device)] = peak_bytes(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    output = run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    outputs = sum(tensor.untyped_storage().nbytes() for tensor in output)
    return output, Memory(peak_bytes=peak, workspace_bytes=max(0, peak - outputs))


def forget_peak(device: torch.device) -> None:
    """Reset `peak_bytes`."""
    torch.cuda.reset_peak_memory_stats(device)
    _peaks_before_reset.pop(_index(device), None)


def peak_bytes(device: torch.device) -> int:
    """The peak of torch's allocations on a GPU since `forget_peak`, or since the process began.

    torch's own peak forgets what came before it was last reset, and `run_and_measure` resets it.
    """
    return max(_peaks_before_reset.get(_index(device), 0), torch.cuda.max_memory_allocated(device))


def outputs_that_fit(inputs: Any) -> int:
    """The number of outputs that fit in half of the free memory.

    The other half is for an implementation's workspace and for a block of the oracle.
    """
    output_bytes = sum(form.nbytes for form in operators.of(inputs).judged.forms(inputs))
    return free_memory(tensors.device(inputs)) // 2 // output_bytes


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
