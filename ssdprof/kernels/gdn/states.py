"""Memory for final states."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ssdprof.kernels.gdn.inputs import GDNInputs


@dataclass(frozen=True, kw_only=True)
class FinalStates:
    """Shape and strides of the final states of a call: (sequences, HV, K, V) fp32, without gaps."""

    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]

    @classmethod
    def of(cls, inputs: GDNInputs, *, state_v_first: bool) -> FinalStates:
        """state_v_first: V precedes K in memory."""
        shape = inputs.states_shape
        _, heads, key_dim, value_dim = shape
        inner = (1, key_dim) if state_v_first else (value_dim, 1)
        return cls(shape=shape, strides=(heads * key_dim * value_dim, key_dim * value_dim, *inner))

    def empty(self, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor."""
        return torch.empty_strided(self.shape, self.strides, dtype=torch.float32, device=device)
