"""What a call of a fused kernel allocates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.inputs import SSDInputs


class Buffers(NamedTuple):
    """out and final_states are the outputs; the others are None where a call needs none."""

    out: torch.Tensor  # as x
    final_states: torch.Tensor  # (sequences, h, p, n) fp32
    states: torch.Tensor | None  # (sequences, h, p, n): those that are being handed over, where final_states cannot be
    sync: torch.Tensor | None  # int32, zero: tickets and flags
    gates: torch.Tensor | None  # fp32


@dataclass(frozen=True, kw_only=True)
class BufferSizes:
    """out is as large as x.  states_dtype: of the states being handed over, None if final_states serves.

    sync, gates: elements.  Torch aligns new tensors to far more than 16 bytes: no launch has to look where they are.
    """

    states: tuple[int, ...]
    states_dtype: torch.dtype | None
    sync: int
    gates: int = 0

    @classmethod
    def of(cls, inputs: SSDInputs, precision: Precision, *, sync: int, gates: int = 0) -> BufferSizes:
        """sync: 0 if no segment waits for another, which then hands nothing over."""
        passes_on = sync > 0 and precision.state_dtype != torch.float32
        return cls(
            states=(inputs.sequences, *inputs.x.shape[2:], inputs.B.shape[3]),
            states_dtype=precision.state_dtype if passes_on else None,
            sync=sync,
            gates=gates,
        )

    def allocate(self, x: torch.Tensor) -> Buffers:
        """On the current stream.  The flags come first: the GPU zeroes them while the host prepares the launch."""
        device = x.device
        sync = torch.zeros(self.sync, dtype=torch.int32, device=device) if self.sync else None
        states = torch.empty(self.states, dtype=self.states_dtype, device=device) if self.states_dtype else None
        return Buffers(
            out=torch.empty_like(x, memory_format=torch.contiguous_format),
            final_states=torch.empty(self.states, dtype=torch.float32, device=device),
            states=states,
            sync=sync,
            gates=torch.empty(self.gates, dtype=torch.float32, device=device) if self.gates else None,
        )

    @property
    def workspace_bytes(self) -> int:
        """Of what is not output."""
        count = self.states[0] * self.states[1] * self.states[2] * self.states[3]
        return 4 * (self.sync + self.gates) + (self.states_dtype.itemsize * count if self.states_dtype else 0)
