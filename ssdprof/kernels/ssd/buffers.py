"""Outputs and workspace of a call of a fused kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.inputs import SSDInputs


class Buffers(NamedTuple):
    """out and final_states are the outputs.  The others are None if a call does not need them."""

    out: torch.Tensor  # shape and dtype of x
    final_states: torch.Tensor  # (sequences, h, p, n) fp32
    states: torch.Tensor | None  # states that segments pass to others
    sync: torch.Tensor | None  # int32, zeroed: tickets and flags
    gates: torch.Tensor | None  # fp32


@dataclass(frozen=True, kw_only=True)
class BufferSizes:
    """Sizes in elements: states (of state_dtype), sync and gates.  out has the size of x.

    Torch aligns new tensors to far more than 16 bytes, so launches need not check their alignment.
    """

    final_states: tuple[int, ...]
    states: int
    state_dtype: torch.dtype
    sync: int
    gates: int = 0

    @classmethod
    def of(cls, inputs: SSDInputs, precision: Precision, *, states: int, sync: int, gates: int = 0) -> BufferSizes:
        return cls(
            final_states=inputs.states_shape, states=states, state_dtype=precision.state_dtype, sync=sync, gates=gates
        )

    def allocate(self, x: torch.Tensor) -> Buffers:
        """Allocate on the current stream.  The flags come first, so that the GPU zeroes them during the host's work."""
        device = x.device
        sync = torch.zeros(self.sync, dtype=torch.int32, device=device) if self.sync else None
        states = torch.empty(self.states, dtype=self.state_dtype, device=device) if self.states else None
        return Buffers(
            out=torch.empty_like(x, memory_format=torch.contiguous_format),
            final_states=torch.empty(self.final_states, dtype=torch.float32, device=device),
            states=states,
            sync=sync,
            gates=torch.empty(self.gates, dtype=torch.float32, device=device) if self.gates else None,
        )

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace, without the outputs."""
        return 4 * (self.sync + self.gates) + self.state_dtype.itemsize * self.states
