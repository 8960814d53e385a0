"""Outputs, workspace and prepared launch of a kernel that computes SSD in one launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ssdprof.kernels.inputs import PreparedLaunch
from ssdprof.kernels.launch import Launcher
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput


@dataclass(frozen=True, kw_only=True)
class BufferSizes:
    """Shape of the final states; sizes in elements of the workspace, whose parts are allocated only if they are not 0.

    final_states: None if they overwrite the initial states
    states: that segments pass to others, of state_dtype   sync: tickets and flags, int32, zeroed   gates: fp32

    Torch aligns new tensors to far more than 16 bytes, so launches need not check their alignment.
    """

    final_states: tuple[int, ...] | None
    states: int = 0
    state_dtype: torch.dtype = torch.float32
    sync: int = 0
    gates: int = 0

    def allocate(self, inputs: SSDInputs) -> tuple[Any, ...]:
        """(out, final_states, states, sync, gates), uninitialised, on the current stream.

        The flags come first, so that the GPU zeroes them during the host's work.
        """
        x, device = inputs.x, inputs.x.device
        sync = torch.zeros(self.sync, dtype=torch.int32, device=device) if self.sync else None
        states = torch.empty(self.states, dtype=self.state_dtype, device=device) if self.states else None
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        final_states = inputs.initial_states
        if self.final_states is not None:
            final_states = torch.empty(self.final_states, dtype=torch.float32, device=device)
        gates = torch.empty(self.gates, dtype=torch.float32, device=device) if self.gates else None
        return out, final_states, states, sync, gates

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace, without the outputs."""
        return 4 * (self.sync + self.gates) + self.state_dtype.itemsize * self.states


def prepared(
    launcher: Launcher, programs: int, inputs: SSDInputs, sizes: BufferSizes, tensors: Callable[..., tuple[Any, ...]]
) -> PreparedLaunch:
    """inputs: any of the signature.  tensors: the launch's, of inputs and of the buffers that `sizes` allocates."""
    index = inputs.x.get_device()

    def call(inputs: SSDInputs) -> SSDOutput:
        with torch.cuda.device(index):  # no effect for -1, the CPU
            buffers = sizes.allocate(inputs)
            launcher(programs, *tensors(inputs, *buffers))
        return SSDOutput(*buffers[:2])

    return call
