"""What a call allocates, what the process has allocated at most, and how many outputs can be held at once."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.schema import Memory

_peaks_before_reset: dict[int, int] = {}  # device index -> bytes


def run_and_measure(run: Callable[[], SSDOutput], device: torch.device) -> tuple[SSDOutput, Memory | None]:
    """The call's output and, on a GPU, the peak of what the call allocated through torch.

    Meant for an implementation's first call, which also allocates what later calls find.  Waits for the GPU, so that
    an error of a kernel is raised here.
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
    """Let `peak_bytes` begin anew."""
    torch.cuda.reset_peak_memory_stats(device)
    _peaks_before_reset.pop(_index(device), None)


def peak_bytes(device: torch.device) -> int:
    """The most that was allocated through torch on a GPU since `forget_peak`, or since the process began.

    torch's own peak forgets what came before it was last reset, and `run_and_measure` resets it.
    """
    return max(_peaks_before_reset.get(_index(device), 0), torch.cuda.max_memory_allocated(device))


def outputs_that_fit(inputs: SSDInputs) -> int:
    """Outputs that may be held together: those that fill half of the free memory.

    The other half is left to an implementation's workspace and to a block of the oracle.
    """
    (nheads, headdim), dstate = inputs.x.shape[2:], inputs.B.shape[3]
    output_bytes = inputs.x.numel() * inputs.x.element_size() + 4 * inputs.sequences * nheads * headdim * dstate
    return _free_bytes(inputs.x.device) // 2 // output_bytes


def _free_bytes(device: torch.device) -> int:
    """What can still be allocated: on a GPU, what the driver has left and what torch holds unused."""
    if device.type != "cuda":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
